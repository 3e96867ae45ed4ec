"""Where groups come from: rows of given text, or rollouts of the policy. Both are positions in a stream of tasks.

A position that was drawn stays pending until it is acknowledged; a snapshot lists the pending ones, so a resumed run draws
them again, with the same ids and the same seeds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from ratchet.data.renderer import Renderer
from ratchet.errors import DataError
from ratchet.experience.manager import RolloutManager
from ratchet.experience.tasks import TaskStream
from ratchet.types import Group, Sampling, Task, Trajectory


class StreamSource(ABC):
    """Draws positions of a task stream and keeps the ledger of those not yet acknowledged.

    name: prefix of the group ids ("<name>/<position>"), unique within a run.
    """

    def __init__(self, stream: TaskStream, name: str) -> None:
        self.stream, self.name = stream, name
        self._pending: dict[str, tuple[int, Task]] = {}
        self._again: list[tuple[int, Task]] = []

    async def draw(self, n: int, version: int) -> list[Group]:
        repeated, self._again = self._again[:n], self._again[n:]
        picked = repeated + self.stream.take(n - len(repeated))
        jobs = [(f"{self.name}/{position}", task) for position, task in picked]
        self._pending |= {name: entry for (name, _), entry in zip(jobs, picked, strict=True)}
        return await self.make(jobs, version)

    @abstractmethod
    async def make(self, jobs: Sequence[tuple[str, Task]], version: int) -> list[Group]:
        """One group per (group id, task), in order."""

    def ack(self, ids: Sequence[str], step: int) -> None:
        for name in ids:
            del self._pending[name]

    def nack(self, ids: Sequence[str], reason: str) -> None:
        """Draws these again before anything new."""
        self._again.extend(self._pending.pop(name) for name in ids)

    async def snapshot(self) -> Mapping[str, Any]:
        waiting = sorted(position for position, _ in [*self._pending.values(), *self._again])
        return {"position": self.stream.position, "pending": waiting}

    async def restore(self, state: Mapping[str, Any]) -> None:
        self._pending, self._again = {}, []
        for position in state["pending"]:
            self.stream.seek(position)
            self._again += self.stream.take(1)
        self.stream.seek(state["position"])


class Rows(StreamSource):
    """Supervised rows: each task with the messages that solve it. Raises DataError for one longer than the context."""

    def __init__(
        self, stream: TaskStream, name: str, renderer: Renderer, *, train: Literal["all", "last"], max_context: int
    ) -> None:
        super().__init__(stream, name)
        self.renderer, self.max_context = renderer, max_context
        self.train: Literal["all", "last"] = train

    async def make(self, jobs: Sequence[tuple[str, Task]], version: int) -> list[Group]:
        return [Group(name, task, (self._row(task),)) for name, task in jobs]

    def _row(self, task: Task) -> Trajectory:
        messages = (*task.messages, *self.stream.environment.demonstration(task))
        tokens, trainable = self.renderer.supervised(messages, train=self.train)
        if len(tokens) > self.max_context:
            raise DataError(f"task {task.id}: {len(tokens)} tokens, but the model holds {self.max_context}: shorten or drop it")
        return Trajectory.supervised(tokens, trainable, messages=messages)


class Rollouts(StreamSource):
    """Attempts of the policy: `group_size` a task."""

    def __init__(
        self, stream: TaskStream, name: str, manager: RolloutManager, *, sampling: Sampling, seed: int, group_size: int
    ) -> None:
        super().__init__(stream, name)
        self.manager, self.group_size = manager, group_size
        self.sampling = replace(sampling, seed=seed)

    async def make(self, jobs: Sequence[tuple[str, Task]], version: int) -> list[Group]:
        return await self.manager.groups(jobs, self.sampling, attempts=self.group_size)
