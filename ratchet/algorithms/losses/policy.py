"""The policy losses (PPO clip, REINFORCE, GSPO, CISPO, ...), which are minimised.

They are pure functions `(out, batch, *, options) -> (x, metrics)`, see `losses.common`. x is
proportional to A under positive factors (`kimi`: except for its second summand), so a rollout
correction may multiply x instead of A. Every exponential is bounded (`ratchet.algorithms.ratios`),
so values and gradients are finite.

T = tokens, S = sequences (rows). p = probability of a token under the policy, log p = logprobs,
r_t = exp(logprobs - old_logprobs) = the importance ratio, A = advantages, sg = stop gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ratchet.algorithms.losses.common import Metrics, row_mean, row_sum
from ratchet.algorithms.ratios import bounded_ratio, k3
from ratchet.batch import Batch
from ratchet.protocols import Outputs


def clipped_surrogate(
    out: Outputs, batch: Batch, *, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> tuple[Tensor, Metrics]:
    """Return PPO's clipped loss -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A). Token level.

    r = exp(logprobs - old_logprobs). PPO clip (arXiv:1707.06347) eq. 7. Unequal bounds are the
    clip-higher of DAPO (arXiv:2503.14476) eq. 8. `dual_clip=c > 1` bounds the loss of a negative
    advantage by -c A (dual-clip PPO, arXiv:1912.09729, eq. 5).
    """
    ratio_T = bounded_ratio(_compute_log_ratio(out))
    advantages_T = batch.need("advantages")
    unclipped_T = ratio_T * advantages_T
    clipped_T = ratio_T.clamp(1 - clip_low, 1 + clip_high) * advantages_T
    surrogate_T = torch.minimum(unclipped_T, clipped_T)
    if dual_clip is not None:
        floor_T = dual_clip * advantages_T
        surrogate_T = torch.where(
            advantages_T < 0, torch.maximum(surrogate_T, floor_T), surrogate_T
        )
    return -surrogate_T, _compute_metrics(out, batch, clipped=surrogate_T != unclipped_T)


def reinforce(out: Outputs, batch: Batch) -> tuple[Tensor, Metrics]:
    """Return -A log p, without ratio or clip. REINFORCE (Williams, 1992). Token level."""
    return -batch.need("advantages") * out.need("logprobs"), _compute_metrics(out, batch)


def gspo(
    out: Outputs, batch: Batch, *, clip_low: float, clip_high: float
) -> tuple[Tensor, Metrics]:
    """Return the GSPO loss -min(s A, clip(s, 1 - clip_low, 1 + clip_high) A). Sequence level.

    s = exp(mean over the row of log r_t), the length-normalised importance ratio of the sequence. A
    is the mean of the row's advantages. GSPO (arXiv:2507.18071) eq. 5 to 7.
    """
    ratio_S = bounded_ratio(row_mean(out, batch, _compute_log_ratio(out)))
    advantages_S = row_mean(out, batch, batch.need("advantages"))
    unclipped_S = ratio_S * advantages_S
    surrogate_S = torch.minimum(
        unclipped_S, ratio_S.clamp(1 - clip_low, 1 + clip_high) * advantages_S
    )
    return -surrogate_S, _compute_sequence_metrics(
        out, batch, ratio_S, clipped=surrogate_S != unclipped_S
    )


def gspo_token(
    out: Outputs, batch: Batch, *, clip_low: float, clip_high: float
) -> tuple[Tensor, Metrics]:
    """Return -min(s_t A_t, clip(s_t, 1 - clip_low, 1 + clip_high) A_t). Token level.

    s_t = sg[s] r_t / sg[r_t] has the value of GSPO's sequence ratio s and the gradient of the token
    ratio, so that each token may have its own advantage. GSPO-token (arXiv:2507.18071) eq. 13, 14.
    """
    mean_log_ratio_S = row_mean(out, batch, _compute_log_ratio(out)).detach()
    logprobs_T = out.need("logprobs")
    # logprobs - sg[logprobs] is 0 and has the gradient of log r_t. log r_t - sg[log r_t] would do
    # the same, but it is NaN if log r_t is infinite.
    ratio_T = bounded_ratio(mean_log_ratio_S[batch.sequence_T] + (logprobs_T - logprobs_T.detach()))
    advantages_T = batch.need("advantages")
    unclipped_T = ratio_T * advantages_T
    surrogate_T = torch.minimum(
        unclipped_T, ratio_T.clamp(1 - clip_low, 1 + clip_high) * advantages_T
    )
    return -surrogate_T, _compute_metrics(out, batch, clipped=surrogate_T != unclipped_T)


def cispo(
    out: Outputs, batch: Batch, *, clip_low: float | None, clip_high: float
) -> tuple[Tensor, Metrics]:
    """Return the CISPO loss -sg[clip(r, 1 - clip_low, 1 + clip_high)] A log p. Token level.

    The clip bounds the importance weight of a token, but never sets its gradient to 0. CISPO
    (MiniMax-M1, arXiv:2506.13585) eq. 4, 5. `clip_low=None`: no lower bound.
    """
    ratio_T = bounded_ratio(_compute_log_ratio(out).detach())
    weight_T = ratio_T.clamp(None if clip_low is None else 1 - clip_low, 1 + clip_high)
    x_T = -weight_T * batch.need("advantages") * out.need("logprobs")
    return x_T, _compute_metrics(out, batch, clipped=weight_T != ratio_T)


def topr(
    out: Outputs, batch: Batch, *, negative_low: float = 0.0, negative_high: float = 1.0
) -> tuple[Tensor, Metrics]:
    """Return the TOPR loss -w A log p, where w = 1 for A >= 0. Token level.

    For A < 0, w = sg[clip(product of r over the row, negative_low, negative_high)]. So a wrong
    answer loses weight as the policy becomes less likely to give it. TOPR (arXiv:2503.14286) eq. 5.
    """
    ratio_S = bounded_ratio(row_sum(out, batch, _compute_log_ratio(out)).detach())
    weight_S = ratio_S.clamp(negative_low, negative_high)
    advantages_T = batch.need("advantages")
    clipped_T = (advantages_T < 0) & (weight_S != ratio_S)[batch.sequence_T]
    weight_T = torch.where(advantages_T < 0, weight_S[batch.sequence_T], 1.0)
    return -weight_T * advantages_T * out.need("logprobs"), _compute_metrics(
        out, batch, clipped=clipped_T
    )


def gmpo(
    out: Outputs, batch: Batch, *, clip_low: float, clip_high: float
) -> tuple[Tensor, Metrics]:
    """Return the GMPO loss -A exp(mean over the row of c_t). Sequence level.

    c_t = min(log r_t, clip_high) for A > 0, and max(log r_t, -clip_low) for A < 0. So the exp is
    the geometric mean of clipped ratios. A is the mean of the row's advantages. GMPO
    (arXiv:2507.20673) eq. 4.
    """
    log_ratio_T = _compute_log_ratio(out)
    advantages_S = row_mean(out, batch, batch.need("advantages"))
    # The clip applies from above for A > 0, and from below for A < 0.
    bounded_T = log_ratio_T.clamp(-clip_low, clip_high)
    signs_T = advantages_S.sign()[batch.sequence_T]
    clipped_log_ratio_T = torch.where(
        signs_T > 0, torch.minimum(log_ratio_T, bounded_T), log_ratio_T
    )
    clipped_log_ratio_T = torch.where(
        signs_T < 0, torch.maximum(log_ratio_T, bounded_T), clipped_log_ratio_T
    )
    ratio_S = bounded_ratio(row_mean(out, batch, clipped_log_ratio_T))
    is_clipped_T = (clipped_log_ratio_T != log_ratio_T).to(log_ratio_T.dtype)
    clipped_share_S = row_mean(out, batch, is_clipped_T)
    return -advantages_S * ratio_S, _compute_sequence_metrics(
        out, batch, ratio_S, clipped=clipped_share_S
    )


def sapo(
    out: Outputs, batch: Batch, *, tau_pos: float = 1.0, tau_neg: float = 1.05
) -> tuple[Tensor, Metrics]:
    """Return the SAPO loss -A sigmoid(tau (r - 1)) 4 / tau. Token level.

    tau = tau_pos for A > 0, else tau_neg. The sigmoid is a soft gate in place of the PPO clip; its
    slope at r = 1 is 1. SAPO (arXiv:2511.20347) eq. 5, 6.
    """
    advantages_T = batch.need("advantages")
    tau_T = torch.full_like(advantages_T, tau_neg).masked_fill(advantages_T > 0, tau_pos)
    gate_T = torch.sigmoid(tau_T * (bounded_ratio(_compute_log_ratio(out)) - 1)) * 4 / tau_T
    return -gate_T * advantages_T, _compute_metrics(out, batch)


def kimi(out: Outputs, batch: Batch, *, tau: float) -> tuple[Tensor, Metrics]:
    """Return the Kimi k1.5 loss -sum(A_t log p_t) + tau / 2 (sum(log r_t))^2. Sequence level.

    The sums are over the trainable tokens of the row. This is policy mirror descent around the old
    policy. Kimi k1.5 (arXiv:2501.12599) eq. 3.
    """
    log_ratio_S = row_sum(out, batch, _compute_log_ratio(out))
    policy_gradient_S = row_sum(out, batch, batch.need("advantages") * out.need("logprobs"))
    metrics = _compute_sequence_metrics(
        out, batch, bounded_ratio(log_ratio_S), clipped=torch.zeros_like(log_ratio_S)
    )
    return tau / 2 * log_ratio_S.square() - policy_gradient_S, metrics


def _compute_log_ratio(out: Outputs) -> Tensor:
    """Return log r_t."""
    return out.need("logprobs") - out.need("old_logprobs")


@torch.no_grad()
def _compute_metrics(out: Outputs, batch: Batch, *, clipped: Tensor | None = None) -> Metrics:
    """Return the metrics of a loss at token level.

    Args:
        clipped: True at tokens that the clip changes; None for a loss without a clip.
    """
    log_ratio_T = _compute_log_ratio(out)
    ratio_T = bounded_ratio(log_ratio_T)
    metrics = {
        "ratio": ratio_T,
        "old_kl": k3(-log_ratio_T),  # estimates KL(old policy || current policy)
        # |learner - sampler|. A gap larger than rounding errors points to stale weights or a bug.
        "sampler_gap": (out.need("old_logprobs") - batch.rollout_logprobs_T).abs(),
    }
    return metrics if clipped is None else {**metrics, "clipped": clipped.to(ratio_T.dtype)}


@torch.no_grad()
def _compute_sequence_metrics(
    out: Outputs, batch: Batch, ratio_S: Tensor, *, clipped: Tensor
) -> Metrics:
    """Return the metrics of a loss at sequence level.

    They are the row means of `_compute_metrics`, but `ratio` and `clipped` are the arguments.
    """
    row_means = {
        name: row_mean(out, batch, column) for name, column in _compute_metrics(out, batch).items()
    }
    return {**row_means, "ratio": ratio_S.detach(), "clipped": clipped.to(ratio_S.dtype)}
