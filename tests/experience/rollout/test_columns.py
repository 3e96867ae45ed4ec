"""Groups arrive in another process as they were sent."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from oracles.cases import groups, rollouts
from oracles.ragged import Row

from ratchet.executors.protocol import pack, unpack
from ratchet.experience.rollout.columns import PackedGroups
from ratchet.types import Group, Trajectory


def same(ours: object, theirs: object) -> bool:
    if isinstance(theirs, np.ndarray):
        return (
            isinstance(ours, np.ndarray)
            and ours.dtype == theirs.dtype
            and np.array_equal(ours, theirs, equal_nan=True)
        )
    return ours == theirs


@given(rows=rollouts(), data=st.data())
def test_groups_arrive_as_they_were(rows: list[Row], data: st.DataObject) -> None:
    """Whatever their trajectories lack, and where some columns are of some trajectories alone."""

    def changed(row: Trajectory) -> Trajectory:
        kept, routes = (data.draw(st.booleans()) for _ in range(2))
        return replace(
            row,
            log_kept_mass=np.full(len(row), -0.5, np.float32) if kept else None,
            routes=np.full((len(row), 2, 1), len(row), np.int16) if routes else None,
        )

    sent = [
        replace(group, trajectories=tuple(map(changed, group.trajectories)), n_uses=i)
        for i, group in enumerate(groups(rows))
    ]
    sent.append(Group("without", sent[0].task, ()))
    arrived = list(unpack(pack(PackedGroups.pack(sent))).unpack([group.task for group in sent]))
    assert [(group.id, group.n_uses, group.task) for group in arrived] == [
        (group.id, group.n_uses, group.task) for group in sent
    ]
    for ours, theirs in zip(arrived, sent, strict=True):
        assert len(ours.trajectories) == len(theirs.trajectories)
        for a, b in zip(ours.trajectories, theirs.trajectories, strict=True):
            assert all(
                same(getattr(a, each.name), getattr(b, each.name)) for each in fields(Trajectory)
            )


def test_nothing_is_sent_of_nothing() -> None:
    assert list(PackedGroups.pack([]).unpack([])) == []
