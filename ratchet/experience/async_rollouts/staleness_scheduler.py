"""Schedule asynchronous groups: when each begins, and which step trains on it.

A group that begins with the weights of version v is trained on at step v + k at the latest, with k
= `max_staleness`. So at step s at most (k + 1) steps' worth of groups may be in flight or ready,
and step s must train on those of version s - k. A fractional k limits the number of groups, and the
staleness bound is k rounded up.

The decisions do not depend on where groups are generated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from ratchet.experience.async_rollouts.concurrency import ConcurrencyController
from ratchet.types import Completion, Group, Task

Order = Literal["issued", "ready"]


@dataclass(eq=False)
class ScheduledGroup:
    """A group from its start to the step that trains on it.

    Attributes:
        number: Its place in the order of starts.
        version: The version of the weights that it began with.
        journal: Completions drawn for it, by the request's seed (see `ResumableGenerator`).
    """

    number: int
    version: int
    id: str
    task: Task
    group: Group | None = None
    journal: dict[int, Completion] = field(default_factory=dict)


class StalenessScheduler:
    """The scheduler of a stage's groups.

    Args:
        per_step: Number of groups that a step trains on.
        max_staleness: The bound k.
        last_step: The first step after the stage.
        order: "issued" takes the oldest groups and waits for them. "ready" takes those that
            were ready first, if all others can still meet the bound. Long groups are not dropped,
            only taken later.
        concurrency: Limits the groups in flight or ready; None: the bound alone limits them.
    """

    def __init__(
        self,
        *,
        per_step: int,
        max_staleness: float,
        last_step: int,
        order: Order = "issued",
        concurrency: ConcurrencyController | None = None,
    ) -> None:
        self.per_step = per_step
        self.max_staleness = math.ceil(max_staleness)
        self.last_step = last_step
        self.order = order
        self.at_once = get_max_in_flight(per_step, max_staleness)
        self.concurrency = concurrency
        self.issues: list[ScheduledGroup] = []  # in flight or ready, in the order of starts
        self.arrived: list[ScheduledGroup] = []  # ready, in the order in which they became ready
        self.count = 0

    def room(self, step: int) -> int:
        """Return the number of groups that may begin before `step` trains."""
        allowed = (
            self.at_once if self.concurrency is None else min(self.at_once, self.concurrency.groups)
        )
        return max(0, min(allowed, (self.last_step - step) * self.per_step) - len(self.issues))

    def begin(self, version: int, name: str, task: Task) -> ScheduledGroup:
        """Start a group."""
        issue = ScheduledGroup(self.count, version, name, task)
        self.count += 1
        self.issues.append(issue)
        return issue

    def ready(self, issue: ScheduledGroup, group: Group) -> None:
        """Record that a group is ready."""
        issue.group = group
        self.arrived.append(issue)

    def drop(self, issue: ScheduledGroup) -> None:
        """Remove a group that will not be trained on."""
        self.issues.remove(issue)

    def choose(self, step: int) -> list[ScheduledGroup] | None:
        """Remove the groups of a step from the schedule, and return them in the order of starts.

        Return None if the step must wait for groups.
        """
        chosen = self._oldest() if self.order == "issued" else self._earliest(step)
        if chosen is None:
            return None
        for issue in chosen:
            self.issues.remove(issue)
            self.arrived.remove(issue)
        return sorted(chosen, key=lambda issue: issue.number)

    def _oldest(self) -> list[ScheduledGroup] | None:
        """Return the oldest groups of a step if all are ready, else None."""
        first = self.issues[: self.per_step]
        return (
            first
            if len(first) == self.per_step and all(issue.group is not None for issue in first)
            else None
        )

    def _earliest(self, step: int) -> list[ScheduledGroup] | None:
        """Return the first ready groups that let all others meet the bound; None to wait.

        Of the groups that are due by step d, at most (d - step) steps' worth may stay for later.
        """
        chosen: list[ScheduledGroup] = []
        for due in range(step, step + self.max_staleness + 1):
            owed = (
                sum(issue.version + self.max_staleness <= due for issue in self.issues)
                - (due - step) * self.per_step
            )
            _fill(
                chosen,
                [one for one in self.arrived if one.version + self.max_staleness <= due],
                owed,
            )
            if len(chosen) < owed:
                return None
        _fill(chosen, self.arrived, self.per_step)
        return chosen if len(chosen) == self.per_step else None


def get_max_in_flight(per_step: int, max_staleness: float) -> int:
    """Return the number of groups that the staleness bound allows in flight or ready."""
    return per_step + round(max_staleness * per_step)


def _fill(chosen: list[ScheduledGroup], candidates: Sequence[ScheduledGroup], count: int) -> None:
    """Append candidates in order until `chosen` has `count` entries."""
    for issue in candidates:
        if len(chosen) >= count:
            return
        if issue not in chosen:
            chosen.append(issue)
