"""Groups on their way between processes: their token columns end to end, and the other fields
beside them. Thousands of small arrays and objects would take longer to send than to make.

S = trajectories, n = those of them that have a column.
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
FIELDS = tuple(each.name for each in fields(Trajectory))
TURN = attrgetter(*(each.name for each in fields(Turn)))  # plain tuples are quicker to send


@dataclass(frozen=True, slots=True)
class Column:
    """values: of the n trajectories, one after the other. given_S: which these are; None: all."""

    values: NDArray[Any]
    given_S: Sequence[bool] | None

    @classmethod
    def of(cls, parts_S: Sequence[NDArray[Any] | None]) -> Column | None:
        parts = [part for part in parts_S if part is not None]
        given_S = None if len(parts) == len(parts_S) else [part is not None for part in parts_S]
        return cls(np.concatenate(parts), given_S) if parts else None

    def parts(self, lengths: Sequence[int]) -> list[NDArray[Any] | None]:
        """Views, by trajectory."""
        given_S = self.given_S or [True] * len(lengths)
        ends = np.cumsum(
            [length * given for length, given in zip(lengths, given_S, strict=True)]
        ).tolist()
        bounds = zip(pairwise([0, *ends]), given_S, strict=True)
        return [self.values[start:end] if given else None for (start, end), given in bounds]


@dataclass(frozen=True, slots=True)
class Shipped:
    """lengths: tokens of each trajectory. columns, others: its fields, by name. ids, uses, counts:
    of each group, the last its trajectories. Tasks stay where they are."""

    lengths: Sequence[int]
    columns: Mapping[str, Column | None]
    others: Mapping[str, Sequence[Any]]
    ids: Sequence[str]
    uses: Sequence[int]
    counts: Sequence[int]

    @classmethod
    def of(cls, groups: Sequence[Group]) -> Shipped:
        rows = [row for group in groups for row in group.trajectories]
        others = {
            name: [getattr(row, name) for row in rows] for name in FIELDS if name not in COLUMNS
        }
        others["turns"] = [tuple(map(TURN, turns)) for turns in others["turns"]]
        return cls(
            [len(row) for row in rows],
            {name: Column.of([getattr(row, name) for row in rows]) for name in COLUMNS},
            others,
            [group.id for group in groups],
            [group.uses for group in groups],
            [len(group.trajectories) for group in groups],
        )

    def groups(self, tasks: Sequence[Task]) -> Iterator[Group]:
        """tasks: of each group. Token columns are views into one array each."""
        values: dict[str, Sequence[Any]] = {
            name: [None] * len(self.lengths) if column is None else column.parts(self.lengths)
            for name, column in self.columns.items()
        }
        values |= self.others
        values["turns"] = [tuple([Turn(*turn) for turn in turns]) for turns in self.others["turns"]]
        rows = map(Trajectory, *(values[name] for name in FIELDS))
        for name, task, uses, count in zip(self.ids, tasks, self.uses, self.counts, strict=True):
            yield Group(name, task, tuple([next(rows) for _ in range(count)]), uses)
