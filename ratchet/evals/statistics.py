"""Estimate scores, their intervals and differences from a few attempts at each of many prompts.

P = prompts, n = attempts at one prompt, K = the requested sizes k, A = distinct answers to a
prompt.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

LEVEL = 0.95  # confidence level of all intervals
# Number of bootstrap resamples: the error of an interval's ends is below 2 % of its width.
RESAMPLES = 4000
# Number of multiplications (about 0.1 s) above which a consensus is sampled.
EXACT_COST = 50_000_000
DRAWS = 2000  # samples of a consensus for each k
EXACT_SUMS = 1 << 17  # distinct sums of signed differences above which the test samples them
FLIPS = 20_000  # samples of the sign-flip test
CHUNK = 1 << 21  # maximum resampled numbers in memory at once


def estimate_pass_at_k(n: int, correct: int) -> Floats:
    """Return pass@k, [n]: the chance that at least one of k attempts is correct, for k = 1 ... n.

    `correct` is c, the number of correct attempts among n. The result is the unbiased estimator
    1 - C(n - c, k) / C(n, k) of arXiv:2107.03374, eq. 1, in its numerically stable form.
    """
    k = np.arange(1, n + 1)
    misses = np.maximum(n - correct - k + 1, 0) / (n - k + 1)
    return np.asarray(1.0 - np.cumprod(misses), dtype=np.float64)


@dataclass(frozen=True)
class Consensus:
    """The expected value of the most frequent answer, for each k.

    Attributes:
        values: [K] expected values.
        errors: [K] standard errors of sampled values; 0 if exact.
    """

    values: Floats
    errors: Floats


def estimate_consensus(
    counts: Sequence[int],
    values: Sequence[float],
    ks: Sequence[int],
    *,
    without_answer: int = 0,
    seed: int = 0,
    exact: bool | None = None,
) -> Consensus:
    """Estimate the value of the most frequent answer among k attempts (cons@k, maj@k;
    arXiv:2203.11171).

    It is the average over all choices of k out of n attempts. Ties are broken uniformly. If none of
    the k attempts has an answer, the value is 0.

    Args:
        counts: [A] Number of attempts that gave each answer.
        values: [A] Score of each answer.
        ks: [K] The sizes k.
        without_answer: Number of attempts without an answer.
        seed: Seed of the samples.
        exact: True enumerates, False samples; None enumerates if this is cheap.
    """
    n = sum(counts) + without_answer
    assert all(1 <= k <= n for k in ks), (n, ks)
    if exact is None:
        # C(1000, 500) is near the largest binomial coefficient that a float holds.
        exact = n <= 1000 and _count_multiplications(counts, n) <= EXACT_COST
    if exact:
        return Consensus(
            _enumerate_consensus(counts, values, without_answer)[
                np.asarray(ks, dtype=np.int64) - 1
            ],
            np.zeros(len(ks)),
        )
    return _sample_consensus(counts, values, without_answer, ks, np.random.default_rng(seed))


def _count_multiplications(counts: Sequence[int], n: int) -> int:
    """Return the number of multiplications of the exact computation."""
    cost = 0
    for winning_votes in range(1, max(counts, default=0) + 1):
        ties = 1 + sum(count >= winning_votes for count in counts)
        cost += sum(min(winning_votes, count) + 1 for count in counts) * (n + 1) * ties
    return cost


def _enumerate_consensus(
    counts: Sequence[int], values: Sequence[float], without_answer: int
) -> Floats:
    """Return [n] exact values for k = 1 ... n.

    For each number of votes that the winners may have, a dynamic program runs over the answers:

    * ways[x, t] counts the choices of x attempts in which t answers have the winning number of
      votes and no other has more;
    * worth[x, t] sums the values of these t answers over the same choices.
    """
    n = sum(counts) + without_answer
    totals = np.zeros(n + 1)
    for winning_votes in range(1, max(counts, default=0) + 1):
        ways = np.zeros((n + 1, 1 + sum(count >= winning_votes for count in counts)))
        ways[: without_answer + 1, 0] = [
            math.comb(without_answer, x) for x in range(without_answer + 1)
        ]
        worth = np.zeros_like(ways)
        for count, value in zip(counts, values, strict=True):
            next_ways, next_worth = np.zeros_like(ways), np.zeros_like(worth)
            for votes in range(min(winning_votes - 1, count) + 1):
                chosen = float(math.comb(count, votes))
                next_ways[votes:] += chosen * ways[: n + 1 - votes]
                next_worth[votes:] += chosen * worth[: n + 1 - votes]
            if count >= winning_votes:
                chosen = float(math.comb(count, winning_votes))
                # This answer joins the winners: t grows by one.
                previous_ways = ways[: n + 1 - winning_votes, :-1]
                previous_worth = worth[: n + 1 - winning_votes, :-1]
                next_ways[winning_votes:, 1:] += chosen * previous_ways
                next_worth[winning_votes:, 1:] += chosen * (previous_worth + value * previous_ways)
            ways, worth = next_ways, next_worth
        # Ties are broken uniformly: the winners' values are averaged.
        totals += (worth[:, 1:] / np.arange(1, worth.shape[1])).sum(1)
    return totals[1:] / [float(math.comb(n, k)) for k in range(1, n + 1)]


def _sample_consensus(
    counts: Sequence[int],
    values: Sequence[float],
    without_answer: int,
    ks: Sequence[int],
    rng: np.random.Generator,
) -> Consensus:
    """Return values from `DRAWS` random choices for each k."""
    estimates: list[tuple[float, float]] = []
    worth_A = np.asarray(values, dtype=np.float64)
    for k in ks:
        votes_DA = rng.multivariate_hypergeometric(
            [*counts, without_answer], k, size=DRAWS, method="marginals"
        )[:, :-1]
        most_D = votes_DA.max(1, initial=0)
        wins_DA = (votes_DA == most_D[:, None]) & (votes_DA > 0)
        worth_D = (wins_DA * worth_A).sum(1) / np.maximum(wins_DA.sum(1), 1)
        estimates.append((worth_D.mean(), worth_D.std(ddof=1) / math.sqrt(DRAWS)))
    means, errors = zip(*estimates, strict=True)
    return Consensus(np.asarray(means), np.asarray(errors))


def bootstrap_interval(
    values_P: ArrayLike, *, seed: int = 0, level: float = LEVEL
) -> tuple[float, float]:
    """Return the confidence interval of the mean over prompts by the percentile bootstrap.

    The bootstrap draws prompts with replacement. If all values are 0, or all are 1, every resample
    is equal: the interval is then that of Clopper and Pearson, which holds for any values in
    [0, 1]. Without values it is (nan, nan).
    """
    values_P = np.asarray(values_P, dtype=np.float64)
    if not len(values_P):
        return math.nan, math.nan
    if (values_P == values_P[0]).all() and values_P[0] in (0.0, 1.0):
        width = 1.0 - ((1.0 - level) / 2) ** (1.0 / len(values_P))
        return (0.0, width) if values_P[0] == 0.0 else (1.0 - width, 1.0)
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
class PairedDifference:
    """The result of a paired comparison of a and b.

    Attributes:
        difference: Mean of a - b over prompts, with its interval `low` to `high`.
        p_value: Two-sided p-value.
        exact: True if the p-value was enumerated rather than sampled.
        better: Number of prompts at which a is larger.
        worse: Number of prompts at which a is smaller.
    """

    prompts: int
    difference: float
    low: float
    high: float
    p_value: float
    exact: bool
    better: int
    worse: int


def compare_pairs(a_P: ArrayLike, b_P: ArrayLike, *, seed: int = 0) -> PairedDifference:
    """Compare two sets of values on the same prompts by the sign-flip test.

    If a and b did not differ, each prompt's difference could as well have the other sign. So p is
    the share of all sign choices whose sum is at least as far from 0 as the observed one.

    The test assumes no distribution, uses the size of differences (the sign test does not), and
    keeps its significance level for any number of prompts. For single attempts scored 0 or 1 it is
    McNemar's exact test.

    If there are too many sums to enumerate, they are sampled. The observed sum then counts as one
    of the samples, so that the test still keeps its level.
    """
    difference_P = np.asarray(a_P, dtype=np.float64) - np.asarray(b_P, dtype=np.float64)
    low, high = _bootstrap_difference(difference_P, seed)
    nonzero = difference_P[np.abs(difference_P) > 1e-12]
    p_value, exact = _compute_p_value(nonzero, seed)
    return PairedDifference(
        prompts=len(difference_P),
        difference=float(difference_P.mean()) if len(difference_P) else math.nan,
        low=low,
        high=high,
        p_value=p_value,
        exact=exact,
        better=int((nonzero > 0).sum()),
        worse=int((nonzero < 0).sum()),
    )


def _bootstrap_difference(difference_P: Floats, seed: int) -> tuple[float, float]:
    """Return the confidence interval of the mean difference.

    Differences of rewards in [0, 1] lie in [-1, 1]. They are mapped to [0, 1], so that
    `bootstrap_interval` can use its exact bounds.
    """
    low, high = bootstrap_interval((difference_P + 1) / 2, seed=seed)
    return 2 * low - 1, 2 * high - 1


def _compute_p_value(nonzero: Floats, seed: int) -> tuple[float, bool]:
    """Return the p-value for the nonzero differences, and whether it is exact."""
    observed = abs(nonzero.sum()) - 1e-9
    sums, shares = np.zeros(1), np.ones(1)
    for size in nonzero:
        # Rewards are often multiples of 1/n, so many sums are equal. Merge them.
        sums, index = np.unique(
            np.round(np.concatenate([sums + size, sums - size]), 9), return_inverse=True
        )
        shares = np.bincount(index, weights=np.concatenate([shares, shares]) / 2)
        if len(sums) > EXACT_SUMS:
            break
    else:
        return min(1.0, float(shares[np.abs(sums) >= observed].sum())), True
    rng = np.random.default_rng(seed)
    at_once = max(1, CHUNK // len(nonzero))
    beyond = 0
    for start in range(0, FLIPS, at_once):
        signs = (
            rng.integers(0, 2, size=(min(at_once, FLIPS - start), len(nonzero)), dtype=np.int8) * 2
            - 1
        )
        beyond += int((np.abs(signs @ nonzero) >= observed).sum())
    return (beyond + 1) / (FLIPS + 1), False
