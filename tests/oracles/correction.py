"""Correction for the gap between the policy that generated (p_rollout, as the engine computed it)
and the same policy as the learner computes it (p_old): importance weights and masks at four levels,
on ragged rows.

    d = log p_old - (log p_rollout - log kept mass)

An engine's logprobs are those of its whole distribution; under top-p and the like it drew from
p_rollout / kept mass, on the tokens kept. Truncated importance sampling is weight="token" with a
cap above. IcePop (arXiv:2510.18855) is the ratio of a token inside [mask_low, mask_high] and 0
outside, in a mean over all tokens: weight="token" without a cap, mask="token", denominator="all".
Masking by the geometric mean of a sequence's ratios is mask="geometric".
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from oracles.ragged import Ragged, Row


@dataclass(frozen=True)
class Corrected:
    """token: the weight of every trained token, 0 elsewhere. sequence: the weight of every row
    (None where it differs within a row; 1 where nothing trains). mask: what still trains. The
    metrics are means over the tokens that trained before masking, none where there are none."""

    token: Ragged
    sequence: list[float] | None
    mask: list[list[bool]]
    metrics: dict[str, float]


def turns(row: Row) -> list[int]:
    """Number of the policy's turn of each token, -1 outside."""
    found = [-1] * len(row.tokens)
    for number, span in enumerate(row.spans):
        found[span.start : span.end] = [number] * (span.end - span.start)
    return found


def gaps(rows: list[Row]) -> Ragged:
    """d at every trained token, 0 elsewhere."""
    found = []
    for row in rows:
        columns = zip(
            row.mask, row.old_logprobs, row.rollout_logprobs, row.log_kept_mass, strict=True
        )
        found.append([old - (lp - mass) if m else 0.0 for m, old, lp, mass in columns])
    return found


def aggregate(row: Row, d: list[float], level: str) -> list[float]:
    """The log ratio that decides over each token of a row: its own, its turn's, its row's, or its
    row's mean."""
    trained = [t for t, m in enumerate(row.mask) if m]
    if level == "token":
        return list(d)
    if level == "turn":
        turn = turns(row)
        return [
            math.fsum(d[s] for s in trained if turn[s] == turn[t]) if row.mask[t] else 0.0
            for t in range(len(d))
        ]
    total = math.fsum(d[t] for t in trained)
    if level == "geometric":
        total /= max(len(trained), 1)
    return [total if row.mask[t] else 0.0 for t in range(len(d))]


def _outside(ratio: float, low: float, high: float | None) -> bool:
    return ratio < low or (high is not None and ratio > high)


def correct(
    rows: list[Row],
    *,
    weight: str = "token",
    weight_low: float = 0.0,
    weight_high: float | None = 2.0,
    mask: str = "none",
    mask_low: float = 0.5,
    mask_high: float = 2.0,
    mask_denominator: str = "all",
) -> Corrected:
    d = gaps(rows)
    token, sequence, kept = [], [], []
    weights, clipped, masked = [], 0, 0  # over all trained tokens
    for row, d_row in zip(rows, d, strict=True):
        if weight == "none":
            w, clips = [1.0] * len(d_row), [False] * len(d_row)
        else:
            ratios = [math.exp(x) for x in aggregate(row, d_row, weight)]
            w = [max(r if weight_high is None else min(r, weight_high), weight_low) for r in ratios]
            clips = [_outside(r, weight_low, weight_high) for r in ratios]
        if mask == "none":
            leaves = [False] * len(d_row)
        else:
            leaves = [
                _outside(math.exp(x), mask_low, mask_high) for x in aggregate(row, d_row, mask)
            ]
        stays = mask_denominator == "all"
        used = [0.0 if gone and stays else x for x, gone in zip(w, leaves, strict=True)]
        token.append([x if m else 0.0 for x, m in zip(used, row.mask, strict=True)])
        kept.append([m and (stays or not gone) for m, gone in zip(row.mask, leaves, strict=True)])
        trained = [t for t, m in enumerate(row.mask) if m]
        sequence.append(max(used[t] for t in trained) if trained else 1.0)
        weights += [w[t] for t in trained]
        clipped += sum(clips[t] for t in trained)
        masked += sum(leaves[t] for t in trained)
    gap = [
        x
        for row, d_row in zip(rows, d, strict=True)
        for x, m in zip(d_row, row.mask, strict=True)
        if m
    ]
    n = len(gap)
    metrics = (
        {}
        if n == 0
        else {
            "correction/weight_mean": math.fsum(weights) / n,
            "correction/weight_max": max(weights),
            "correction/clipped_share": clipped / n,
            "correction/masked_share": masked / n,
            "correction/gap_mean": math.fsum(abs(x) for x in gap) / n,
            "correction/kl": math.fsum(math.exp(x) - 1.0 - x for x in gap) / n,
        }
    )
    return Corrected(token, None if weight in ("token", "turn") else sequence, kept, metrics)
