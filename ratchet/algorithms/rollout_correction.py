"""Rollout correction: importance weights and masks for a sampler that differs from the learner.

They differ by engine, precision, older weights or a truncated sampling distribution. T = tokens,
S = sequences. d_t = log(learner's old policy / distribution that the sampler drew from), on
trainable tokens. The weight and the mask are columns, computed once over the batch and detached.
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

    weight: the level of D. "token": d_t itself; "turn" and "sequence": its sum; "geometric": its
      mean over the sequence. A sum over a row grows with its length; the mean doesn't.
    mask: the level of D at which tokens with exp(D) outside [mask_low, mask_high] are masked.
    mask_denominator: "all": masked tokens have weight 0, and means over the batch still count them.
      "kept": they leave the final mask, numerators and denominators alike.

    If all tokens of a row share one weight, `correction_S` [S] holds it too.

    The weight is truncated importance sampling (https://fengyao.notion.site/off-policy-rl). IcePop
    (arXiv:2510.18855) is weight="token", weight_high=None, mask="token", mask_denominator="all":
    the weight is the ratio inside the bounds and 0 outside, and the means count every token. Masked
    importance sampling of whole sequences (https://richardli.xyz/rl-collapse) is mask="sequence" or
    "geometric". "kept" is rejection sampling, like verl's `rollout_rs`.
    """
    mask_T = batch.trainable_T
    sampler_T = batch.rollout_logprobs_T.double() - batch.log_kept_mass_T.double()
    gap_T = torch.where(mask_T, batch.need("old_logprobs").double() - sampler_T, 0.0)
    ratio_T = bounded_ratio(_at_level(batch, gap_T, weight))
    capped_T = ratio_T if weight == "none" else ratio_T.clamp(weight_low, weight_high)
    weight_T = torch.where(mask_T, capped_T, 0.0)
    kept_T = mask_T
    if mask != "none":
        judged_T = bounded_ratio(_at_level(batch, gap_T, mask))
        kept_T = mask_T & (judged_T >= mask_low) & (judged_T <= mask_high)
    batch = _note_correction(batch, gap_T, ratio_T, weight_T, kept_T)
    if mask_denominator == "all":
        weight_T = torch.where(kept_T, weight_T, 0.0)
        kept_T = mask_T
    if weight in ("none", "sequence", "geometric"):
        row_T = torch.where(mask_T, weight_T, -torch.inf)
        row_S = torch.full((batch.n_sequences,), -torch.inf, dtype=torch.float64)
        row_S = row_S.scatter_reduce(0, batch.sequence_T, row_T, "amax")
        batch = batch.fill_sequences(correction_S=torch.where(row_S > -torch.inf, row_S, 1.0))
    return replace(batch, trainable_T=kept_T).fill_tokens(correction=weight_T)


def _at_level(batch: Batch, gap_T: Tensor, at: CorrectionLevel) -> Tensor:
    """Return D of each token at a level. [T]"""
    if at == "none":
        return torch.zeros_like(gap_T)
    if at == "token":
        return gap_T
    if at == "turn":
        keys_T = torch.stack([batch.sequence_T, batch.turn_T.long()], dim=1)
        keys, turn_T = torch.unique(keys_T, dim=0, return_inverse=True)
        return gap_T.new_zeros(len(keys)).index_add(0, turn_T, gap_T)[turn_T]
    total_S = batch.sequence_sum(gap_T)
    if at == "geometric":
        total_S = total_S / batch.sequence_sum(batch.trainable_T.double()).clamp(min=1)
    return total_S[batch.sequence_T]


def _note_correction(
    batch: Batch, gap_T: Tensor, ratio_T: Tensor, weight_T: Tensor, kept_T: Tensor
) -> Batch:
    """Add metrics of the gap between sampler and learner, and of the weights and masks."""
    mask_T = batch.trainable_T
    if not bool(mask_T.any()):
        return batch
    gap_N = gap_T[mask_T]
    weight_N = weight_T[mask_T]
    numbers = {
        "gap_mean": gap_N.abs().mean(),
        "kl": k3(-gap_N).mean(),  # estimates KL(sampler || learner)
        "weight_mean": weight_N.mean(),
        "weight_max": weight_N.max(),
        "clipped_share": (weight_N != ratio_T[mask_T]).double().mean(),
        "masked_share": 1 - kept_T[mask_T].double().mean(),
    }
    return batch.note(**{f"correction/{name}": float(value) for name, value in numbers.items()})


def apply_correction(
    out: Outputs,
    batch: Batch,
    *,
    fn: Callable[[Outputs, Batch], tuple[Tensor, Metrics]],
    level: Literal["token", "sequence"] = "token",
) -> tuple[Tensor, Metrics]:
    """Return x of any loss, at `level`, times the correction at that level."""
    x, metrics = fn(out, batch)
    return x * batch.need("correction" if level == "token" else "correction_S"), metrics


def apply_correction_mask(
    out: Outputs, batch: Batch, *, fn: Callable[[Outputs, Batch], tuple[Tensor, Metrics]]
) -> tuple[Tensor, Metrics]:
    """Return x of a token-level loss, with 0 for masked tokens that stay in the denominator.

    Their correction is 0. Other tokens keep x unweighted, because it is no expectation over sampled
    tokens.
    """
    x, metrics = fn(out, batch)
    return torch.where(batch.need("correction") != 0, x, 0.0), metrics
