"""Policy losses x (to be minimised) on ragged rows, with their slopes dx / d(live logprob) worked
out by hand (no autograd).

A token-level loss gives one x a token, and a slope by the token's own logprob: whatever else of the
row enters it is detached. A sequence-level loss gives one x a row, and a slope by every logprob of
the row. `y` below are a row's trained tokens in order, lr = logprob - old logprob, r = exp(lr), A
the advantage; a token that does not train has x = slope = 0, a row without trained tokens x = 0.
"sg" is a paper's stop-gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from oracles.ragged import Ragged, Row

Token = tuple[float, float, float]  # (logprob, old logprob, advantage)
Pair = tuple[float, float]  # (x, slope)
Sequence = tuple[float, list[float]]  # (x of the row, slope by each of its trained tokens)


def _trained(row: Row, advantages: list[float]) -> tuple[list[int], list[Token]]:
    where = [t for t, trains in enumerate(row.mask) if trains]
    return where, [(row.logprobs[t], row.old_logprobs[t], advantages[t]) for t in where]


def by_token(
    rows: list[Row], advantages: Ragged, of_row: Callable[[list[Token]], list[Pair]]
) -> tuple[Ragged, Ragged]:
    values, slopes = [], []
    for row, a_row in zip(rows, advantages, strict=True):
        where, y = _trained(row, a_row)
        x, slope = [0.0] * len(row.tokens), [0.0] * len(row.tokens)
        for t, (value, by) in zip(where, of_row(y), strict=True):
            x[t], slope[t] = value, by
        values.append(x)
        slopes.append(slope)
    return values, slopes


def by_sequence(
    rows: list[Row], advantages: Ragged, of_row: Callable[[list[Token]], Sequence]
) -> tuple[list[float], Ragged]:
    values, slopes = [], []
    for row, a_row in zip(rows, advantages, strict=True):
        where, y = _trained(row, a_row)
        value, by = of_row(y) if y else (0.0, [])
        slope = [0.0] * len(row.tokens)
        for t, s in zip(where, by, strict=True):
            slope[t] = s
        values.append(value)
        slopes.append(slope)
    return values, slopes


def clip(x: float, low: float | None, high: float | None) -> float:
    if low is not None and x < low:
        return low
    if high is not None and x > high:
        return high
    return x


def pessimistic(ratio: float, advantage: float, *, clip_low: float, clip_high: float) -> Pair:
    """(x, dx/dratio) of x = -min(ratio A, clip(ratio, 1 - low, 1 + high) A)."""
    clipped = clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
    if ratio * advantage <= clipped * advantage:
        return -ratio * advantage, -advantage
    return -clipped * advantage, 0.0


def mean(xs: list[float]) -> float:
    return math.fsum(xs) / len(xs)


# --- one x a token


def reinforce(rows: list[Row], advantages: Ragged) -> tuple[Ragged, Ragged]:
    """Williams 1992: x = -A log p."""
    return by_token(rows, advantages, lambda y: [(-a * lp, -a) for lp, _, a in y])


def gspo_token(
    rows: list[Row], advantages: Ragged, *, clip_low: float, clip_high: float
) -> tuple[Ragged, Ragged]:
    """GSPO-token, arXiv:2507.18071, eq. 13-14: s_t = sg[s] r_t / sg[r_t], whose value is s and
    whose derivative by log p_t is s too; s = (p(y) / p_old(y))^(1/|y|)."""

    def of_row(y: list[Token]) -> list[Pair]:
        s = math.exp(mean([lp - old for lp, old, _ in y])) if y else 1.0
        pairs = []
        for _, _, a in y:
            x, by_ratio = pessimistic(s, a, clip_low=clip_low, clip_high=clip_high)
            pairs.append((x, by_ratio * s))
        return pairs

    return by_token(rows, advantages, of_row)


def cispo(
    rows: list[Row], advantages: Ragged, *, clip_low: float | None, clip_high: float
) -> tuple[Ragged, Ragged]:
    """MiniMax-M1, arXiv:2506.13585, eq. 4-5: J = sg(clip(r, 1 - low, 1 + high)) A log p. No token
    loses its gradient."""
    low = None if clip_low is None else 1.0 - clip_low

    def of_row(y: list[Token]) -> list[Pair]:
        weights = [clip(math.exp(lp - old), low, 1.0 + clip_high) for lp, old, _ in y]
        return [(-w * a * lp, -w * a) for w, (lp, _, a) in zip(weights, y, strict=True)]

    return by_token(rows, advantages, of_row)


def topr(
    rows: list[Row], advantages: Ragged, *, negative_low: float, negative_high: float
) -> tuple[Ragged, Ragged]:
    """Tapered off-policy REINFORCE, arXiv:2503.14286: positives as they are (no importance ratio),
    negatives by the whole answer's truncated ratio, clip(p(y) / p_old(y), low, high), detached."""

    def of_row(y: list[Token]) -> list[Pair]:
        log_product = math.fsum(lp - old for lp, old, _ in y)
        tapered = clip(math.exp(log_product), negative_low, negative_high)
        pairs = []
        for lp, _, a in y:
            w = 1.0 if a >= 0 else tapered
            pairs.append((-w * a * lp, -w * a))
        return pairs

    return by_token(rows, advantages, of_row)


