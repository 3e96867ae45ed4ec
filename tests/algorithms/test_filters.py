"""Filters of the final mask against `oracles.shaping`, and by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from oracles import shaping as oracle
from oracles.cases import episodes, filled, kept
from oracles.ragged import Row, flat, token_mean, weights_of

from ratchet.algorithms.advantages.group import gdpo, group_relative
from ratchet.algorithms.base import AlgoState
from ratchet.algorithms.filters import drop_silent_groups, drop_truncated
from ratchet.algorithms.weightings import token_mean as token_mean_weights
from ratchet.batch import Batch

PAIRS = [(drop_silent_groups, oracle.drop_silent_groups), (drop_truncated, oracle.drop_truncated)]


def silenced(rows: list[Row]) -> tuple[list[Row], Batch]:
    """With numbers for advantages, all 0 in the groups of even number."""
    even = [int(row.group.removeprefix("g")) % 2 == 0 for row in rows]
    quiet = [replace(row, teacher_logprobs=[0.0] * len(row.tokens)) if e else row for row, e in zip(rows, even, strict=True)]
    batch = filled(quiet, "teacher_logprobs")
    advantages_T = torch.where(batch.trainable_T, batch.need("teacher_logprobs"), 0.0)
    return quiet, batch.fill_tokens(advantages=advantages_T)


def attempts(group: str, *rewards: float | None, **fields) -> list[Row]:
    ending = fields.pop("ending", "scored")
    return [
        Row(group, i, [1, 2, 3], [False, True, True], ending if r is not None else "unjudged", r, **fields)
        for i, r in enumerate(rewards)
    ]


@pytest.mark.parametrize(("filtered", "keeps"), PAIRS)
@settings(max_examples=60)
@given(rows=episodes())
def test_the_final_mask_equals_the_oracle(filtered: Callable[..., Batch], keeps: Callable, rows: list[Row]):
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
def test_denominators_count_what_is_left(filtered: Callable[..., Batch], keeps: Callable, rows: list[Row]):
    rows, batch = silenced(rows)
    batch = filtered(batch, AlgoState())
    left = [row if s else replace(row, trained=[False] * len(row.tokens)) for row, s in zip(rows, keeps(rows), strict=True)]
    assert token_mean_weights(batch).tolist() == pytest.approx(flat(kept(rows, weights_of(token_mean, left))))


@pytest.mark.parametrize("filtered", [drop_silent_groups, drop_truncated])
def test_everything_but_the_mask_stays(filtered: Callable[..., Batch]):
    before = group_relative(filled(attempts("a", 1, 0) + attempts("b", 1, 1, ending="truncated")), AlgoState())
    after = filtered(before, AlgoState())
    assert after.n_sequences == 4
    assert torch.equal(after.rewards_S, before.rewards_S)
    assert torch.equal(after.need("advantages"), before.need("advantages"))
    assert after.train_S.tolist() == [True, True, False, False]
    assert after.trainable_T.tolist() == [False, True, True] * 2 + [False] * 6


def estimated(rows: list[Row], *columns: str) -> Batch:
    return group_relative(filled(rows, *columns), AlgoState())


def test_groups_of_equal_rewards_by_hand():
    rows = attempts("a", 0.1, 0.1, 0.1) + attempts("b", 1, 0) + attempts("c", 5)
    assert drop_silent_groups(estimated(rows), AlgoState()).train_S.tolist() == [False] * 3 + [True] * 2 + [False]


def test_a_greedy_answer_makes_no_group_loud():
    rows = [*attempts("a", 1, 1), replace(attempts("a", 0, use="baseline")[0], attempt=9)]
    assert drop_silent_groups(estimated(rows), AlgoState()).train_S.tolist() == [False] * 3


def test_dense_rewards_give_a_signal_too():
    rows = [replace(row, token_rewards=[0, 0, 0.1 * i]) for i, row in enumerate(attempts("a", 1, 1))]
    assert drop_silent_groups(estimated(rows, "token_rewards"), AlgoState()).train_S.tolist() == [True, True]


def test_parts_that_cancel_in_their_sum_are_a_signal():
    parts = [{"x": 1.0, "y": 0.0}, {"x": 0.0, "y": 1.0}]
    loud = [replace(row, parts=p) for row, p in zip(attempts("a", 1, 1), parts, strict=True)]
    silent = [replace(row, parts={"x": 0.1, "y": 0.7}) for row in attempts("b", 0.8, 0.8, 0.8)]
    batch = gdpo(filled(loud + silent), AlgoState(), weights={"x": 1.0, "y": 0.5})
    assert drop_silent_groups(batch, AlgoState()).train_S.tolist() == [True] * 2 + [False] * 3


def test_truncated_rows_by_hand():
    rows = attempts("a", 1, 0) + attempts("b", 1, 0, ending="truncated")
    assert drop_truncated(filled(rows), AlgoState()).train_S.tolist() == [True, True, False, False]
