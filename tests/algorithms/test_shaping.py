"""Shaping of rewards against `oracles.shaping`, and by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Literal, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import shaping as oracle
from oracles.cases import column, episodes, filled, kept
from oracles.ragged import Row, Span

from ratchet.algorithms import shaping
from ratchet.algorithms.advantages.per_turn import compute_step_rewards
from ratchet.algorithms.base import AlgoState
from ratchet.batch import Batch
from ratchet.errors import ConfigError, DataError

Over = Literal["group", "batch", "running"]
OVERS: tuple[Over, ...] = get_args(Over)


def rewards(batch: Batch) -> list[float | None]:
    return [None if math.isnan(r) else r for r in batch.rewards_S.tolist()]


def equal(batch: Batch, rows: list[Row], expected: list[float | None], rtol: float = 1e-10) -> None:
    """The rewards; a row that nobody judged still has none, and nothing else of the batch moved."""
    before = filled(rows)
    wanted = column([[math.nan if r is None else r for r in kept(rows, expected)]])
    torch.testing.assert_close(batch.rewards_S, wanted, rtol=rtol, atol=1e-10, equal_nan=True)
    assert torch.equal(batch.scored_S, before.scored_S)
    assert torch.equal(batch.trainable_T, before.trainable_T)
    assert torch.equal(batch.train_S, before.train_S)


def attempts(*found: float | None, length: int = 2, **fields) -> list[Row]:
    ending = fields.pop("ending", None)
    return [
        Row(
            "g",
            i,
            [1] * (length + 1),
            [False] + [True] * length,
            ending or ("unjudged" if r is None else "scored"),
            r,
            **fields,
        )
        for i, r in enumerate(found)
    ]


PLAIN: list[tuple[str, dict[str, float | None]]] = [
    ("overlong_penalty", {"max_length": 5, "buffer": 3, "factor": 0.5}),
    ("overlong_penalty", {"max_length": 4, "buffer": 1, "factor": 1.0}),
    ("stop_properly", {"coef": 0.25}),
    ("stop_properly", {"coef": 0.0}),
    ("length_penalty", {"coef": 0.1, "free": 0}),
    ("length_penalty", {"coef": 0.3, "free": 2}),
    ("effort_length", {"max_length": 3, "bonus": 2.0, "penalty": 0.5}),
    ("effort_length", {"max_length": 2, "bonus": 0.5, "penalty": 2.0}),
    ("clip_rewards", {"low": -0.5, "high": 0.5}),
    ("clip_rewards", {"low": None, "high": 0.5}),
    ("clip_rewards", {"low": 0.2, "high": None}),
]


@pytest.mark.parametrize(("name", "options"), PLAIN)
@settings(max_examples=settings.default.max_examples // 2)
@given(rows=episodes())
def test_equals_the_oracle(name: str, options: dict[str, float | None], rows: list[Row]):
    batch = getattr(shaping, name)(filled(rows), AlgoState(), **options)
    equal(batch, rows, getattr(oracle, name)(rows, **options))


def test_only_tasks_of_the_named_levels_of_effort_pay_by_length():
    batch = replace(
        filled(attempts(1.0, 1.0, length=4)), tags=("low", "high"), tag_S=torch.tensor([0, 1])
    )
    shaped = shaping.effort_length(batch, AlgoState(), max_length=8, tags=("low", "absent"))
    assert rewards(shaped) == [1.5, 1.0]


def test_overlong_answers_pay_by_the_token_and_then_in_full():
    # L = 10, B = 4: free up to 6 tokens, a quarter more each token, -1 from 10 on
    for length, penalty in [(1, 0), (6, 0), (7, -0.25), (9, -0.75), (10, -1), (11, -1), (50, -1)]:
        batch = shaping.overlong_penalty(
            filled(attempts(1.0, length=length)), AlgoState(), max_length=10, buffer=4, factor=2
        )
        assert rewards(batch) == [1 + 2 * penalty], length


def test_the_length_of_a_forked_attempt_is_that_of_all_its_rows():
    (row,) = attempts(1.0, length=4)
    batch = shaping.length_penalty(
        filled([row, row, replace(row, attempt=1)]), AlgoState(), coef=0.125, free=2
    )
    assert rewards(batch) == [1 - 0.125 * 6, 1 - 0.125 * 6, 1 - 0.125 * 2]


def test_a_greedy_answer_pays_for_its_length_as_samples_do():
    rows = [
        *attempts(1.0, length=8),
        replace(attempts(1.0, length=8, use="baseline")[0], attempt=9),
    ]
    batch = shaping.overlong_penalty(filled(rows), AlgoState(), max_length=8, buffer=4)
    assert rewards(batch) == [0, 0]


def test_what_an_environment_wrote_has_no_length():
    row = Row(
        "g",
        0,
        [1] * 9,
        [False, True, False, False, False, False, False, False, True],
        "scored",
        1.0,
    )
    assert rewards(shaping.length_penalty(filled([row]), AlgoState(), coef=0.25)) == [0.5]


def test_an_answer_cut_off_earns_a_share_of_what_it_would_have_but_no_less_is_made_more():
    rows = attempts(1.0, -1.0, 0.0, ending="truncated")
    assert rewards(shaping.stop_properly(filled(rows), AlgoState(), coef=0.25)) == [0.25, -1, 0]
    assert rewards(shaping.stop_properly(filled(attempts(1.0, -1.0)), AlgoState(), coef=0.25)) == [
        1,
        -1,
    ]


@settings(max_examples=30)
@given(episodes(), st.sampled_from([(0.5, 0.0), (-2.0, 0.0), (2.0, -1.0)]))
def test_scaling_scales_the_rewards_of_turns_too(rows: list[Row], line: tuple[float, float]):
    factor, shift = line
    batch = shaping.scale_rewards(filled(rows), AlgoState(), factor=factor, shift=shift)
    scaled = oracle.scale_rewards(rows, factor=factor, shift=shift)
    equal(batch, rows, [row.reward for row in scaled])
    torch.testing.assert_close(
        batch.turn_rewards_T, filled(scaled).turn_rewards_T, equal_nan=True, rtol=1e-15, atol=0
    )


def test_scaling_by_hand():
    row = Row(
        "g",
        0,
        [1] * 4,
        [False, True, False, True],
        "scored",
        3.0,
        turns=[Span(1, 2, 1.0), Span(3, 4)],
    )
    batch = shaping.scale_rewards(filled([row]), AlgoState(), factor=-2)
    assert rewards(batch) == [-6]
    assert batch.turn_rewards_T.nan_to_num(99).tolist() == [99, -2, 99, 99]


# --- by their statistics


@settings(max_examples=50)
@given(episodes(), st.booleans(), st.sampled_from([1e-6, 0.1]))
def test_normalising_over_groups_equals_the_oracle(rows: list[Row], center: bool, epsilon: float):
    batch = shaping.normalise_rewards(
        filled(rows), AlgoState(), over="group", center=center, epsilon=epsilon
    )
    equal(batch, rows, oracle.normalise_over_groups(rows, center=center, epsilon=epsilon))


@settings(max_examples=50)
@given(episodes(), st.booleans(), st.sampled_from([1e-6, 0.1]))
def test_normalising_over_the_batch_equals_the_oracle(
    rows: list[Row], center: bool, epsilon: float
):
    batch = shaping.normalise_rewards(
        filled(rows), AlgoState(), over="batch", center=center, epsilon=epsilon
    )
    samples = oracle.samples_of(rows)
    equal(
        batch,
        rows,
        oracle.normalise([row.reward for row in rows], samples, center=center, epsilon=epsilon),
    )


@settings(max_examples=30)
@given(st.lists(episodes(max_groups=2), min_size=1, max_size=3), st.booleans())
def test_running_statistics_are_those_of_all_steps_so_far(steps: list[list[Row]], center: bool):
    state, samples = AlgoState(), []
    for rows in steps:
        samples += oracle.samples_of(rows)
        batch = shaping.normalise_rewards(
            filled(rows), state, over="running", center=center, epsilon=1e-3
        )
        equal(
            batch,
            rows,
            oracle.normalise([row.reward for row in rows], samples, center=center, epsilon=1e-3),
        )
        assert state.numbers.get("reward_count", 0) == len(samples)


def test_normalising_by_hand():
    # mean 1/4, std 1/2; the greedy answer is measured by the samples' statistics, and enters none
    rows = [*attempts(1.0, 0.0, 0.0, 0.0), replace(attempts(5.0, use="baseline")[0], attempt=9)]
    for over in OVERS:
        batch = shaping.normalise_rewards(filled(rows), AlgoState(), over=over, epsilon=0.0)
        assert rewards(batch) == pytest.approx([1.5, -0.5, -0.5, -0.5, 9.5])
        scaled = shaping.normalise_rewards(
            filled(rows), AlgoState(), over=over, epsilon=0.0, center=False
        )
        assert rewards(scaled) == pytest.approx([2, 0, 0, 0, 10])


def test_running_statistics_by_hand():
    state = AlgoState()
    shaping.normalise_rewards(filled(attempts(1.0, 0.0)), state, over="running")
    batch = shaping.normalise_rewards(
        filled(attempts(0.0, 0.0)), state, over="running", epsilon=0.0
    )
    assert rewards(batch) == pytest.approx([-0.5, -0.5])  # of 1 0 0 0
    assert state.numbers == pytest.approx(
        {"reward_count": 4, "reward_mean": 0.25, "reward_m2": 0.75}
    )


@pytest.mark.parametrize("over", OVERS)
@pytest.mark.parametrize("reward", [0.1, 0.3, 1 / 3, 5.0])
@pytest.mark.parametrize("n", [1, 3, 6, 10])
def test_equal_rewards_are_centred_and_never_blown_up(over: Over, reward: float, n: int):
    """0.1 + 0.1 + 0.1 is not 0.3: a spread that is a rounding error must not divide."""
    rows = filled(attempts(*[reward] * n))
    centred = shaping.normalise_rewards(rows, AlgoState(), over=over)
    assert rewards(centred) == pytest.approx([0.0] * n, abs=1e-12)
    assert (
        rewards(shaping.normalise_rewards(rows, AlgoState(), over=over, center=False))
        == [reward] * n
    )


def test_a_forked_attempt_counts_once_in_statistics():
    first, *others = attempts(1.0, 0.0, 0.0, 0.0)
    for over in OVERS:
        batch = shaping.normalise_rewards(
            filled([first, first, *others]), AlgoState(), over=over, epsilon=0.0
        )
        assert rewards(batch) == pytest.approx([1.5, 1.5, -0.5, -0.5, -0.5])


def test_an_attempt_with_two_rewards_is_refused():
    first, other = attempts(1.0, 0.0)
    with pytest.raises(DataError, match="attempt 0"):
        shaping.normalise_rewards(
            filled([first, replace(first, reward=0.5), other]), AlgoState(), over="batch"
        )


# --- by parts


@settings(max_examples=40)
@given(
    episodes(),
    st.dictionaries(
        st.sampled_from(["right", "form"]), st.sampled_from([1.0, 0.3, -2.0]), min_size=1
    ),
)
def test_components_equal_the_oracle(rows: list[Row], weights: dict[str, float]):
    known = {name for row in rows for name in row.parts}
    if not filled(rows).n_sequences:
        return
    if set(weights) <= known:
        equal(
            shaping.component_weights(filled(rows), AlgoState(), weights=weights),
            rows,
            oracle.component_weights(rows, weights),
        )
    else:
        with pytest.raises(ConfigError, match="|".join(set(weights) - known)):
            shaping.component_weights(filled(rows), AlgoState(), weights=weights)


def test_components_by_hand():
    parts = [{"right": 1.0, "form": 0.5}, {"right": 1.0}, {}]
    rows = [
        replace(row, parts=own)
        for row, own in zip(attempts(7.0, 8.0, 9.0, None), [*parts, {}], strict=True)
    ]
    batch = shaping.component_weights(
        filled(rows), AlgoState(), weights={"right": 2.0, "form": -1.0}
    )
    assert rewards(batch) == [1.5, 2, 0, None]


# --- all of them

ALL: list[Callable[..., Batch]] = [
    *(partial(getattr(shaping, name), **options) for name, options in PLAIN),
    partial(shaping.scale_rewards, factor=0.5),
    *(partial(shaping.normalise_rewards, over=over) for over in OVERS),
]


@pytest.mark.parametrize("shape", ALL)
def test_what_nobody_judged_has_no_reward_afterwards_either(shape: Callable[..., Batch]):
    batch = shape(filled(attempts(None, 1.0, None)), AlgoState())
    assert [r is None for r in rewards(batch)] == [True, False, True]
    assert rewards(shape(filled(attempts(None)), AlgoState())) == [None]


@pytest.mark.parametrize("shape", ALL)
def test_a_batch_that_lost_all_its_rows_goes_through(shape: Callable[..., Batch]):
    assert rewards(shape(filled(attempts(None, ending="failed")), AlgoState())) == []


def turned(*rewards: float, of_turns: tuple[float, ...]) -> Batch:
    """An attempt for each reward, all of turns of two tokens that earned `of_turns`."""
    turns = [Span(1 + 2 * i, 3 + 2 * i, reward) for i, reward in enumerate(of_turns)]
    n, parts = 1 + 2 * len(turns), {"environment": sum(of_turns), "form": 1.0}
    trained = [False] + [True] * (n - 1)
    return filled(
        [
            Row("g", i, [1] * n, trained, reward=r, turns=turns, parts=parts)
            for i, r in enumerate(rewards)
        ]
    )


def steps_of(batch: Batch) -> list[float]:
    """What the first row's turns of two tokens end with."""
    return compute_step_rewards(batch)[2 : batch.lengths_S[0] : 2].tolist()


