"""Rollout correction: importance sampling weights and masks for off-policy samples (TIS, IcePop).

The sampler's distribution differs from the learner's because of the inference engine, precision,
older weights or truncated sampling (top-p, top-k). The weights and the mask are columns without
gradient, computed once for the batch.

T = tokens, S = sequences. d_t = log(learner's old policy / sampling distribution) at trainable
token t.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from ratchet.algorithms.base import AlgoState
from ratchet.algorithms.config.policy_losses import CorrectionLevel, Denominator
from ratchet.algorithms.losses.common import Metrics
from ratchet.algorithms.ratios import bounded_ratio, k3
from ratchet.batch import Batch
from ratchet.protocols import Outputs


def correct(
    batch: Batch,
    state: AlgoState,
    *,
    weight: CorrectionLevel = "token",
    weight_low: float = 0.0,
    weight_high: float | None = 2.0,
    mask: CorrectionLevel = "none",
    mask_low: float = 0.5,
    mask_high: float = 2.0,
    mask_denominator: Denominator = "all",
) -> Batch:
    """Fill the column `correction` [T] = clip(exp(D), weight_low, weight_high), float64.

    This is truncated importance sampling, TIS (https://fengyao.notion.site/off-policy-rl).

    weight: the level of D. "token": d_t itself. "turn" and "sequence": the sum of d_t over the turn
      or sequence. "geometric": the mean of d_t over the sequence, which does not grow with length.
      "none": D = 0, so that every weight is 1.
    mask: the level of D at which tokens with exp(D) outside [mask_low, mask_high] are masked.
    mask_denominator: "all": masked tokens get weight 0, and means over the batch still count them.
      "kept": masked tokens leave the final mask, so that means do not count them.

    If all tokens of a row share one weight, the column `correction_S` [S] holds it too.

    IcePop (arXiv:2510.18855) is weight="token", weight_high=None, mask="token" and
    mask_denominator="all". Masked importance sampling of sequences, MIS
    (https://richardli.xyz/rl-collapse), is mask="sequence" or "geometric". Rejection sampling, as
    verl's `rollout_rs`, is mask_denominator="kept".
    """
    mask_T = batch.trainable_T
    sampler_logprobs_T = batch.rollout_logprobs_T.double() - batch.log_kept_mass_T.double()
    gap_T = torch.where(mask_T, batch.need("old_logprobs").double() - sampler_logprobs_T, 0.0)
    ratio_T = bounded_ratio(_aggregate_gap(batch, gap_T, weight))
    clipped_T = ratio_T if weight == "none" else ratio_T.clamp(weight_low, weight_high)
    weight_T = torch.where(mask_T, clipped_T, 0.0)
    kept_T = mask_T
    if mask != "none":
        mask_ratio_T = bounded_ratio(_aggregate_gap(batch, gap_T, mask))
        kept_T = mask_T & (mask_ratio_T >= mask_low) & (mask_ratio_T <= mask_high)
    batch = _note_correction(batch, gap_T, ratio_T, weight_T, kept_T)
    if mask_denominator == "all":
        weight_T = torch.where(kept_T, weight_T, 0.0)
        kept_T = mask_T
    if weight in ("none", "sequence", "geometric"):
        # The trainable tokens of a row share one weight. The maximum picks it.
        trained_weight_T = torch.where(mask_T, weight_T, -torch.inf)
        weight_S = torch.full((batch.n_sequences,), -torch.inf, dtype=torch.float64)
        weight_S = weight_S.scatter_reduce(0, batch.sequence_T, trained_weight_T, "amax")
        batch = batch.fill_sequences(correction_S=torch.where(weight_S > -torch.inf, weight_S, 1.0))
    return replace(batch, trainable_T=kept_T).fill_tokens(correction=weight_T)


def _aggregate_gap(batch: Batch, gap_T: Tensor, level: CorrectionLevel) -> Tensor:
    """Return D of each token at a level, from its d_t. [T]"""
    if level == "none":
        return torch.zeros_like(gap_T)
    if level == "token":
        return gap_T
    if level == "turn":
        keys_T = torch.stack([batch.sequence_T, batch.turn_T.long()], dim=1)
        keys, turn_T = torch.unique(keys_T, dim=0, return_inverse=True)
        return gap_T.new_zeros(len(keys)).index_add(0, turn_T, gap_T)[turn_T]
    total_S = batch.sequence_sum(gap_T)
    if level == "geometric":
        total_S = total_S / batch.sequence_sum(batch.trainable_T.double()).clamp(min=1)
    return total_S[batch.sequence_T]


def _note_correction(
    batch: Batch, gap_T: Tensor, ratio_T: Tensor, weight_T: Tensor, kept_T: Tensor
) -> Batch:
    """Return the batch with metrics of the gap d_t, the importance weights and the mask."""
    mask_T = batch.trainable_T
    if not bool(mask_T.any()):
        return batch
    gap_N = gap_T[mask_T]
    weight_N = weight_T[mask_T]
    metrics = {
        "gap_mean": gap_N.abs().mean(),
        "kl": k3(-gap_N).mean(),  # estimates KL(sampler || learner)
        "weight_mean": weight_N.mean(),
        "weight_max": weight_N.max(),
        "clipped_share": (weight_N != ratio_T[mask_T]).double().mean(),
        "masked_share": 1 - kept_T[mask_T].double().mean(),
    }
    return batch.with_metrics(
        **{f"correction/{name}": float(value) for name, value in metrics.items()}
    )


def apply_correction(
    out: Outputs,
    batch: Batch,
    *,
    fn: Callable[[Outputs, Batch], tuple[Tensor, Metrics]],
    level: Literal["token", "sequence"] = "token",
) -> tuple[Tensor, Metrics]:
    """Return the values of a loss times the importance weight (`correction`) at the same level.

    fn: the loss, with one value per token or per sequence, as `level` says.
    """
    x, metrics = fn(out, batch)
    return x * batch.need("correction" if level == "token" else "correction_S"), metrics


def apply_correction_mask(
    out: Outputs, batch: Batch, *, fn: Callable[[Outputs, Batch], tuple[Tensor, Metrics]]
) -> tuple[Tensor, Metrics]:
    """Return the values of a token-level loss, with 0 for tokens that the correction masks.

    Other values get no importance weight, because such a loss (entropy, NLL) is not an expectation
    over sampled tokens.
    """
    x, metrics = fn(out, batch)
    return torch.where(batch.need("correction") != 0, x, 0.0), metrics
