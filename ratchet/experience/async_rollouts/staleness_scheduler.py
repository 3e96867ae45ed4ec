"""Which groups begin when, and which of them a step trains on: the same decisions whoever
generates, and wherever.

A group that begins with the weights of version v is trained on at step v + k at the latest, k =
`max_staleness`. So at step s at most (k + 1) steps' worth of groups may be under way or ready, and
those of version s - k must be among the step's. A k that is no whole number says how many there may
be, and the bound is the next one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from ratchet.experience.async_rollouts.concurrency import Concurrency
from ratchet.types import Completion, Group, Task

Order = Literal["issued", "ready"]


@dataclass(eq=False)
class Issue:
    """A group from its beginning to the step that trains on it. number: in the order of beginnings.
    version: of the weights that it began with. journal: what was drawn for it, by the seed of the
    request (see `Interruptible`)."""

    number: int
    version: int
    id: str
    task: Task
    group: Group | None = None
    journal: dict[int, Completion] = field(default_factory=dict)


class GenerateScheduler:
    """per_step: groups of a step. last_step: the first step that is none.

    concurrency: how many groups may be under way; None: as many as the bound allows.

    order: "issued", a step takes the oldest, and waits for them; "ready", those that are ready
    first, as long as all others can still be in time. Nothing is left out for being long: it is
    only taken later, within the bound.
    """

    def __init__(
        self,
        *,
        per_step: int,
        max_staleness: float,
        last_step: int,
        order: Order = "issued",
        concurrency: Concurrency | None = None,
    ) -> None:
        self.per_step, self.max_staleness, self.last_step, self.order = (
            per_step,
            math.ceil(max_staleness),
            last_step,
            order,
        )
        self.at_once, self.concurrency = at_once(per_step, max_staleness), concurrency
        self.issues: list[Issue] = []  # under way or ready, in their order
        self.arrived: list[Issue] = []  # ready, in the order in which they became so
        self.count = 0

    def room(self, step: int) -> int:
        """Groups that may begin at the weights of this step, before it trains."""
        allowed = (
            self.at_once if self.concurrency is None else min(self.at_once, self.concurrency.groups)
        )
        return max(0, min(allowed, (self.last_step - step) * self.per_step) - len(self.issues))

    def begin(self, version: int, name: str, task: Task) -> Issue:
        issue = Issue(self.count, version, name, task)
        self.count += 1
        self.issues.append(issue)
        return issue

    def ready(self, issue: Issue, group: Group) -> None:
        issue.group = group
        self.arrived.append(issue)

    def drop(self, issue: Issue) -> None:
        """It will not be trained on."""
        self.issues.remove(issue)

    def choose(self, step: int) -> list[Issue] | None:
        """What the step trains on, in the order of issue, which is then no longer kept here; None:
        somebody must be waited for."""
        chosen = self._oldest() if self.order == "issued" else self._earliest(step)
        if chosen is None:
            return None
        for issue in chosen:
            self.issues.remove(issue)
            self.arrived.remove(issue)
        return sorted(chosen, key=lambda issue: issue.number)

    def _oldest(self) -> list[Issue] | None:
        first = self.issues[: self.per_step]
        return (
            first
            if len(first) == self.per_step and all(issue.group is not None for issue in first)
            else None
        )

    def _earliest(self, step: int) -> list[Issue] | None:
        """The ready ones in their order, but for those that must be in this step, so that later
        steps can take in time what is left: of the groups that are due by step d, no more than (d -
        step) steps' worth may stay."""
        chosen: list[Issue] = []
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


def at_once(per_step: int, max_staleness: float) -> int:
    """Groups that the bound on staleness allows to be under way or ready."""
    return per_step + round(max_staleness * per_step)


def _fill(chosen: list[Issue], candidates: Sequence[Issue], count: int) -> None:
    """Adds candidates, first come first served, until `chosen` has so many."""
    for issue in candidates:
        if len(chosen) >= count:
            return
        if issue not in chosen:
            chosen.append(issue)
