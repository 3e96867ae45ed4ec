"""Group-relative advantages against `oracles.advantages`, and by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import advantages as oracle
from oracles.cases import by_row, column, groups, kept, rollouts
from oracles.ragged import Row, in_order

from ratchet.algorithms.advantages.group_baselines import group_relative
from ratchet.algorithms.base import AlgoState
from ratchet.batch import Batch
from ratchet.data.packing import pack
from ratchet.errors import DataError

SCALES = ("std", "batch_std", "none")


def attempts(group: str, *rewards: float | None, use: str = "train") -> list[Row]:
    """One row a reward, of two prompt tokens and two trained ones; None: there was nothing to
    judge."""
    return [
        Row(
            group,
            i,
            [1, 2, 3, 4],
            [False, False, True, True],
            "unjudged" if r is None else "scored",
            r,
            use,
        )
        for i, r in enumerate(rewards)
    ]


def estimate(rows: list[Row], **options) -> Batch:
    return group_relative(pack(groups(rows)), AlgoState(), **options)


def advantages(rows: list[Row], **options) -> list[float]:
    return by_row(estimate(rows, **options))


@given(rollouts(), st.sampled_from(SCALES), st.sampled_from([1e-6, 1e-4]))
def test_equals_the_oracle(rows: list[Row], scale: str, epsilon: float):
    batch = estimate(rows, scale=scale, epsilon=epsilon)
    assert batch.need("advantages").dtype == torch.float64
    expected = oracle.group_relative(rows, scale=scale, epsilon=epsilon)
    on_tokens = column(kept(rows, oracle.on_tokens(rows, expected)))
    torch.testing.assert_close(batch.need("advantages"), on_tokens, rtol=1e-10, atol=1e-10)


def test_two_of_four_right():
    # mean 1/2, sample variance 4 * 1/4 / 3 = 1/3, so (1 - 1/2) / sqrt(1/3) = sqrt(3) / 2 =
    # 0.8660254
    a = math.sqrt(3) / 2
    assert advantages(attempts("g", 1, 0, 0, 1), epsilon=0.0) == pytest.approx(
        [a, -a, -a, a], abs=1e-15
    )


def test_one_of_four_right():
    # mean 1/4, sample variance (9/16 + 3/16) / 3 = 1/4
    assert advantages(attempts("g", 1, 0, 0, 0), epsilon=0.0) == pytest.approx(
        [1.5, -0.5, -0.5, -0.5], abs=1e-15
    )


def test_the_default_is_std_with_a_millionth_added():
    assert advantages(attempts("g", 1, 0, 0, 0)) == pytest.approx(
        [0.75 / 0.500001] + [-0.25 / 0.500001] * 3, abs=1e-12
    )


def test_without_std_only_the_mean_goes():
    assert advantages(attempts("g", 3, 1, 0, 0), scale="none") == [2, 0, -1, -1]


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 1 / 3, 1e17, -0.7])
def test_equal_rewards_give_exactly_zero(reward: float, scale: str):
    # 0.1 + 0.1 + 0.1 is not 0.3: the mean of equal rewards may be another number
    for n in (2, 3, 7, 10):
        assert advantages(attempts("g", *[reward] * n), scale=scale) == [0.0] * n


@pytest.mark.parametrize("scale", SCALES)
def test_an_attempt_without_a_judged_peer_gets_zero(scale: str):
    assert advantages(attempts("g", 5.0), scale=scale) == [0.0]
    assert advantages(attempts("g", None, 5.0, None), scale=scale) == [0.0] * 3
    assert advantages(attempts("g", None, None), scale=scale) == [0.0] * 2


def test_unjudged_attempts_do_not_move_the_statistics():
    # without the unjudged this is [1, 0, 0, 0]; one counted as 0 would give a mean of 1/6
    rows = attempts("g", None, 1, 0, 0, None, 0)
    assert advantages(rows, epsilon=0.0) == pytest.approx([0, 1.5, -0.5, -0.5, 0, -0.5])


@pytest.mark.parametrize("ending", ["failed", "cancelled", "truncated"])
def test_failures_do_not_move_the_statistics(ending: str):
    rows = [
        replace(row, ending=ending) if row.reward is None else row
        for row in attempts("g", None, 1, 0, 0, None, 0)
    ]
    assert advantages(rows, epsilon=0.0) == pytest.approx([1.5, -0.5, -0.5, -0.5])


def test_a_truncated_attempt_with_a_reward_counts():
    rows = [replace(row, ending="truncated") for row in attempts("g", 1, 0, 0, 0)]
    assert advantages(rows, epsilon=0.0) == pytest.approx([1.5, -0.5, -0.5, -0.5])


def test_ragged_groups_do_not_mix():
    # The counts 4 + 2 + 1: reshaping into rows of any length would mix them.
    rows = attempts("a", 1, 0, 0, 0) + attempts("b", 2, 1) + attempts("c", 9)
    half = math.sqrt(0.5)
    assert advantages(rows, epsilon=0.0) == pytest.approx([1.5, -0.5, -0.5, -0.5, half, -half, 0])


def test_groups_of_equal_prompts_stay_apart():
    # `groups` gives every group the same task
    rows = attempts("draw 1", 1, 1) + attempts("draw 2", 0, 0)
    assert advantages(rows) == [0.0] * 4


def test_a_forked_attempt_counts_once():
    # Attempt 0 left three rows with its reward of 1; counted by row the mean would be 3/6, by
    # attempt it is 1/4.
    first, *others = attempts("g", 1, 0, 0, 0)
    assert advantages([first, first, first, *others], epsilon=0.0) == pytest.approx(
        [1.5] * 3 + [-0.5] * 3
    )


def test_an_attempt_with_two_rewards_is_refused():
    first, other = attempts("g", 1, 0)
    with pytest.raises(DataError, match="attempt 0"):
        estimate([first, replace(first, reward=0.5), other])


def test_a_baseline_row_is_not_a_sample_of_the_group():
    rows = attempts("g", 1, 0, 0, 0)
    baseline = replace(attempts("g", 100.0, use="baseline")[0], attempt=9)
    batch = estimate([*rows, baseline], epsilon=0.0)
    assert by_row(batch) == pytest.approx([1.5, -0.5, -0.5, -0.5, 0])
    assert batch.need("advantages").tolist()[-4:] == [0.0] * 4


def test_tokens_that_do_not_train_get_zero():
    rows = [
        replace(row, tokens=[1, 2, 3, 4, 5], trained=[False, True, False, False, True])
        for row in attempts("g", 1, 0, 0, 0)
    ]
    assert estimate(rows, epsilon=0.0).need("advantages").tolist()[:5] == pytest.approx(
        [0, 1.5, 0, 0, 1.5]
    )


def test_rewards_of_another_group_change_nothing():
    a = advantages(attempts("a", 1, 0) + attempts("b", 0.3, 0.1, 0.7))
    b = advantages(attempts("a", -50, 3) + attempts("b", 0.3, 0.1, 0.7))
    assert a[2:] == b[2:]
    assert a[:2] != b[:2]


@given(rollouts(), st.sampled_from(SCALES))
def test_order_of_groups_and_of_attempts_does_not_matter(rows: list[Row], scale: str):
    backwards = rows[::-1]
    torch.testing.assert_close(
        torch.tensor(advantages(backwards, scale=scale)),
        torch.tensor(advantages(rows, scale=scale)).flip(0),
        rtol=1e-10,
        atol=1e-12,
    )


@given(rollouts(), st.sampled_from(SCALES))
def test_advantages_sum_to_zero_over_the_attempts_of_a_group(rows: list[Row], scale: str):
    found = advantages(rows, scale=scale)
    rows = kept(rows, rows)
    spoken = {row.group for row in rows} - {
        row.group for row in rows if row.learns_from_reward and not any(row.mask)
    }
    for group in [name for name in in_order(rows) if name in spoken]:
        by_attempt = {
            row.attempt: a for row, a in zip(rows, found, strict=True) if row.group == group
        }
        assert sum(by_attempt.values()) == pytest.approx(0, abs=1e-9)
