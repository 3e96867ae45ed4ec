"""What a few attempts at each of many prompts say about who made them. Pure: numbers in, numbers
out.

P = prompts, n = attempts at one of them, K = the sizes k that are asked for, A = different answers
to a prompt.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

LEVEL = 0.95  # of all intervals
RESAMPLES = 4000  # of an interval's ends: their own error is then below 2 % of its width
EXACT_COST = 50_000_000  # multiplications, about 0.1 s, beyond which a consensus is sampled instead
DRAWS = 2000
EXACT_SUMS = 1 << 17  # different sums of signs, beyond which they are sampled instead
FLIPS = 20_000
CHUNK = 1 << 21  # numbers in memory at once


def pass_at_k(n: int, right: int) -> Floats:
    """[n] chance that one of k attempts is right, for k = 1 ... n, where `right` of n were: 1 - C(n
    - c, k) / C(n, k), the unbiased estimator of arXiv:2107.03374, eq. 1, in its stable form."""
    k = np.arange(1, n + 1)
    misses = np.maximum(n - right - k + 1, 0) / (n - k + 1)
    return np.asarray(1.0 - np.cumprod(misses), dtype=np.float64)


@dataclass(frozen=True)
class Consensus:
    """values [K]: expected. errors [K]: standard errors of what was sampled; 0 where it is
    exact."""

    values: Floats
    errors: Floats


def consensus(
    counts: Sequence[int],
    values: Sequence[float],
    ks: Sequence[int],
    *,
    silent: int = 0,
    seed: int = 0,
    exact: bool | None = None,
) -> Consensus:
    """What the most frequent answer among k attempts is worth (cons@k, maj@k; arXiv:2203.11171), on
    average over all choices of k out of n. Answer a was given counts[a] times and is worth
    values[a]; answers that are equally frequent are as likely to be the one; `silent` attempts gave
    none, and k of these are worth 0.

    exact=None: where it is cheap, else from random choices with `seed`.
    """
    n = sum(counts) + silent
    assert all(1 <= k <= n for k in ks), (n, ks)
    if exact is None:
        # C(1000, 500) is the last that a float holds
        exact = n <= 1000 and _cost(counts, n) <= EXACT_COST
    if exact:
        return Consensus(
            _enumerated(counts, values, silent)[np.asarray(ks, dtype=np.int64) - 1],
            np.zeros(len(ks)),
        )
    return _sampled(counts, values, silent, ks, np.random.default_rng(seed))


def _cost(counts: Sequence[int], n: int) -> int:
    cost = 0
    for most in range(1, max(counts, default=0) + 1):
        ties = 1 + sum(count >= most for count in counts)
        cost += sum(min(most, count) + 1 for count in counts) * (n + 1) * ties
    return cost


def _enumerated(counts: Sequence[int], values: Sequence[float], silent: int) -> Floats:
    """[n]. By the number of votes, `most`, that the winners have: ways[x, t] counts the choices of
    x attempts in which t answers have so many and no other has more, worth[x, t] sums over them
    what these t are worth together."""
    n = sum(counts) + silent
    found = np.zeros(n + 1)
    for most in range(1, max(counts, default=0) + 1):
        ways = np.zeros((n + 1, 1 + sum(count >= most for count in counts)))
        ways[: silent + 1, 0] = [math.comb(silent, x) for x in range(silent + 1)]
        worth = np.zeros_like(ways)
        for count, value in zip(counts, values, strict=True):
            next_ways, next_worth = np.zeros_like(ways), np.zeros_like(worth)
            for votes in range(min(most - 1, count) + 1):
                chosen = float(math.comb(count, votes))
                next_ways[votes:] += chosen * ways[: n + 1 - votes]
                next_worth[votes:] += chosen * worth[: n + 1 - votes]
            if count >= most:
                chosen = float(math.comb(count, most))
                before, summed = ways[: n + 1 - most, :-1], worth[: n + 1 - most, :-1]
                next_ways[most:, 1:] += chosen * before
                next_worth[most:, 1:] += chosen * (summed + value * before)
            ways, worth = next_ways, next_worth
        found += (worth[:, 1:] / np.arange(1, worth.shape[1])).sum(1)
    return found[1:] / [float(math.comb(n, k)) for k in range(1, n + 1)]


def _sampled(
    counts: Sequence[int],
    values: Sequence[float],
    silent: int,
    ks: Sequence[int],
    rng: np.random.Generator,
) -> Consensus:
    found: list[tuple[float, float]] = []
    worth_A = np.asarray(values, dtype=np.float64)
    for k in ks:
        votes_DA = rng.multivariate_hypergeometric(
            [*counts, silent], k, size=DRAWS, method="marginals"
        )[:, :-1]
        most_D = votes_DA.max(1, initial=0)
        wins_DA = (votes_DA == most_D[:, None]) & (votes_DA > 0)
        worth_D = (wins_DA * worth_A).sum(1) / np.maximum(wins_DA.sum(1), 1)
        found.append((worth_D.mean(), worth_D.std(ddof=1) / math.sqrt(DRAWS)))
    means, errors = zip(*found, strict=True)
    return Consensus(np.asarray(means), np.asarray(errors))


def interval(values_P: ArrayLike, *, seed: int = 0, level: float = LEVEL) -> tuple[float, float]:
    """Confidence interval of the mean over prompts like these: the percentile bootstrap, which
    draws prompts with replacement.

    Where all are 0 or all are 1 there is nothing to resample: the bound is then that of Clopper and
    Pearson, which holds for whatever lies in [0, 1]. (nan, nan) without any.
    """
    values_P = np.asarray(values_P, dtype=np.float64)
    if not len(values_P):
        return math.nan, math.nan
    if (values_P == values_P[0]).all() and values_P[0] in (0.0, 1.0):
        reach = 1.0 - ((1.0 - level) / 2) ** (1.0 / len(values_P))
        return (0.0, reach) if values_P[0] == 0.0 else (1.0 - reach, 1.0)
    rng = np.random.default_rng(seed)
    at_once = max(1, CHUNK // len(values_P))
    means = [
        values_P[
            rng.integers(len(values_P), size=(min(at_once, RESAMPLES - start), len(values_P)))
        ].mean(1)
        for start in range(0, RESAMPLES, at_once)
    ]
    low, high = np.quantile(np.concatenate(means), [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


@dataclass(frozen=True)
class Paired:
    """difference: mean of a - b over prompts, with its interval. p_value: two-sided; exact where it
    was not sampled. better, worse: prompts at which a has more, or less, than b."""

    prompts: int
    difference: float
    low: float
    high: float
    p_value: float
    exact: bool
    better: int
    worse: int


def paired(a_P: ArrayLike, b_P: ArrayLike, *, seed: int = 0) -> Paired:
    """Compares two on the same prompts by the sign-flip test: were they alike, each prompt's
    difference could as well have had the other sign, so p is the share of all choices of signs
    whose sum is at least as far from 0 as the one that was found.

    It needs no distribution, uses how large differences are (the sign test does not), and has its
    level for any number of prompts; for single attempts at 0 or 1 it is the exact test of McNemar.
    Where the sums are too many to be enumerated they are sampled, and the one that was found counts
    as one of them, so that the level holds then too.
    """
    difference_P = np.asarray(a_P, dtype=np.float64) - np.asarray(b_P, dtype=np.float64)
    low, high = _difference_interval(difference_P, seed)
    moved = difference_P[np.abs(difference_P) > 1e-12]
    p_value, exact = _sign_flip(moved, seed)
    return Paired(
        prompts=len(difference_P),
        difference=float(difference_P.mean()) if len(difference_P) else math.nan,
        low=low,
        high=high,
        p_value=p_value,
        exact=exact,
        better=int((moved > 0).sum()),
        worse=int((moved < 0).sum()),
    )


def _difference_interval(difference_P: Floats, seed: int) -> tuple[float, float]:
    """Differences of rewards in [0, 1] lie in [-1, 1]: they are halved and moved to where
    `interval` knows the bounds."""
    low, high = interval((difference_P + 1) / 2, seed=seed)
    return 2 * low - 1, 2 * high - 1


def _sign_flip(moved: Floats, seed: int) -> tuple[float, bool]:
    found = abs(moved.sum()) - 1e-9
    sums, shares = np.zeros(1), np.ones(1)
    for size in moved:
        # Rewards are often multiples of 1/n, so that few of the sums differ: equal ones are kept
        # once.
        sums, where = np.unique(
            np.round(np.concatenate([sums + size, sums - size]), 9), return_inverse=True
        )
        shares = np.bincount(where, weights=np.concatenate([shares, shares]) / 2)
        if len(sums) > EXACT_SUMS:
            break
    else:
        return min(1.0, float(shares[np.abs(sums) >= found].sum())), True
    rng = np.random.default_rng(seed)
    at_once = max(1, CHUNK // len(moved))
    beyond = 0
    for start in range(0, FLIPS, at_once):
        signs = (
            rng.integers(0, 2, size=(min(at_once, FLIPS - start), len(moved)), dtype=np.int8) * 2
            - 1
        )
        beyond += int((np.abs(signs @ moved) >= found).sum())
    return (beyond + 1) / (FLIPS + 1), False
