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

from ratchet.algorithms.advantages.group import group_relative
from ratchet.algorithms.base import AlgoState
from ratchet.algorithms.filters import drop_equal_rewards, drop_truncated
from ratchet.algorithms.weightings import token_mean as token_mean_weights
from ratchet.batch import Batch

PAIRS = [(drop_equal_rewards, oracle.drop_equal_rewards), (drop_truncated, oracle.drop_truncated)]


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
    batch = filtered(filled(rows, "token_rewards"), AlgoState())
    stays = keeps(rows)
    assert batch.train_S.tolist() == kept(rows, stays)
    assert batch.trainable_T.tolist() == flat(
        kept(rows, [[m and s for m in row.mask] for row, s in zip(rows, stays, strict=True)])
    )


@pytest.mark.parametrize(("filtered", "keeps"), PAIRS)
@settings(max_examples=30)
@given(rows=episodes())
def test_denominators_count_what_is_left(filtered: Callable[..., Batch], keeps: Callable, rows: list[Row]):
    batch = filtered(filled(rows, "token_rewards"), AlgoState())
    left = [row if s else replace(row, trained=[False] * len(row.tokens)) for row, s in zip(rows, keeps(rows), strict=True)]
    assert token_mean_weights(batch).tolist() == pytest.approx(flat(kept(rows, weights_of(token_mean, left))))


@pytest.mark.parametrize("filtered", [drop_equal_rewards, drop_truncated])
def test_everything_but_the_mask_stays(filtered: Callable[..., Batch]):
    before = group_relative(filled(attempts("a", 1, 0) + attempts("b", 1, 1, ending="truncated")), AlgoState())
    after = filtered(before, AlgoState())
    assert after.n_sequences == 4
    assert torch.equal(after.rewards_S, before.rewards_S)
    assert torch.equal(after.need("advantages"), before.need("advantages"))
    assert after.train_S.tolist() == [True, True, False, False]
    assert after.trainable_T.tolist() == [False, True, True] * 2 + [False] * 6


def test_groups_of_equal_rewards_by_hand():
    rows = attempts("a", 0.1, 0.1, 0.1) + attempts("b", 1, 0) + attempts("c", 5)
    assert drop_equal_rewards(filled(rows), AlgoState()).train_S.tolist() == [False] * 3 + [True] * 2 + [False]


def test_a_greedy_answer_makes_no_group_unequal():
    rows = [*attempts("a", 1, 1), replace(attempts("a", 0, use="baseline")[0], attempt=9)]
    assert drop_equal_rewards(filled(rows), AlgoState()).train_S.tolist() == [False] * 3


def test_dense_rewards_make_equal_rewards_unequal():
    rows = [replace(row, token_rewards=[0, 0, 0.1 * i]) for i, row in enumerate(attempts("a", 1, 1))]
    assert drop_equal_rewards(filled(rows, "token_rewards"), AlgoState()).train_S.tolist() == [True, True]


def test_truncated_rows_by_hand():
    rows = attempts("a", 1, 0) + attempts("b", 1, 0, ending="truncated")
    assert drop_truncated(filled(rows), AlgoState()).train_S.tolist() == [True, True, False, False]
