"""Knowledge distillation losses: divergences between teacher and student.

T = tokens, N = trainable tokens, K = outcomes: either the whole vocabulary, or the teacher's top-k
tokens and "any other", which has the remaining probability. The top-k divergence is a lower bound
of the divergence over the vocabulary, and approaches it as k grows.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ratchet.algorithms.losses.common import Metrics
from ratchet.batch import Batch
from ratchet.protocols import Outputs

Objective = Literal["forward", "reverse", "js", "skewed_forward", "skewed_reverse", "mixed"]


def divergence(
    out: Outputs, batch: Batch, *, objective: Objective = "forward", mix: float = 0.5
) -> tuple[Tensor, Metrics]:
    """Return the divergence between teacher p and student q at each trainable token. Token level.

    forward: KL(p || q)
    reverse: KL(q || p)
    mixed: mix KL(p || q) + (1 - mix) KL(q || p)
    js: mix KL(p || m) + (1 - mix) KL(q || m), where m = mix p + (1 - mix) q: generalised
      Jensen-Shannon (GKD, arXiv:2306.13649, eq. 2)
    skewed_forward: KL(p || mix p + (1 - mix) q) (DistiLLM, arXiv:2402.03898, eq. 4)
    skewed_reverse: KL(q || (1 - mix) p + mix q) (DistiLLM, eq. 5)

    `teacher_topk_logprobs` of the batch and `topk_logprobs` of the student, [T, K], cover the same
    outcomes.
    """
    mask_T = batch.trainable_T
    p_NK = batch.need("teacher_topk_logprobs")[mask_T]
    q_NK = out.need("topk_logprobs")[mask_T]
    forward_N = kl(p_NK, q_NK)
    x_N = {
        "forward": lambda: forward_N,
        "reverse": lambda: kl(q_NK, p_NK),
        "mixed": lambda: mix * forward_N + (1 - mix) * kl(q_NK, p_NK),
        "js": lambda: _compute_jensen_shannon(p_NK, q_NK, mix),
        "skewed_forward": lambda: kl(p_NK, _blend(p_NK, q_NK, mix)),
        "skewed_reverse": lambda: kl(q_NK, _blend(q_NK, p_NK, mix)),
    }[objective]()
    x_T, forward_T = (
        torch.zeros_like(mask_T, dtype=x_N.dtype).masked_scatter(mask_T, x)
        for x in (x_N, forward_N.detach())
    )
    return x_T, {"forward_kl": forward_T}


def kl(p_NK: Tensor, q_NK: Tensor) -> Tensor:
    """Return KL(p || q) over the last dimension, from log-probabilities. [N, K] -> [N]

    An outcome with probability 0 under p (-inf) adds 0.
    """
    possible_NK = p_NK > -torch.inf
    safe_NK = torch.where(possible_NK, p_NK, 0.0)
    return torch.where(possible_NK, safe_NK.exp() * (safe_NK - q_NK), 0.0).sum(-1)


def _blend(a_NK: Tensor, b_NK: Tensor, share: float) -> Tensor:
    """Return log(share a + (1 - share) b), from log-probabilities a and b.

    The clamp keeps the result finite where both are -inf: the gradient of logaddexp(-inf, -inf) is
    NaN.
    """
    log_share = torch.tensor([share, 1 - share], dtype=a_NK.dtype, device=a_NK.device).log()
    return torch.logaddexp(
        a_NK.clamp(min=torch.finfo(a_NK.dtype).min) + log_share[0], b_NK + log_share[1]
    )


def _compute_jensen_shannon(p_NK: Tensor, q_NK: Tensor, mix: float) -> Tensor:
    middle_NK = _blend(p_NK, q_NK, mix)
    return mix * kl(p_NK, middle_NK) + (1 - mix) * kl(q_NK, middle_NK)
