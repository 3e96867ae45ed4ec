"""Pack groups for transfer between processes: token columns end to end, other fields beside them.

Sending thousands of small arrays and objects one by one would take longer than creating them.

S = trajectories, n = trajectories that have a column.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ratchet.types import Group, Task, Trajectory, Turn

COLUMNS = (
    "tokens",
    "owner",
    "trainable",
    "rollout_logprobs",
    "versions",
    "log_kept_mass",
    "routes",
)
FIELDS = tuple(field.name for field in fields(Trajectory))
# Packs a turn as a plain tuple.
get_turn_fields = attrgetter(*(field.name for field in fields(Turn)))


@dataclass(frozen=True, slots=True)
class PackedColumn:
    """A field of many trajectories, end to end."""

    values: NDArray[Any]
    """The values of the n trajectories that have the field."""
    present_S: Sequence[bool] | None
    """True for these trajectories; None if all have it."""

    @classmethod
    def concatenate(cls, arrays_S: Sequence[NDArray[Any] | None]) -> PackedColumn | None:
        """Return the column of the trajectories' arrays, or None if all arrays are None."""
        arrays = [array for array in arrays_S if array is not None]
        present_S = None
        if len(arrays) < len(arrays_S):
            present_S = [array is not None for array in arrays_S]
        return cls(np.concatenate(arrays), present_S) if arrays else None

    def split(self, lengths: Sequence[int]) -> list[NDArray[Any] | None]:
        """Return a view of the values of each trajectory; None for one without this field."""
        present_S = self.present_S or [True] * len(lengths)
        ends = np.cumsum(
            [length * present for length, present in zip(lengths, present_S, strict=True)]
        ).tolist()
        bounds = zip(pairwise([0, *ends]), present_S, strict=True)
        return [self.values[start:end] if present else None for (start, end), present in bounds]


@dataclass(frozen=True, slots=True)
class PackedGroups:
    """A list of groups packed for transfer. Their tasks are not sent."""

    lengths: Sequence[int]
    """Number of tokens of each trajectory."""
    columns: Mapping[str, PackedColumn | None]
    """The token columns by field name."""
    others: Mapping[str, Sequence[Any]]
    """The other fields by name."""
    ids: Sequence[str]
    """The id of each group."""
    uses: Sequence[int]
    """`Group.n_uses` of each group, the number of steps that trained on it before."""
    counts: Sequence[int]
    """Number of trajectories of each group."""

    @classmethod
    def pack(cls, groups: Sequence[Group]) -> PackedGroups:
        """Return the groups packed for transfer."""
        rows = [row for group in groups for row in group.trajectories]
        others = {
            name: [getattr(row, name) for row in rows] for name in FIELDS if name not in COLUMNS
        }
        others["turns"] = [tuple(map(get_turn_fields, turns)) for turns in others["turns"]]
        return cls(
            [len(row) for row in rows],
            {
                name: PackedColumn.concatenate([getattr(row, name) for row in rows])
                for name in COLUMNS
            },
            others,
            [group.id for group in groups],
            [group.n_uses for group in groups],
            [len(group.trajectories) for group in groups],
        )

    def unpack(self, tasks: Sequence[Task]) -> Iterator[Group]:
        """Yield the groups, given the task of each. Their token columns are views, not copies."""
        values: dict[str, Sequence[Any]] = {
            name: [None] * len(self.lengths) if column is None else column.split(self.lengths)
            for name, column in self.columns.items()
        }
        values |= self.others
        values["turns"] = [tuple([Turn(*turn) for turn in turns]) for turns in self.others["turns"]]
        rows = map(Trajectory, *(values[name] for name in FIELDS))
        for group_id, task, uses, count in zip(
            self.ids, tasks, self.uses, self.counts, strict=True
        ):
            yield Group(group_id, task, tuple([next(rows) for _ in range(count)]), uses)
