"""Schedule asynchronous groups: when each begins, and which step trains on it.

A group that begins with the weights of version v is trained on at step v + k at the latest, with k
= `max_staleness`. So at step s at most (k + 1) steps' worth of groups may be in flight or ready,
and step s must train on the groups of version s - k. If k is a fraction, it limits the number of
groups as it is, and the staleness bound is k rounded up.

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
    """A group from its start to the step that trains on it."""

    number: int
    """The group's position in the order of starts."""
    version: int
    """The version of the weights with which the group began."""
    id: str
    task: Task
    group: Group | None = None
    """The finished group; None while it is in flight."""
    journal: dict[int, Completion] = field(default_factory=dict)
    """Completions drawn for the group, by the request's seed (see `ResumableGenerator`)."""


class StalenessScheduler:
    """The scheduler of a stage's groups.

    Args:
        groups_per_step: Number of groups that a step trains on.
        max_staleness: The bound k.
        end_step: The first step after the stage.
        order: "issued" takes the oldest groups and waits for them. "ready" takes the groups that
            were ready first, if all others can still meet the bound. Long groups are not dropped,
            only trained on later.
        concurrency: Limits the groups in flight or ready. None: only the bound limits them.
    """

    def __init__(
        self,
        *,
        groups_per_step: int,
        max_staleness: float,
        end_step: int,
        order: Order = "issued",
        concurrency: ConcurrencyController | None = None,
    ) -> None:
        self.groups_per_step = groups_per_step
        self.max_staleness = math.ceil(max_staleness)
        self.end_step = end_step
        self.order = order
        self.max_in_flight = get_max_in_flight(groups_per_step, max_staleness)
        self.concurrency = concurrency
        self.unfinished: list[ScheduledGroup] = []  # in flight or ready, in the order of starts
        self.ready_groups: list[ScheduledGroup] = []  # in the order in which they became ready
        self.n_started = 0

    def count_startable(self, step: int) -> int:
        """Return the number of groups that may begin before `step` trains."""
        max_unfinished = (
            self.max_in_flight
            if self.concurrency is None
            else min(self.max_in_flight, self.concurrency.groups)
        )
        return max(
            0,
            min(max_unfinished, (self.end_step - step) * self.groups_per_step)
            - len(self.unfinished),
        )

    def begin(self, version: int, group_id: str, task: Task) -> ScheduledGroup:
        """Start a group."""
        scheduled = ScheduledGroup(self.n_started, version, group_id, task)
        self.n_started += 1
        self.unfinished.append(scheduled)
        return scheduled

    def mark_ready(self, scheduled: ScheduledGroup, group: Group) -> None:
        """Record that a group is ready."""
        scheduled.group = group
        self.ready_groups.append(scheduled)

    def drop(self, scheduled: ScheduledGroup) -> None:
        """Remove a group that will not be trained on."""
        self.unfinished.remove(scheduled)

    def choose(self, step: int) -> list[ScheduledGroup] | None:
        """Remove the groups of a step from the schedule, and return them in the order of starts.

        Return None if the step must wait for groups.
        """
        chosen = self._choose_oldest() if self.order == "issued" else self._choose_first_ready(step)
        if chosen is None:
            return None
        for scheduled in chosen:
            self.unfinished.remove(scheduled)
            self.ready_groups.remove(scheduled)
        return sorted(chosen, key=lambda scheduled: scheduled.number)

    def _choose_oldest(self) -> list[ScheduledGroup] | None:
        """Return the oldest groups of a step if all are ready, else None."""
        oldest = self.unfinished[: self.groups_per_step]
        return (
            oldest
            if len(oldest) == self.groups_per_step
            and all(scheduled.group is not None for scheduled in oldest)
            else None
        )

    def _choose_first_ready(self, step: int) -> list[ScheduledGroup] | None:
        """Return the groups that became ready first, if all others can still meet the bound.

        A group of version v must be trained on by step v + k, its deadline. The d - step steps
        after this one can train (d - step) * groups_per_step groups. If more groups have a deadline
        up to d, this step must take the others. Return None if it must wait for them.
        """
        chosen: list[ScheduledGroup] = []
        for deadline in range(step, step + self.max_staleness + 1):
            n_required = (
                sum(
                    scheduled.version + self.max_staleness <= deadline
                    for scheduled in self.unfinished
                )
                - (deadline - step) * self.groups_per_step
            )
            _append_until(
                chosen,
                [
                    scheduled
                    for scheduled in self.ready_groups
                    if scheduled.version + self.max_staleness <= deadline
                ],
                n_required,
            )
            if len(chosen) < n_required:
                return None
        _append_until(chosen, self.ready_groups, self.groups_per_step)
        return chosen if len(chosen) == self.groups_per_step else None


def get_max_in_flight(groups_per_step: int, max_staleness: float) -> int:
    """Return the number of groups that the staleness bound allows in flight or ready."""
    return groups_per_step + round(max_staleness * groups_per_step)


def _append_until(
    chosen: list[ScheduledGroup], candidates: Sequence[ScheduledGroup], count: int
) -> None:
    """Append candidates in order until `chosen` has `count` entries."""
    for scheduled in candidates:
        if len(chosen) >= count:
            return
        if scheduled not in chosen:
            chosen.append(scheduled)
