"""Per-token losses with their derivative by the token's live logprob, worked out by hand (no
autograd)."""

from __future__ import annotations

import math

from oracles.ragged import Ragged, Row


def nll(rows: list[Row]) -> tuple[Ragged, Ragged]:
    """Negative log-likelihood: x = -log p, dx/dlog p = -1."""
    return [[-lp for lp in row.logprobs] for row in rows], [
        [-1.0] * len(row.tokens) for row in rows
    ]


def clipped_surrogate_token(
    logprob: float,
    old_logprob: float,
    advantage: float,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> tuple[float, float]:
    """(x, dx/dlogprob) of x = -J, to be minimised.

    J = min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), r = exp(logprob - old_logprob): PPO
    arXiv:1707.06347 eq. 7, with DAPO's two widths (arXiv:2503.14476 eq. 8). With a dual clip c > 1,
    where A < 0: J = max(J, c A), arXiv:1912.09729. dr/dlogprob = r, and a branch that is constant
    in r has derivative 0.
    """
    ratio = math.exp(logprob - old_logprob)
    clipped = min(max(ratio, 1.0 - clip_low), 1.0 + clip_high)
    if ratio * advantage <= clipped * advantage:
        gain, slope = ratio * advantage, ratio * advantage
    else:
        gain, slope = clipped * advantage, 0.0
    if dual_clip is not None and advantage < 0 and gain < dual_clip * advantage:
        gain, slope = dual_clip * advantage, 0.0
    return -gain, -slope


def clipped_surrogate(
    rows: list[Row],
    advantages: Ragged,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> tuple[Ragged, Ragged]:
    values, slopes = [], []
    for row, a_row in zip(rows, advantages, strict=True):
        pairs = [
            clipped_surrogate_token(
                lp, old, a, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip
            )
            for lp, old, a in zip(row.logprobs, row.old_logprobs, a_row, strict=True)
        ]
        values.append([value for value, _ in pairs])
        slopes.append([slope for _, slope in pairs])
    return values, slopes


def value_token(
    value: float, old_value: float, target: float, *, clip: float | None = None
) -> tuple[float, float]:
    """(x, dx/dvalue) of half the squared error; with a clip, PPO's: the larger of the errors of the
    value and of the value held within `clip` of the old one (the reference code of
    arXiv:1707.06347). Held at a bound it has slope 0."""
    error = value - target
    if clip is None:
        return 0.5 * error**2, error
    held = min(max(value, old_value - clip), old_value + clip)
    if error**2 >= (held - target) ** 2:
        return 0.5 * error**2, error
    return 0.5 * (held - target) ** 2, 0.0


def value_loss(
    values: Ragged, old_values: Ragged, targets: Ragged, *, clip: float | None = None
) -> tuple[Ragged, Ragged]:
    """`value_token` of every token."""
    x, slopes = [], []
    for new, old, target in zip(values, old_values, targets, strict=True):
        pairs = [value_token(v, o, r, clip=clip) for v, o, r in zip(new, old, target, strict=True)]
        x.append([value for value, _ in pairs])
        slopes.append([slope for _, slope in pairs])
    return x, slopes
