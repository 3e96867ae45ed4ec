"""The data that flows: copies with one field changed, and what a row says of itself."""

from dataclasses import fields, replace

import numpy as np
import pytest

from ratchet.structured_output import StructuredOutput
from ratchet.testing.builders import make_trajectory
from ratchet.types import (
    Message,
    Sampling,
    Scored,
    Trajectory,
    Turn,
    is_finite_number,
    is_number_not_bool,
)


def changed(thing, **marks):
    """With a value of its own in every field, so that one that is left behind, or takes another's
    place, is seen."""
    assert {field.name for field in fields(thing)} == set(marks), (
        "a field is new: give it a value here"
    )
    return replace(thing, **marks)


def test_a_sampling_with_another_seed_keeps_everything_else():
    own = changed(
        Sampling(),
        temperature=0.5,
        top_p=0.9,
        top_k=3,
        min_p=0.1,
        max_new_tokens=7,
        stop=("x",),
        stop_ids=(9,),
        seed=1,
        routes=True,
        drawn=2,
        adapter="a",
        structured=StructuredOutput("regex", "a"),
    )
    assert own.seeded(5) == replace(own, seed=5)


def test_a_judged_trajectory_keeps_everything_else():
    own = changed(
        make_trajectory([1], [2, 3]),
        tokens=np.array([4, 5, 6]),
        owner=np.array([0, 1, 1], np.int8),
        trainable=np.array([False, True, True]),
        rollout_logprobs=np.array([0, -1, -2], np.float32),
        versions=np.array([-1, 3, 3], np.int32),
        log_kept_mass=np.array([0, -0.5, 0], np.float32),
        routes=np.zeros((3, 1, 1), np.int16),
        attempt=4,
        use="baseline",
        temperature=0.7,
        turns=(Turn(1, 3),),
        messages=(Message("user", "u"),),
        outcome=None,
        metrics={"turns": 1.0},
        media=("some",),
        extras={"k": 1},
        allowed="masks",
    )
    judged = own.with_outcome(Scored(1.0))
    assert judged.outcome == Scored(1.0)
    for field in fields(Trajectory):
        if field.name != "outcome":
            assert getattr(judged, field.name) is getattr(own, field.name), field.name


def test_a_row_is_sampled_where_any_token_has_a_version():
    given = Trajectory.supervised([1, 2, 3], [False, True, True])
    assert not given.sampled
    assert replace(given, versions=np.array([-1, 0, -1], np.int32)).sampled
    assert not Trajectory.supervised([], []).sampled


def test_the_policys_tokens_are_counted():
    assert (
        replace(make_trajectory([1], [2, 3]), owner=np.array([0, 1, 2], np.int8)).completion_length
        == 1
    )
    assert make_trajectory([1, 1], [2] * 300).completion_length == 300


def test_columns_of_another_length_are_refused():
    row = make_trajectory([1], [2, 3])
    for name in ("owner", "trainable", "rollout_logprobs", "versions"):
        with pytest.raises(AssertionError, match=f"{name} has 2 entries for 3 tokens"):
            replace(row, **{name: getattr(row, name)[:2]})


def test_numbers_that_can_be_rewards():
    assert all(map(is_finite_number, (1, 0.5, True, np.float32(1), np.int64(2))))
    others = (float("nan"), float("inf"), np.float64("nan"), 10**400, "1", None, 1j)
    assert not any(map(is_finite_number, others))
    assert all(map(is_number_not_bool, (1, 0.5, np.float32(1))))
    assert not any(map(is_number_not_bool, (*others, True, False, np.bool_(True))))
