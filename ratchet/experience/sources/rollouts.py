"""Sources that draw tasks from a stream: their base class, and rollouts of the policy.

Sources of supervised text are in `ratchet.experience.sources.offline`.

A drawn position is pending until it is acknowledged. A snapshot lists the pending positions, so a
resumed run draws them again with the same ids and seeds.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ratchet.experience.rollout.manager import GroupPlayer
from ratchet.experience.rollout.metrics import measure_redundancy
from ratchet.experience.sources.long_rows import LongRowFilter
from ratchet.experience.sources.prompt_ledger import Event, PromptLedger
from ratchet.experience.sources.tasks import TaskStream
from ratchet.protocols import Source
from ratchet.types import Group, Sampling, Task


class StreamSource(Source):
    """A source that draws positions of a task stream and keeps those not yet acknowledged.

    `name` is the prefix of the group ids ("<name>/<position>"), unique within a run.
    """

    def __init__(self, stream: TaskStream, name: str) -> None:
        self.stream = stream
        self.name = name
        self.ledger = PromptLedger()
        self.long_rows = LongRowFilter(stream.environment, self.check_length)
        self._pending: dict[str, tuple[int, Task]] = {}
        self._to_redraw: list[tuple[int, Task]] = []

    async def draw(self, n: int, version: int) -> list[Group]:
        """Return the next n groups."""
        return await self.make(self.take(n, version), version)

    def take(self, n: int, version: int) -> list[tuple[str, Task]]:
        """Mark the next n (group id, task) pairs as pending and return them.

        `version` is the weight version that their rollouts start with.
        """
        repeated, self._to_redraw = self._to_redraw[:n], self._to_redraw[n:]
        entries = list(repeated)
        while len(entries) < n:
            drawn = self.stream.take(n - len(entries))
            entries += [(position, task) for position, task in drawn if self.long_rows.keeps(task)]
        jobs = [(self._make_id(position), task) for position, task in entries]
        self._pending |= {
            group_id: entry for (group_id, _), entry in zip(jobs, entries, strict=True)
        }
        self.ledger.note("issued", [group_id for group_id, _ in jobs], version=version)
        return jobs

    def claim(self, group_id: str) -> tuple[str, Task]:
        """Return (group id, task) of a group that the restored snapshot lists as pending.

        The group is then pending again. Call this before any new draw, which would take it.
        """
        position, task = next(
            entry for entry in self._to_redraw if self._make_id(entry[0]) == group_id
        )
        self._to_redraw.remove((position, task))
        self._pending[group_id] = position, task
        return group_id, task

    def _make_id(self, position: int) -> str:
        return f"{self.name}/{position}"

    @abstractmethod
    def check_length(self, task: Task) -> None:
        """Raise RowTooLong if the task has more tokens than the model's context."""

    @abstractmethod
    async def make(self, jobs: Sequence[tuple[str, Task]], version: int) -> list[Group]:
        """Return one group for each (group id, task), in order."""

    def ack(self, ids: Sequence[str], step: int) -> None:
        self.discard(ids, "trained", step=step)

    def discard(self, ids: Sequence[str], event: Event, **facts: Any) -> None:
        """Drop these groups from the pending ones, and note `event` and `facts` in the ledger."""
        for group_id in ids:
            del self._pending[group_id]
        self.ledger.note(event, ids, **facts)

    def nack(self, ids: Sequence[str], reason: str) -> None:
        """Draw these groups again before new ones."""
        self._to_redraw.extend(self._pending.pop(group_id) for group_id in ids)
        self.ledger.note("retried", ids, reason=reason)

    def measure(self, groups: Sequence[Group]) -> Mapping[str, float]:
        """Return the metrics of this source, besides the metrics of every run."""
        return self.stream.measure()

    async def snapshot(self) -> Mapping[str, Any]:
        unfinished = [*self._pending.values(), *self._to_redraw]
        return {**self.stream.snapshot(unfinished), "ledger": self.ledger.sync()}

    async def restore(self, state: Mapping[str, Any]) -> None:
        self.ledger.cut(state["ledger"])
        self._pending = {}
        self._to_redraw = self.stream.restore(state)


class RolloutSource(StreamSource):
    """A source of groups of `group_size` attempts of the policy at each task.

    Args:
        greedy_baseline: Add one greedy attempt to each group.
        redundant_attempts: Start this many extra attempts for each group. The attempts that end
            first are kept.
        redundant_groups: Start this many extra groups. The groups that end first are kept, which
            depends on timing. The others are drawn again before new ones.
        check_prompt: Raises RowTooLong for a task whose prompt is too long.
    """

    def __init__(
        self,
        stream: TaskStream,
        name: str,
        manager: GroupPlayer,
        *,
        sampling: Sampling,
        seed: int,
        group_size: int,
        greedy_baseline: bool = False,
        redundant_attempts: int = 0,
        redundant_groups: int = 0,
        check_prompt: Callable[[Task], None] = lambda task: None,
    ) -> None:
        super().__init__(stream, name)
        self.manager = manager
        self.group_size = group_size
        self.greedy_baseline = greedy_baseline
        self.redundant_attempts = redundant_attempts
        self.redundant_groups = redundant_groups
        self.sampling = replace(sampling, seed=seed)
        self._check_prompt = check_prompt

    def check_length(self, task: Task) -> None:
        self._check_prompt(task)

    async def draw(self, n: int, version: int) -> list[Group]:
        jobs = self.take(n + self.redundant_groups, version)
        groups = self.observe_groups(await self.play(jobs, n))
        finished_ids = {group.id for group in groups}
        self.nack([group_id for group_id, _ in jobs if group_id not in finished_ids], "redundant")
        return groups

    async def make(self, jobs: Sequence[tuple[str, Task]], version: int) -> list[Group]:
        return self.observe_groups(await self.play(jobs, len(jobs)))

    async def play(self, jobs: Sequence[tuple[str, Task]], keep_first: int) -> list[Group]:
        """Return the first `keep_first` groups that end. The stream does not observe them yet."""
        return await self.manager.groups(
            jobs,
            self.sampling,
            attempts=self.group_size,
            greedy=self.greedy_baseline,
            redundant=self.redundant_attempts,
            keep_first=keep_first,
        )

    def observe_groups(self, groups: list[Group]) -> list[Group]:
        """Let the stream observe the groups, and return them."""
        for group in groups:
            self.stream.observe(group)
        return groups

    def measure(self, groups: Sequence[Group]) -> Mapping[str, float]:
        metrics = super().measure(groups)
        if not self.redundant_attempts:
            return metrics
        return {**metrics, **measure_redundancy(groups, self.group_size + self.redundant_attempts)}