def test_normalising_scales_the_rewards_of_turns_and_centres_at_the_end():
    # rewards 3 and 1: mean 2, deviation sqrt(2); the first is 1 / sqrt(2) then, half of which its
    # first turn earned
    batch = shaping.normalise_rewards(
        turned(3.0, 1.0, of_turns=(0.5, 0.25)), AlgoState(), over="batch", epsilon=1e-12
    )
    assert steps_of(batch) == pytest.approx([0.5 / 2**0.5, 0.5 / 2**0.5])


def test_the_rewards_of_turns_get_the_weight_of_their_part():
    # 2 * 0.75 - 1 * 1: the first turn's 2 * 0.5, then 2 * 0.25 - 1
    batch = shaping.component_weights(
        turned(1.75, of_turns=(0.5, 0.25)), AlgoState(), weights={"environment": 2.0, "form": -1.0}
    )
    assert steps_of(batch) == pytest.approx([1.0, -0.5])
    # and none, where it has none: what is left is paid at the end
    batch = shaping.component_weights(
        turned(1.75, of_turns=(0.5, 0.25)), AlgoState(), weights={"form": 3.0}
    )
    assert steps_of(batch) == [0.0, 3.0]


def test_what_a_bound_cuts_off_is_borne_by_the_last_step():
    batch = shaping.clip_rewards(turned(1.5, of_turns=(1.0, 0.5)), AlgoState(), high=1.2)
    assert steps_of(batch) == pytest.approx([1.0, 0.2])
