"""Estimators against brute force over all choices, intervals and tests against simulation with
fixed seeds."""

from __future__ import annotations

import math
from collections import Counter
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratchet.evals import statistics
from ratchet.evals.statistics import (
    bootstrap_interval,
    compare_pairs,
    estimate_consensus,
    estimate_pass_at_k,
)


@pytest.mark.parametrize("n", range(1, 8))
def test_pass_at_k_is_the_share_of_choices_with_a_right_one(n: int):
    for right in range(n + 1):
        attempts = [i < right for i in range(n)]
        brute = [
            np.mean([any(chosen) for chosen in combinations(attempts, k)]) for k in range(1, n + 1)
        ]
        assert estimate_pass_at_k(n, right) == pytest.approx(brute)


def test_pass_at_k_is_the_published_product_where_binomials_are_huge():
    n, right, k = 1000, 7, 300
    assert estimate_pass_at_k(n, right)[k - 1] == pytest.approx(
        1 - math.comb(n - right, k) / math.comb(n, k)
    )


def brute_consensus(votes: list[int | None], values: list[float], k: int) -> float:
    worth = []
    for chosen in combinations(votes, k):
        counted = Counter(vote for vote in chosen if vote is not None)
        most = max(counted.values(), default=0)
        winners = [values[answer] for answer, count in counted.items() if count == most]
        worth.append(np.mean(winners) if winners else 0.0)
    return float(np.mean(worth))


@given(
    st.lists(st.integers(1, 3), max_size=4),
    st.integers(0, 2),
    st.lists(st.sampled_from([0.0, 1.0, 0.25]), min_size=4, max_size=4),
)
def test_consensus_equals_brute_force(counts: list[int], silent: int, values: list[float]):
    votes: list[int | None] = [answer for answer, count in enumerate(counts) for _ in range(count)]
    votes += [None] * silent
    ks = list(range(1, len(votes) + 1))
    found = estimate_consensus(counts, values[: len(counts)], ks, without_answer=silent)
    assert found.values == pytest.approx([brute_consensus(votes, values, k) for k in ks])
    assert not found.errors.any()


def test_a_consensus_of_one_is_the_mean_and_a_tie_is_shared():
    found = estimate_consensus([2, 2], [1.0, 0.0], [1, 4])
    assert found.values == pytest.approx([0.5, 0.5])
    assert estimate_consensus([3, 2], [1.0, 0.0], [5]).values == pytest.approx([1.0])


def test_what_is_sampled_lies_within_its_error_of_what_is_exact():
    counts, values, ks = [5, 4, 4, 1, 1], [1.0, 0.0, 0.5, 0.0, 1.0], [1, 3, 8, 16]
    true = estimate_consensus(counts, values, ks, without_answer=2, exact=True)
    found = estimate_consensus(counts, values, ks, without_answer=2, exact=False)
    assert (found.errors[:-1] > 0).all()
    assert (found.errors < 0.02).all()
    assert (np.abs(found.values - true.values) <= 4 * found.errors + 1e-12).all()


def test_what_would_be_dear_is_sampled_and_says_so():
    assert estimate_consensus([1] * 1200, [1.0] * 600 + [0.0] * 600, [2]).errors[0] > 0
    assert estimate_consensus([32, 32], [1.0, 0.0], [64]).errors[0] == 0


@pytest.mark.medium
def test_ninety_five_of_a_hundred_intervals_hold_the_truth(monkeypatch: pytest.MonkeyPatch):
    """Prompts of mixed difficulty, four attempts each. 600 experiments: sd of the share is 0.9
    %."""
    monkeypatch.setattr(statistics, "N_RESAMPLES", 1000)
    rng = np.random.default_rng(1)
    held = 0
    for experiment in range(600):
        difficulty = rng.beta(0.5, 1.0, size=100)  # mean 1/3
        low, high = bootstrap_interval(rng.binomial(4, difficulty) / 4, seed=experiment)
        held += low <= 1 / 3 <= high
    assert 0.92 <= held / 600 <= 0.975


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_prompts_that_are_all_alike_still_have_an_interval(value: float):
    low, high = bootstrap_interval([value] * 10)
    assert (low, high) == pytest.approx((0.0, 0.3085) if value == 0 else (0.6915, 1.0), abs=1e-4)


