"""Estimate scores, their intervals and differences from a few attempts at each of many prompts.

P = prompts, n = attempts at one prompt, K = the requested values of k (pass@k, cons@k),
A = distinct answers to a prompt, D = random draws of k attempts when cons@k is sampled.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

CONFIDENCE_LEVEL = 0.95  # confidence level of all intervals
# Number of bootstrap resamples. With it, the error of an interval's ends is below 2 % of its width.
N_RESAMPLES = 4000
# A consensus that takes more multiplications (about 0.1 s) is sampled.
MAX_EXACT_MULTIPLICATIONS = 50_000_000
N_DRAWS = 2000  # samples of a consensus for each k
# The sign-flip test (`compare_pairs`) enumerates up to this many distinct sums of randomly signed
# differences; above it, it samples.
MAX_EXACT_SUMS = 1 << 17
N_SIGN_FLIPS = 20_000  # samples of the sign-flip test
MAX_CHUNK_NUMBERS = 1 << 21  # maximum resampled numbers in memory at once


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
    """The expected value of the most frequent answer, for each k."""

    values: Floats
    """[K] expected values."""
    errors: Floats
    """[K] standard errors of sampled values; 0 if exact."""


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
        exact = n <= 1000 and _count_multiplications(counts, n) <= MAX_EXACT_MULTIPLICATIONS
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
                n_choices = float(math.comb(count, votes))
                next_ways[votes:] += n_choices * ways[: n + 1 - votes]
                next_worth[votes:] += n_choices * worth[: n + 1 - votes]
            if count >= winning_votes:
                n_choices = float(math.comb(count, winning_votes))
                # This answer joins the winners: t grows by one.
                previous_ways = ways[: n + 1 - winning_votes, :-1]
                previous_worth = worth[: n + 1 - winning_votes, :-1]
                next_ways[winning_votes:, 1:] += n_choices * previous_ways
                next_worth[winning_votes:, 1:] += n_choices * (
                    previous_worth + value * previous_ways
                )
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
    """Return values from `N_DRAWS` random choices for each k."""
    estimates: list[tuple[float, float]] = []
    values_A = np.asarray(values, dtype=np.float64)
    for k in ks:
        votes_DA = rng.multivariate_hypergeometric(
            [*counts, without_answer], k, size=N_DRAWS, method="marginals"
        )[:, :-1]
        max_votes_D = votes_DA.max(1, initial=0)
        wins_DA = (votes_DA == max_votes_D[:, None]) & (votes_DA > 0)
        winner_means_D = (wins_DA * values_A).sum(1) / np.maximum(wins_DA.sum(1), 1)
        estimates.append((winner_means_D.mean(), winner_means_D.std(ddof=1) / math.sqrt(N_DRAWS)))
    means, errors = zip(*estimates, strict=True)
    return Consensus(np.asarray(means), np.asarray(errors))


def bootstrap_interval(
    values_P: ArrayLike, *, seed: int = 0, level: float = CONFIDENCE_LEVEL
) -> tuple[float, float]:
    """Return the confidence interval of the mean over prompts by the percentile bootstrap.

    The bootstrap draws prompts with replacement. If all values are 0, or all are 1, all resamples
    are equal. The Clopper-Pearson interval is then used. It stays valid if values that were not
    observed could lie strictly between 0 and 1. Without values the interval is (nan, nan).
    """
    values_P = np.asarray(values_P, dtype=np.float64)
    if not len(values_P):
        return math.nan, math.nan
    if (values_P == values_P[0]).all() and values_P[0] in (0.0, 1.0):
        width = 1.0 - ((1.0 - level) / 2) ** (1.0 / len(values_P))
        return (0.0, width) if values_P[0] == 0.0 else (1.0 - width, 1.0)
    rng = np.random.default_rng(seed)
    chunk_size = max(1, MAX_CHUNK_NUMBERS // len(values_P))
    means = [
        values_P[
            rng.integers(len(values_P), size=(min(chunk_size, N_RESAMPLES - start), len(values_P)))
        ].mean(1)
        for start in range(0, N_RESAMPLES, chunk_size)
    ]
    low, high = np.quantile(np.concatenate(means), [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


@dataclass(frozen=True)
class PairedDifference:
    """The result of a paired comparison of a and b."""

    n_prompts: int
    difference: float
    """Mean of a - b over prompts, with its interval `low` to `high`."""
    low: float
    high: float
    p_value: float
    """Two-sided p-value."""
    is_exact: bool
    """True if the p-value was enumerated rather than sampled."""
    n_better: int
    """Number of prompts at which a is larger."""
    n_worse: int
    """Number of prompts at which a is smaller."""


def compare_pairs(a_P: ArrayLike, b_P: ArrayLike, *, seed: int = 0) -> PairedDifference:
    """Compare two sets of values on the same prompts by the sign-flip test.

    If a and b did not differ, each prompt's difference could as well have the opposite sign. So p
    is the share of all sign choices whose sum is at least as far from 0 as the observed sum.

    The test assumes no distribution, uses the size of differences (the sign test does not), and
    keeps its significance level for any number of prompts. For single attempts scored 0 or 1 it is
    McNemar's exact test.

    If there are too many sums to enumerate, they are sampled. The observed sum then counts as one
    of the samples, so that the test still keeps its level.
    """
    difference_P = np.asarray(a_P, dtype=np.float64) - np.asarray(b_P, dtype=np.float64)
    low, high = _bootstrap_difference(difference_P, seed)
    nonzero_differences = difference_P[np.abs(difference_P) > 1e-12]
    p_value, is_exact = _compute_p_value(nonzero_differences, seed)
    return PairedDifference(
        n_prompts=len(difference_P),
        difference=float(difference_P.mean()) if len(difference_P) else math.nan,
        low=low,
        high=high,
        p_value=p_value,
        is_exact=is_exact,
        n_better=int((nonzero_differences > 0).sum()),
        n_worse=int((nonzero_differences < 0).sum()),
    )


def _bootstrap_difference(difference_P: Floats, seed: int) -> tuple[float, float]:
    """Return the confidence interval of the mean difference.

    Differences of rewards in [0, 1] lie in [-1, 1]. They are mapped to [0, 1], so that
    `bootstrap_interval` can use the Clopper-Pearson interval.
    """
    low, high = bootstrap_interval((difference_P + 1) / 2, seed=seed)
    return 2 * low - 1, 2 * high - 1


def _compute_p_value(nonzero_differences: Floats, seed: int) -> tuple[float, bool]:
    """Return the p-value for the nonzero differences, and whether it is exact."""
    min_distance = abs(nonzero_differences.sum()) - 1e-9
    sums, shares = np.zeros(1), np.ones(1)
    for difference in nonzero_differences:
        # Rewards are often multiples of 1/n, so many sums are equal. Merge them.
        sums, index = np.unique(
            np.round(np.concatenate([sums + difference, sums - difference]), 9), return_inverse=True
        )
        shares = np.bincount(index, weights=np.concatenate([shares, shares]) / 2)
        if len(sums) > MAX_EXACT_SUMS:
            break
    else:
        return min(1.0, float(shares[np.abs(sums) >= min_distance].sum())), True
    rng = np.random.default_rng(seed)
    chunk_size = max(1, MAX_CHUNK_NUMBERS // len(nonzero_differences))
    n_beyond = 0
    for start in range(0, N_SIGN_FLIPS, chunk_size):
        signs = (
            rng.integers(
                0,
                2,
                size=(min(chunk_size, N_SIGN_FLIPS - start), len(nonzero_differences)),
                dtype=np.int8,
            )
            * 2
            - 1
        )
        n_beyond += int((np.abs(signs @ nonzero_differences) >= min_distance).sum())
    return (n_beyond + 1) / (N_SIGN_FLIPS + 1), False
