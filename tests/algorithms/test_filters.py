"""Filters of the final mask against `oracles.shaping`, and by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import shaping as oracle
from oracles.cases import episodes, filled, groups, kept
from oracles.ragged import Row, flat, token_mean, weights_of

from ratchet.algorithms.advantages.group_baselines import gdpo, group_relative
from ratchet.algorithms.base import AlgoState
from ratchet.algorithms.filters import (
    drop_by_mean_reward,
    drop_groups_without_signal,
    drop_truncated,
)
from ratchet.algorithms.loss_aggregation import token_mean as token_mean_weights
from ratchet.algorithms.shaping import copy_judged_rewards, scale_rewards
from ratchet.batch import Batch
from ratchet.config.resolve import build, resolve
from ratchet.data.packing import pack

PAIRS = [
    (drop_groups_without_signal, oracle.drop_groups_without_signal),
    (drop_truncated, oracle.drop_truncated),
]


def silenced(rows: list[Row]) -> tuple[list[Row], Batch]:
    """With numbers for advantages, all 0 in the groups of even number."""
    even = [int(row.group.removeprefix("g")) % 2 == 0 for row in rows]
    quiet = [
        replace(row, teacher_logprobs=[0.0] * len(row.tokens)) if e else row
        for row, e in zip(rows, even, strict=True)
    ]
    batch = filled(quiet, "teacher_logprobs")
    advantages_T = torch.where(batch.trainable_T, batch.need("teacher_logprobs"), 0.0)
    return quiet, batch.fill_tokens(advantages=advantages_T)


def attempts(group: str, *rewards: float | None, **fields) -> list[Row]:
    ending = fields.pop("ending", "scored")
    return [
        Row(
            group,
            i,
            [1, 2, 3],
            [False, True, True],
            ending if r is not None else "unjudged",
            r,
            **fields,
        )
        for i, r in enumerate(rewards)
    ]


@pytest.mark.parametrize(("filtered", "keeps"), PAIRS)
@settings(max_examples=60)
@given(rows=episodes())
def test_the_final_mask_equals_the_oracle(
    filtered: Callable[..., Batch], keeps: Callable, rows: list[Row]
):
    rows, batch = silenced(rows)
    batch = filtered(batch, AlgoState())
    stays = keeps(rows)
    assert batch.train_S.tolist() == kept(rows, stays)
    assert batch.trainable_T.tolist() == flat(
        kept(rows, [[m and s for m in row.mask] for row, s in zip(rows, stays, strict=True)])
    )


@pytest.mark.parametrize(("filtered", "keeps"), PAIRS)
@settings(max_examples=30)
@given(rows=episodes())
def test_denominators_count_what_is_left(
    filtered: Callable[..., Batch], keeps: Callable, rows: list[Row]
):
    rows, batch = silenced(rows)
    batch = filtered(batch, AlgoState())
    left = [
        row if s else replace(row, trained=[False] * len(row.tokens))
        for row, s in zip(rows, keeps(rows), strict=True)
    ]
    assert token_mean_weights(batch).tolist() == pytest.approx(
        flat(kept(rows, weights_of(token_mean, left)))
    )


@pytest.mark.parametrize("filtered", [drop_groups_without_signal, drop_truncated])
def test_everything_but_the_mask_stays(filtered: Callable[..., Batch]):
    before = group_relative(
        filled(attempts("a", 1, 0) + attempts("b", 1, 1, ending="truncated")), AlgoState()
    )
    after = filtered(before, AlgoState())
    assert after.n_sequences == 4
    assert torch.equal(after.rewards_S, before.rewards_S)
    assert torch.equal(after.need("advantages"), before.need("advantages"))
    assert after.train_S.tolist() == [True, True, False, False]
    assert after.trainable_T.tolist() == [False, True, True] * 2 + [False] * 6


@settings(max_examples=60)
@given(rows=episodes(), low=st.sampled_from([-1.0, 0.0, 0.3]), high=st.sampled_from([0.3, 1.0]))
def test_groups_by_mean_reward_equal_the_oracle(rows: list[Row], low: float, high: float):
    _, batch = silenced(rows)
    batch = drop_by_mean_reward(
        copy_judged_rewards(batch, AlgoState()), AlgoState(), low=low, high=high
    )
    stays = oracle.keep_by_mean_reward(rows, low, high)
    assert batch.train_S.tolist() == kept(rows, stays)


def test_mean_rewards_lie_between_the_bounds_before_shaping():
    rows = attempts("a", 0, 0, 0, 1) + attempts("b", 0, 1) + attempts("c", 1, 1, 1, 0)
    before = copy_judged_rewards(filled(rows), AlgoState())
    shaped = group_relative(scale_rewards(before, AlgoState(), factor=9.0), AlgoState())
    batch = drop_by_mean_reward(shaped, AlgoState(), low=0.25, high=0.75)
    assert batch.train_S.tolist() == [False] * 4 + [True] * 2 + [False] * 4
    assert not batch.need("advantages")[(batch.sequence_T < 4) | (batch.sequence_T >= 6)].any()


def estimated(rows: list[Row], *columns: str) -> Batch:
    return group_relative(filled(rows, *columns), AlgoState())


def test_groups_of_equal_rewards_by_hand():
    rows = attempts("a", 0.1, 0.1, 0.1) + attempts("b", 1, 0) + attempts("c", 5)
    assert drop_groups_without_signal(estimated(rows), AlgoState()).train_S.tolist() == [
        False
    ] * 3 + [True] * 2 + [False]


def test_a_greedy_answer_makes_no_group_loud():
    rows = [*attempts("a", 1, 1), replace(attempts("a", 0, use="baseline")[0], attempt=9)]
    assert drop_groups_without_signal(estimated(rows), AlgoState()).train_S.tolist() == [False] * 3


def test_dense_rewards_give_a_signal_too():
    rows = [
        replace(row, token_rewards=[0, 0, 0.1 * i]) for i, row in enumerate(attempts("a", 1, 1))
    ]
    assert drop_groups_without_signal(
        estimated(rows, "token_rewards"), AlgoState()
    ).train_S.tolist() == [
        True,
        True,
    ]


def test_parts_that_cancel_in_their_sum_are_a_signal():
    parts = [{"x": 1.0, "y": 0.0}, {"x": 0.0, "y": 1.0}]
    loud = [replace(row, parts=p) for row, p in zip(attempts("a", 1, 1), parts, strict=True)]
    silent = [replace(row, parts={"x": 0.1, "y": 0.7}) for row in attempts("b", 0.8, 0.8, 0.8)]
    batch = gdpo(filled(loud + silent), AlgoState(), weights={"x": 1.0, "y": 0.5})
    assert (
        drop_groups_without_signal(batch, AlgoState()).train_S.tolist() == [True] * 2 + [False] * 3
    )


def test_truncated_rows_by_hand():
    rows = attempts("a", 1, 0) + attempts("b", 1, 0, ending="truncated")
    assert drop_truncated(filled(rows), AlgoState()).train_S.tolist() == [True, True, False, False]


# --- which rewards decide: as judged, or as shaped


def answers(group: str, *judged: tuple[float, int]) -> list[Row]:
    """Attempts of given reward and length."""
    return [
        Row(group, i, [1] * (n + 1), [False] + [True] * n, "scored", reward)
        for i, (reward, n) in enumerate(judged)
    ]


OVERLONG = {"kind": "overlong_penalty", "max_length": 8, "buffer": 4}
WRONG, MIXED, RIGHT = (
    answers("wrong", (0, 2), (0, 6), (0, 8)),
    answers("mixed", (0, 2), (1, 8), (0, 6)),
    answers("right", (1, 7), (1, 3), (1, 8)),
)


def prepared(rows: list[Row], **options) -> tuple[Batch, AlgoState]:
    algorithm = build(resolve("algorithm", {"kind": "dapo", "shaping": [OVERLONG], **options}))
    state = AlgoState()
    return algorithm.advantage(pack(groups(rows)), state), state


def trained_groups(batch: Batch) -> list[bool]:
    return [
        bool(count) for count in batch.group_sum(batch.sequence_sum(batch.trainable_T.double()))
    ]


def test_dapo_counts_right_answers_before_it_penalises_their_length():
    """Eq. 8 asks for 0 < right answers < G, so a group that is all wrong, or all right, trains on
    nothing."""
    batch, _ = prepared(WRONG + MIXED + RIGHT)
    assert trained_groups(batch) == [False, True, False]
    outside_T = ~batch.trainable_T
    assert not batch.need("advantages")[outside_T].any()
    alone, _ = prepared(MIXED)
    assert torch.equal(
        batch.need("advantages")[batch.trainable_T], alone.need("advantages")[alone.trainable_T]
    )
    # 1 - 1 for a right answer of 8 tokens; 0 - 0.5 for a wrong one of 6
    right, long_wrong = 0.0, -0.5
    assert batch.rewards_S[3:6].tolist() == pytest.approx([0.0, right, long_wrong])


def test_with_drop_shaped_lengths_alone_are_a_signal():
    batch, _ = prepared(WRONG + MIXED + RIGHT, equal_rewards="drop_shaped")
    assert trained_groups(batch) == [True, True, True]


def test_a_group_that_shaping_levels_still_counts_for_dapo():
    """Unequal as judged, equal as shaped: it stays in the means, with advantages of 0."""
    rows = answers("levelled", (1, 8), (0, 2))
    assert trained_groups(prepared(rows)[0]) == [True]
    assert not prepared(rows)[0].need("advantages").any()
    assert trained_groups(prepared(rows, equal_rewards="drop_shaped")[0]) == [False]


def test_what_redefines_the_reward_decides_too():
    """Weights of parts and bounds say what the reward is; a penalty for length does not."""
    parts = [{"right": 1.0, "form": 0.0}, {"right": 0.0, "form": 1.0}]
    rows = [
        replace(row, parts=p) for row, p in zip(answers("a", (1, 2), (1, 6)), parts, strict=True)
    ]
    weights = {"kind": "component_weights", "weights": {"right": 1.0, "form": 0.1}}
    assert trained_groups(prepared(rows)[0]) == [False]
    assert trained_groups(prepared(rows, shaping=[weights, OVERLONG])[0]) == [True]
    bounds = {"kind": "clip", "high": 1.0}
    assert trained_groups(
        prepared(answers("b", (2, 2), (3, 6)), shaping=[bounds, OVERLONG])[0]
    ) == [False]


def test_looking_for_a_signal_leaves_the_state_alone():
    running = {"kind": "normalise", "over": "running"}
    _, state = prepared(MIXED, shaping=[running, OVERLONG])
    assert state.numbers["reward_count"] == 3
