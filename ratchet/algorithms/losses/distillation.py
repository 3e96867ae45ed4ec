"""Knowledge distillation losses: divergences between teacher and student.

T = tokens, N = trainable tokens, K = outcomes: either the whole vocabulary, or the teacher's top-k
tokens and "any other", which has the remaining probability. The top-k divergence is a lower bound
of the divergence over the vocabulary (except adaptive), and approaches it as k grows.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ratchet.algorithms.losses.common import Metrics
from ratchet.batch import Batch
from ratchet.protocols import Outputs

Objective = Literal[
    "forward", "reverse", "js", "skewed_forward", "skewed_reverse", "mixed", "adaptive"
]


def divergence(
    out: Outputs,
    batch: Batch,
    *,
    objective: Objective = "forward",
    mix: float = 0.5,
    clip: float | None = None,
    ending: str = "",
) -> tuple[Tensor, Metrics]:
    """Return the divergence between teacher p and student q at each trainable token. Token level.

    forward: KL(p || q)
    reverse: KL(q || p)
    mixed: mix KL(p || q) + (1 - mix) KL(q || p)
    js: mix KL(p || m) + (1 - mix) KL(q || m), where m = mix p + (1 - mix) q: generalised
      Jensen-Shannon (GKD, arXiv:2306.13649, eq. 2)
    skewed_forward: KL(p || mix p + (1 - mix) q) (DistiLLM, arXiv:2402.03898, eq. 4)
    skewed_reverse: KL(q || (1 - mix) p + mix q) (DistiLLM, eq. 5)
    adaptive: a KL(p || q) + (1 - a) KL(q || p), where a = g_head / (g_head + g_tail) has no
      gradient and g is the sum of |p - q| over outcomes. The head are the likeliest outcomes of p
      whose total probability reaches mix (adaptive KL, arXiv:2404.02657)

    With `clip`, a token's loss is min(divergence, clip), so that a token above it has no gradient.
    `teacher_topk_logprobs` (with `ending`) of the batch and `topk_logprobs` of the student, [T, K],
    cover the same outcomes.
    """
    mask_T = batch.trainable_T
    p_NK = batch.need(f"teacher_topk_logprobs{ending}")[mask_T]
    q_NK = out.need("topk_logprobs")[mask_T]
    forward_N = kl(p_NK, q_NK)
    x_N = {
        "forward": lambda: forward_N,
        "reverse": lambda: kl(q_NK, p_NK),
        "mixed": lambda: mix * forward_N + (1 - mix) * kl(q_NK, p_NK),
        "js": lambda: _compute_jensen_shannon(p_NK, q_NK, mix),
        "skewed_forward": lambda: kl(p_NK, _blend(p_NK, q_NK, mix)),
        "skewed_reverse": lambda: kl(q_NK, _blend(q_NK, p_NK, mix)),
        "adaptive": lambda: _compute_adaptive(p_NK, q_NK, mix, has_rest=_has_rest(batch)),
    }[objective]()
    if clip is not None:
        x_N = x_N.clamp(max=clip)
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


def _has_rest(batch: Batch) -> bool:
    """True if the last outcome stands for all tokens outside the teacher's top-k."""
    if not batch.has("teacher_ids"):
        return False
    n_outcomes = batch.need("teacher_topk_logprobs").shape[1]
    return batch.need("teacher_ids").shape[1] < n_outcomes


def _compute_adaptive(p_NK: Tensor, q_NK: Tensor, mix: float, *, has_rest: bool) -> Tensor:
    """Return the adaptive KL of each token [N].

    `has_rest`: the last outcome is "any other". It is sorted last, because each of its tokens is
    less likely than all others.
    """
    with torch.no_grad():
        likelihood_NK = p_NK.clone()
        if has_rest:
            likelihood_NK[:, -1] = -torch.inf
        order_NK = likelihood_NK.argsort(dim=-1, descending=True, stable=True)
        sorted_p_NK = p_NK.exp().gather(-1, order_NK)
        # An outcome belongs to the head if those before it do not reach the total yet.
        head_NK = sorted_p_NK.cumsum(-1) - sorted_p_NK < mix
        gap_NK = (p_NK.exp() - q_NK.exp()).abs().gather(-1, order_NK)
        head_gap_N, gap_N = (gap_NK * head_NK).sum(-1), gap_NK.sum(-1)
        # Equal distributions have no gap: then both divergences are 0.
        share_N = torch.where(gap_N > 0, head_gap_N / gap_N, 0.5)
    return share_N * kl(p_NK, q_NK) + (1 - share_N) * kl(q_NK, p_NK)