def sapo(
    rows: list[Row], advantages: Ragged, *, tau_pos: float, tau_neg: float
) -> tuple[Ragged, Ragged]:
    """Soft adaptive policy optimisation, arXiv:2511.20347: f(r) = 4 / tau * sigmoid(tau (r - 1)), x
    = -A f(r), tau by the advantage's sign. f'(r) = 4 p (1 - p) with p that sigmoid (1 at r = 1),
    dr/dlog p = r."""

    def of_row(y: list[Token]) -> list[Pair]:
        pairs = []
        for lp, old, a in y:
            r, tau = math.exp(lp - old), tau_pos if a > 0 else tau_neg
            p = 1.0 / (1.0 + math.exp(-tau * (r - 1.0)))
            pairs.append((-a * 4.0 / tau * p, -a * 4.0 * p * (1.0 - p) * r))
        return pairs

    return by_token(rows, advantages, of_row)


# --- one x a row


def gspo(
    rows: list[Row], advantages: Ragged, *, clip_low: float, clip_high: float
) -> tuple[list[float], Ragged]:
    """GSPO, arXiv:2507.18071, eq. 5-7: the ratio of the whole answer, length-normalised: s =
    exp(mean lr), so that ds/dlog p_t = s / |y|."""

    def of_row(y: list[Token]) -> Sequence:
        s = math.exp(mean([lp - old for lp, old, _ in y]))
        x, by_ratio = pessimistic(
            s, mean([a for _, _, a in y]), clip_low=clip_low, clip_high=clip_high
        )
        return x, [by_ratio * s / len(y)] * len(y)

    return by_sequence(rows, advantages, of_row)


def gmpo(
    rows: list[Row], advantages: Ragged, *, clip_low: float, clip_high: float
) -> tuple[list[float], Ragged]:
    """Geometric-mean policy optimisation, arXiv:2507.20673, eq. 4: x = -A (prod_t c_t)^(1/|y|) with
    the ratio of each token clipped to (e^-low, e^high) where that lowers A c_t. The derivative of a
    clipped token's factor is 0."""

    def of_row(y: list[Token]) -> Sequence:
        a = mean([a for _, _, a in y])
        logs, moves = [], []
        for lp, old, _ in y:
            lr = lp - old
            cut = lr > clip_high if a > 0 else lr < -clip_low
            logs.append((clip_high if a > 0 else -clip_low) if cut else lr)
            moves.append(not cut)
        x = -a * math.exp(mean(logs))
        return x, [x / len(y) if free else 0.0 for free in moves]

    return by_sequence(rows, advantages, of_row)


def kimi(rows: list[Row], advantages: Ragged, *, tau: float) -> tuple[list[float], Ragged]:
    """Kimi k1.5, arXiv:2501.12599, eq. 3: sum over the answer of A log p, less tau / 2 (log p(y) /
    p_old(y))^2."""

    def of_row(y: list[Token]) -> Sequence:
        log_product = math.fsum(lp - old for lp, old, _ in y)
        x = -math.fsum(a * lp for lp, _, a in y) + tau / 2.0 * log_product**2
        return x, [-a + tau * log_product for _, _, a in y]

    return by_sequence(rows, advantages, of_row)
