"""How a batch is cut into micro-batches."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ratchet.batch import Batch
from ratchet.data.packing import pack
from ratchet.learners.compute.microbatching import plan_microbatches
from ratchet.types import Group, Message, Task, Trajectory

TASK = Task("t", (Message("user", "?"),))


def packed(groups: list[list[list[int]]]) -> Batch:
    """Groups of rows of tokens; all but the first token train."""
    rows = [
        [Trajectory.supervised(row, [False] + [True] * (len(row) - 1)) for row in group]
        for group in groups
    ]
    return pack([Group(f"g{i}", TASK, tuple(group)) for i, group in enumerate(rows)])


@st.composite
def batches(draw: st.DrawFn) -> list[list[list[int]]]:
    token = st.integers(0, 2)
    groups = []
    for _ in range(draw(st.integers(1, 4))):
        prompt = draw(st.lists(token, min_size=1, max_size=12))
        answers = draw(st.lists(st.lists(token, max_size=6), min_size=1, max_size=4))
        groups.append([[*prompt, *answer] for answer in answers])
    return groups


@given(batches(), st.integers(1, 40), st.sampled_from(["sequence", "group"]), st.booleans())
@settings(max_examples=150, deadline=None)
def test_every_row_is_in_the_plan_once_within_its_budget(
    groups: list[list[list[int]]], max_tokens: int, unit: Literal["sequence", "group"], shares: bool
):
    batch = packed(groups)
    plan = plan_microbatches(batch, max_tokens=max_tokens, unit=unit, shares_prefixes=shares)
    assert sorted(row for rows in plan for row in rows) == list(range(batch.n_sequences))
    flat = [row for group in groups for row in group]
    for rows in plan:
        units = {int(batch.group_S[row]) if unit == "group" else row for row in rows}
        distinct = {tuple(flat[row][: t + 1]) for row in rows for t in range(len(flat[row]))}
        size = len(distinct) if shares else int(batch.lengths_S[rows].sum())
        assert size <= max_tokens or len(units) == 1
    if unit == "group":
        parts = [{int(batch.group_S[row]) for row in rows} for rows in plan]
        assert sum(map(len, parts)) == batch.n_groups


@pytest.mark.parametrize(
    ("shares", "plan"), [(False, [[0, 3], [1], [4], [2], [5]]), (True, [[0, 1, 2], [3, 4, 5]])]
)
def test_attempts_at_a_prompt_go_together_where_it_counts_once(shares: bool, plan: list[list[int]]):
    rng = np.random.default_rng(0)
    groups = []
    for _ in range(2):
        prompt = rng.integers(0, 9, 10).tolist()
        groups.append([[*prompt, *[9 + i] * (1 + i)] for i in range(3)])
    # together 10 + 1 + 2 + 3 tokens
    assert plan_microbatches(packed(groups), max_tokens=22, shares_prefixes=shares) == plan


def test_a_group_too_large_is_cut_and_pays_for_its_prompt_in_each_piece():
    rows = [[*range(10), 20 + i, 20 + i] for i in range(5)]
    assert plan_microbatches(packed([rows]), max_tokens=14, shares_prefixes=True) == [
        [0, 1],
        [2, 3],
        [4],
    ]


def test_little_in_common_leaves_rows_alone():
    groups = [[[1, *[2 + i] * (20 if i else 5)] for i in range(3)]]
    assert plan_microbatches(packed(groups), max_tokens=21, shares_prefixes=True) == [[0], [1], [2]]


def test_nothing_is_cut_into_nothing():
    assert plan_microbatches(pack([]), max_tokens=9, shares_prefixes=True) == []
