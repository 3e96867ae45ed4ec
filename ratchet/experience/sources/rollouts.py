"""Where groups come from: every source is a sequence of positions in a stream of tasks. Here
rollouts of the policy; given text is in `ratchet.experience.sources.offline`.

A position that was drawn stays pending until it is acknowledged; a snapshot lists the pending ones,
so a resumed run draws them again, with the same ids and the same seeds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ratchet.experience.rollout.manager import PlaysGroups
from ratchet.experience.rollout.metrics import measure_redundancy
from ratchet.experience.sources.prompt_ledger import Event, Ledger
from ratchet.experience.sources.tasks import TaskStream
from ratchet.types import Group, Sampling, Task


class StreamSource(ABC):
    """Draws positions of a task stream and keeps those not yet acknowledged.

    name: prefix of the group ids ("<name>/<position>"), unique within a run.
    """

    def __init__(self, stream: TaskStream, name: str) -> None:
        self.stream, self.name = stream, name
        self.ledger = Ledger()
        self._pending: dict[str, tuple[int, Task]] = {}
        self._again: list[tuple[int, Task]] = []

    async def draw(self, n: int, version: int) -> list[Group]:
        return await self.make(self.take(n, version), version)

    def take(self, n: int, version: int) -> list[tuple[str, Task]]:
        """The next n (group id, task), pending from now on. version: of the weights that they begin
        with."""
        repeated, self._again = self._again[:n], self._again[n:]
        picked = repeated + self.stream.take(n - len(repeated))
        jobs = [(self._id(position), task) for position, task in picked]
        self._pending |= {name: entry for (name, _), entry in zip(jobs, picked, strict=True)}
        self.ledger.note("issued", [name for name, _ in jobs], version=version)
        return jobs

    def claim(self, name: str) -> tuple[str, Task]:
        """The (group id, task) of one that was pending when the state was stored that has been
        restored: it is so again."""
        position, task = next(entry for entry in self._again if self._id(entry[0]) == name)
        self._again.remove((position, task))
        self._pending[name] = position, task
        return name, task

    def _id(self, position: int) -> str:
        return f"{self.name}/{position}"

    @abstractmethod
    async def make(self, jobs: Sequence[tuple[str, Task]], version: int) -> list[Group]:
        """One group per (group id, task), in order."""

    def ack(self, ids: Sequence[str], step: int) -> None:
        self.discard(ids, "trained", step=step)

    def discard(self, ids: Sequence[str], event: Event, **facts: Any) -> None:
        """They are done with: the ledger says why."""
        for name in ids:
            del self._pending[name]
        self.ledger.note(event, ids, **facts)

    def nack(self, ids: Sequence[str], reason: str) -> None:
        """Draws these again before anything new."""
        self._again.extend(self._pending.pop(name) for name in ids)
        self.ledger.note("again", ids, reason=reason)

    def measure(self, groups: Sequence[Group]) -> Mapping[str, float]:
        """Numbers on the groups of a step, beside those that every run measures."""
        return self.stream.measure()

    async def snapshot(self) -> Mapping[str, Any]:
        waiting = [*self._pending.values(), *self._again]
        return {**self.stream.snapshot(waiting), "ledger": self.ledger.offset()}

    async def restore(self, state: Mapping[str, Any]) -> None:
        self.ledger.cut(state["ledger"])
        self._pending, self._again = {}, self.stream.restore(state)


class Rollouts(StreamSource):
    """Attempts of the policy: `group_size` a task, and a greedy one beside them with
    `greedy_baseline`.

    redundant_attempts: so many more are begun, and the first are kept. redundant_groups: likewise;
    those that were not ready in time are drawn again before anything new. Which are first depends
    on timing.
    """

    def __init__(
        self,
        stream: TaskStream,
        name: str,
        manager: PlaysGroups,
        *,
        sampling: Sampling,
        seed: int,
        group_size: int,
        greedy_baseline: bool = False,
        redundant_attempts: int = 0,
        redundant_groups: int = 0,
    ) -> None:
        super().__init__(stream, name)
        self.manager, self.group_size, self.greedy_baseline = manager, group_size, greedy_baseline
        self.redundant_attempts, self.redundant_groups = redundant_attempts, redundant_groups
        self.sampling = replace(sampling, seed=seed)

    async def draw(self, n: int, version: int) -> list[Group]:
        jobs = self.take(n + self.redundant_groups, version)
        groups = self.observed(await self.play(jobs, n))
        ready = {group.id for group in groups}
        self.nack([name for name, _ in jobs if name not in ready], "redundant")
        return groups

    async def make(self, jobs: Sequence[tuple[str, Task]], version: int) -> list[Group]:
        return self.observed(await self.play(jobs, len(jobs)))

    async def play(self, jobs: Sequence[tuple[str, Task]], wanted: int) -> list[Group]:
        """The first so many that are ready, which the stream has not seen yet."""
        return await self.manager.groups(
            jobs,
            self.sampling,
            attempts=self.group_size,
            greedy=self.greedy_baseline,
            redundant=self.redundant_attempts,
            wanted=wanted,
        )

    def observed(self, groups: list[Group]) -> list[Group]:
        for group in groups:
            self.stream.observe(group)
        return groups

    def measure(self, groups: Sequence[Group]) -> Mapping[str, float]:
        numbers = super().measure(groups)
        if not self.redundant_attempts:
            return numbers
        return {**numbers, **measure_redundancy(groups, self.group_size + self.redundant_attempts)}
