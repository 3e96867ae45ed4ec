"""Losses: pure functions `(out, batch, *, options) -> (x, metrics)`, x at the term's level, before its weight.

T = tokens. Entry t of a [T] column belongs to the prediction of token t. Metrics are detached and weighted like x.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ratchet.batch import Batch
from ratchet.errors import ConfigError
from ratchet.interfaces import Outputs

Metrics = dict[str, Tensor]


def nll(out: Outputs, batch: Batch) -> tuple[Tensor, Metrics]:
    """-log p(token): supervised fine-tuning, maximum likelihood. Token level."""
    return -out.need("logprobs"), {}


def clipped_surrogate(
    out: Outputs, batch: Batch, *, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> tuple[Tensor, Metrics]:
    """-min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A), ratio = exp(logprobs - old_logprobs). Token level.

    PPO (arXiv:1707.06347) eq. 7; asymmetric clip as in DAPO (arXiv:2503.14476) eq. 8; `dual_clip=c > 1` bounds the loss of
    a negative advantage by -c A (arXiv:1912.09729, eq. 5).
    """
    log_ratio_T = out.need("logprobs") - out.need("old_logprobs")
    ratio_T = log_ratio_T.exp()
    advantages_T = batch.need("advantages")
    plain_T = ratio_T * advantages_T
    clipped_T = ratio_T.clamp(1 - clip_low, 1 + clip_high) * advantages_T
    surrogate_T = torch.minimum(plain_T, clipped_T)
    if dual_clip is not None:
        floor_T = dual_clip * advantages_T
        surrogate_T = torch.where(advantages_T < 0, torch.maximum(surrogate_T, floor_T), surrogate_T)
    with torch.no_grad():
        metrics = {
            "ratio": ratio_T.detach(),
            "clipped": (surrogate_T != plain_T).to(ratio_T.dtype),
            "old_kl": ratio_T - 1 - log_ratio_T,  # k3 estimate of KL(old || live), http://joschu.net/blog/kl-approx.html
            # What sampler and learner disagree by, beyond rounding, is a fault of one of them.
            "sampler_gap": (out.need("old_logprobs") - batch.rollout_logprobs_T).abs(),
        }
    return -surrogate_T, metrics


def kl_penalty(
    out: Outputs, batch: Batch, *, objective: Literal["reverse", "forward"], estimator: Literal["k1", "k2", "k3"]
) -> tuple[Tensor, Metrics]:
    """A penalty whose expected gradient, over tokens drawn from the old policy, is that of the named objective. Token level.

    reverse: KL(policy || reference); forward: KL(reference || policy) (estimator k3 alone). With d = log(policy/reference):
    k1 = d, k2 = d^2/2, k3 = exp(-d) - 1 + d (http://joschu.net/blog/kl-approx.html). Differentiating k1 or k3 as they stand
    gives 0 and the *forward* KL; so the importance ratio w = policy/old multiplies them, with its gradient for reverse k1
    and k3 (the score function then acts), detached for k2 and for forward k3, whose own derivatives are already right.
    The value is an unbiased estimate of the named KL for reverse k1 and k3; for k2 and for forward k3 only the gradient is.
    Raises ConfigError for forward k1 and k2, whose gradients are those of no forward KL.
    """
    if objective == "forward" and estimator != "k3":
        raise ConfigError(f"objective=forward has no estimator {estimator}: use k3")
    logprobs_T = out.need("logprobs")
    d_T = logprobs_T - batch.need("ref_logprobs")
    ratio_T = (logprobs_T - out.need("old_logprobs")).exp()
    k3_T = (-d_T).exp() - 1 + d_T
    k_T = {"k1": d_T, "k2": d_T.square() / 2, "k3": k3_T}[estimator]
    through_ratio = objective == "reverse" and estimator != "k2"
    weight_T = ratio_T if through_ratio else ratio_T.detach()
    return weight_T * k_T, {"kl": (ratio_T * k3_T).detach()}


def entropy_bonus(out: Outputs, batch: Batch) -> tuple[Tensor, Metrics]:
    """-H(policy at token t), exact over the vocabulary, under the row's temperature; minimising it raises entropy. [T]."""
    entropy_T = out.need("entropy")
    return -entropy_T, {"entropy": entropy_T.detach()}
