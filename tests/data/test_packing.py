from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ratchet.algorithms.base import AlgoState
from ratchet.algorithms.filters import drop_truncated
from ratchet.algorithms.shaping import stop_properly
from ratchet.data.packing import pack
from ratchet.errors import DataError
from ratchet.testing.builders import make_group, make_trajectory
from ratchet.types import Cancelled, Failed, Scored, Truncated, Turn, Unjudged

ragged = st.lists(
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 6)), min_size=1, max_size=4),
    min_size=1,
    max_size=6,
)


def build(shape):
    token = iter(range(10_000))
    return [
        make_group(
            f"g{g}",
            [
                make_trajectory(
                    [next(token) for _ in range(p)],
                    [next(token) for _ in range(c)],
                    reward=float(i),
                    attempt=i,
                )
                for i, (p, c) in enumerate(rows)
            ],
        )
        for g, rows in enumerate(shape)
    ]


@pytest.mark.fault("M1")
def test_an_attempt_is_cut_only_within_its_last_answer():
    def row(attempt, outcome, cut):
        bare = make_trajectory([1], [2], outcome=outcome, attempt=attempt)
        return replace(bare, turns=(Turn(1, 2, cut=cut),))

    rows = [
        row(0, Truncated(1.0), cut=False),  # at the limit of turns
        row(1, Truncated(1.0), cut=False),  # the history forked before the next
        row(1, Truncated(1.0), cut=True),
        row(2, Truncated(1.0), cut=None),
        row(3, Scored(1.0), cut=True),  # an agent's own limit
        row(4, Unjudged(truncated=True), cut=True),
    ]
    batch = pack([make_group("a", rows)])
    assert batch.truncated_S.tolist() == [True, True, True, True, False, True]
    assert batch.cut_S.tolist() == [False, True, True, True, False, True]
    kept = [True, False, False, False, True, False]
    assert drop_truncated(batch, AlgoState()).train_S.tolist() == kept
    assert stop_properly(batch, AlgoState(), coef=0.5).rewards_S.tolist()[:5] == [
        1.0,
        0.5,
        0.5,
        0.5,
        1.0,
    ]


def test_two_groups_by_hand():
    batch = pack(
        [
            make_group(
                "a",
                [
                    make_trajectory([1, 2], [3], reward=1.0),
                    make_trajectory([1, 2], [4, 5], reward=0.5, attempt=1),
                ],
            ),
            make_group(
                "b",
                [make_trajectory([6], [7], outcome=Truncated(0.0), temperature=0.5)],
                tag="maths",
            ),
        ]
    )
    assert batch.tokens_T.tolist() == [1, 2, 3, 1, 2, 4, 5, 6, 7]
    assert batch.positions_T.tolist() == [0, 1, 2, 0, 1, 2, 3, 0, 1]
    assert batch.trainable_T.tolist() == [False, False, True, False, False, True, True, False, True]
    assert batch.turn_T.tolist() == [-1, -1, 0, -1, -1, 0, 0, -1, 0]
    assert batch.lengths_S.tolist() == [3, 4, 2]
    assert batch.starts_S.tolist() == [0, 3, 7]
    assert batch.sequence_T.tolist() == [0, 0, 0, 1, 1, 1, 1, 2, 2]
    assert batch.group_S.tolist() == [0, 0, 1]
    assert batch.attempt_S.tolist() == [0, 1, 0]
    assert batch.rewards_S.tolist() == [1.0, 0.5, 0.0]
    assert batch.truncated_S.tolist() == [False, False, True]
    assert batch.temperature_S.tolist() == [1.0, 1.0, 0.5]
    assert [batch.tags[i] for i in batch.tag_S.tolist()] == ["", "", "maths"]
    assert batch.group_ids == ("a", "b")


def test_failures_never_reach_a_batch():
    broken = make_trajectory([1], [2], outcome=Failed("environment", "boom"))
    cancelled = make_trajectory([1], [2], outcome=Cancelled())
    unjudged = make_trajectory([1], [2], outcome=Truncated(None))
    good = make_trajectory([1], [3], outcome=Scored(1.0), attempt=3)
    batch = pack(
        [
            make_group("all fail", [broken, cancelled]),
            make_group("one survives", [broken, unjudged, good]),
        ]
    )
    assert batch.group_ids == ("one survives",)
    assert batch.attempt_S.tolist() == [3]
    nothing = pack([make_group("all fail", [broken, cancelled])])
    assert (nothing.n_groups, nothing.n_sequences, nothing.n_tokens) == (0, 0, 0)
    assert nothing.sequence_T.tolist() == []


def test_baseline_rows_are_packed_but_never_train():
    batch = pack(
        [
            make_group(
                "g",
                [
                    make_trajectory([1], [2], reward=1.0),
                    make_trajectory([1], [3], reward=0.0, use="baseline"),
                ],
            )
        ]
    )
    assert batch.trainable_T.tolist() == [False, True, False, False]
    assert batch.train_S.tolist() == [True, False]


def test_supervised_rows_have_no_reward():
    batch = pack([make_group("g", [make_trajectory([1], [2])])])
    assert torch.isnan(batch.rewards_S).all()
    assert not batch.scored_S.any()


@pytest.mark.parametrize(
    ("trajectory", "message"),
    [
        (make_trajectory([], []), "g: a trajectory without tokens"),
        (make_trajectory([], [1]), "g: the first token trains, but nothing precedes it"),
    ],
)
def test_rows_that_nothing_predicts_are_refused(trajectory, message):
    with pytest.raises(DataError, match=message):
        pack([make_group("g", [trajectory])])


@given(ragged)
@settings(max_examples=60, deadline=None)
def test_round_trip(shape):
    groups = build(shape)
    batch = pack(groups)
    rows = [t for group in groups for t in group.trajectories]
    for row, (start, length) in enumerate(
        zip(batch.starts_S.tolist(), batch.lengths_S.tolist(), strict=True)
    ):
        piece = slice(start, start + length)
        assert np.array_equal(batch.tokens_T[piece].numpy(), rows[row].tokens)
        assert np.array_equal(batch.rollout_logprobs_T[piece].numpy(), rows[row].rollout_logprobs)
        assert np.array_equal(batch.trainable_T[piece].numpy(), rows[row].trainable)


@given(ragged, st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_take_is_packing_the_taken_rows(shape, rng):
    groups = build(shape)
    batch = pack(groups).fill_sequences(level=pack(groups).rewards_S * 2)
    batch = batch.fill_tokens(ids=batch.tokens_T * 3)
    order = list(range(batch.n_sequences))
    rng.shuffle(order)
    order = order[: rng.randint(1, len(order))]
    part = batch.take(order)
    rows = [t for group in groups for t in group.trajectories]
    assert part.tokens_T.tolist() == [int(x) for row in order for x in rows[row].tokens]
    assert part.need("ids").tolist() == (part.tokens_T * 3).tolist()
    assert part.need("level").tolist() == [2 * float(rows[row].reward) for row in order]
    old = [batch.group_ids[batch.group_S[row]] for row in order]
    assert [part.group_ids[g] for g in part.group_S.tolist()] == old
    assert sorted(set(part.group_S.tolist())) == list(range(part.n_groups))