def test_an_interval_repeats_and_depends_on_its_seed():
    values = [0.0, 1.0, 1.0, 0.5, 0.2, 0.9]
    assert (
        bootstrap_interval(values)
        == bootstrap_interval(values)
        != bootstrap_interval(values, seed=1)
    )
    assert all(map(math.isnan, bootstrap_interval([])))


def test_the_p_value_is_the_share_of_all_signs():
    a, b = np.array([1.0, 0.0, 0.75, 1.0, 0.5]), np.array([0.0, 0.5, 0.25, 1.0, 0.3])
    sizes = np.abs(a - b)
    sums = [abs(np.dot(signs, sizes)) for signs in product([1, -1], repeat=5)]
    found = compare_pairs(a, b)
    assert found.p_value == pytest.approx(
        np.mean([total >= abs((a - b).sum()) - 1e-9 for total in sums])
    )
    assert found.is_exact
    assert (found.n_better, found.n_worse, found.n_prompts) == (3, 1, 5)
    assert found.difference == pytest.approx((a - b).mean())


def test_single_attempts_give_the_exact_test_of_mcnemar():
    a, b = [1] * 9 + [0] * 2 + [1] * 20, [0] * 9 + [1] * 2 + [1] * 20
    assert compare_pairs(a, b).p_value == pytest.approx(
        2 * sum(math.comb(11, i) for i in range(3)) / 2**11
    )


def test_equals_have_no_significance():
    found = compare_pairs([1.0, 0.0], [1.0, 0.0])
    assert (found.p_value, found.difference, found.low, found.high) == (1.0, 0.0, 0.0, 0.0)


def rejected(experiments: int, prompts: int, samples: int, gain: float = 0.0) -> float:
    """Share of experiments that call two models different, at 5 %."""
    rng = np.random.default_rng(2)
    found = 0
    for experiment in range(experiments):
        chance = rng.beta(1.0, 1.0, size=prompts)
        a = rng.binomial(samples, np.minimum(chance + gain, 1.0)) / samples
        found += (
            compare_pairs(a, rng.binomial(samples, chance) / samples, seed=experiment).p_value
            <= 0.05
        )
    return found / experiments


@pytest.mark.medium
def test_models_that_are_alike_differ_in_five_of_a_hundred_experiments(
    monkeypatch: pytest.MonkeyPatch,
):
    """1000 experiments: 5 % within 2.6 sd of the binomial (1.8 %); the sums are discrete, so a
    little below it."""
    monkeypatch.setattr(statistics, "N_RESAMPLES", 2)
    assert 0.032 <= rejected(1000, prompts=40, samples=8) <= 0.068


@pytest.mark.medium
def test_the_level_holds_where_signs_are_sampled(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(statistics, "N_RESAMPLES", 2)
    monkeypatch.setattr(statistics, "MAX_EXACT_SUMS", 4)
    monkeypatch.setattr(statistics, "N_SIGN_FLIPS", 999)
    assert 0.032 <= rejected(1000, prompts=40, samples=8) <= 0.068


@pytest.mark.medium
def test_a_better_model_is_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(statistics, "N_RESAMPLES", 2)
    assert rejected(50, prompts=200, samples=8, gain=0.1) > 0.95


def test_differences_of_all_sizes_are_sampled():
    rng = np.random.default_rng(0)
    a, b = rng.normal(0.3, 1.0, 60), rng.normal(0.0, 1.0, 60)
    found = compare_pairs(a, b)
    assert not found.is_exact
    assert found.low < found.difference < found.high
    assert found.p_value < 0.2
