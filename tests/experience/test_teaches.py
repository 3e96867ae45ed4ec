"""Which groups dynamic sampling replaces: those whose rewards, as judged, are all alike."""

from __future__ import annotations

import numpy as np
import pytest

from ratchet.experience.async_rollouts.prefetch import has_learning_signal
from ratchet.types import (
    Failed,
    Group,
    Message,
    Outcome,
    Owner,
    Scored,
    Task,
    Trajectory,
    Truncated,
)


def group(*outcomes: Outcome, length: int = 3) -> Group:
    owner = np.array([Owner.PROMPT] + [Owner.POLICY] * length, dtype=np.int8)
    wrote = owner == Owner.POLICY
    rows = [
        Trajectory(
            tokens=np.ones(len(owner), dtype=np.int64),
            owner=owner,
            trainable=wrote,
            rollout_logprobs=np.where(wrote, -1.0, 0.0).astype(np.float32),
            versions=np.where(wrote, 0, -1).astype(np.int32),
            attempt=i,
            outcome=outcome,
        )
        for i, outcome in enumerate(outcomes)
    ]
    return Group("g", Task("t", (Message("user", "?"),)), tuple(rows))


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        ((Scored(0.0), Scored(0.0), Truncated(0.0)), False),  # all wrong, of whatever length
        ((Scored(1.0), Scored(0.0)), True),
        ((Scored(1.0), Failed("sandbox")), False),  # a failure is not a reward
        ((Truncated(None), Scored(1.0)), False),
    ],
)
def test_rewards_as_judged_decide(outcomes, expected: bool):
    assert has_learning_signal(group(*outcomes)) is expected


def test_mean_rewards_outside_the_range_teach_nothing():
    hard = group(Scored(1.0), Scored(0.0), Scored(0.0), Scored(0.0), Failed("sandbox"))
    assert has_learning_signal(hard, mean_reward_range=(0.2, 0.9))
    assert not has_learning_signal(hard, mean_reward_range=(0.25, 0.9))


def test_parts_decide_only_where_the_algorithm_reads_them():
    balanced = group(
        Scored(1.0, {"right": 1.0, "form": 0.0}), Scored(1.0, {"right": 0.0, "form": 1.0})
    )
    assert has_learning_signal(balanced, by_parts=True)
    assert not has_learning_signal(balanced)
    alike = group(Scored(1.0, {"right": 1.0}), Scored(1.0, {"right": 1.0}))
    assert not has_learning_signal(alike, by_parts=True)
