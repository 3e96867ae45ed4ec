"""A source wrapper for asynchronous rollouts: groups begin before the step that trains on them.

Their staleness is bounded. Groups without a training signal can be replaced by others.

Attempts continue while the learner works and across weight syncs; each token keeps the version of
the weights that drew it. If the generator reads the learner's own tensors, it is paused from the
moment a step has its groups until the weights are pushed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ratchet.experience.async_rollouts.resumable_generator import CURRENT, ResumableGenerator
from ratchet.experience.async_rollouts.staleness_scheduler import ScheduledGroup, StalenessScheduler
from ratchet.experience.rollout.metrics import measure_staleness
from ratchet.experience.rollout.plain_values import from_plain, to_plain
from ratchet.experience.sources.rollouts import RolloutSource
from ratchet.types import Group

MISMATCH = "batch/correction/kl"  # the metric that `ConcurrencyController` compares with its target

log = logging.getLogger(__name__)


def has_learning_signal(group: Group, *, by_parts: bool = False) -> bool:
    """True if the rewards in a group differ; otherwise no attempt is better than another.

    Rewards are compared as judged, before the algorithm's shaping: DAPO (arXiv:2503.14476) eq. 8
    counts right answers, without a penalty for length.

    Args:
        group: The group.
        by_parts: Compare each named part of the rewards too, for algorithms that read parts.
    """
    rows = [row for row in group.trajectories if row.use == "train" and row.reward is not None]
    if by_parts:
        return len({(row.reward, *sorted(row.reward_parts.items())) for row in rows}) > 1
    return len({row.reward for row in rows}) > 1


class PrefetchingSource:
    """A source that prefetches groups of another source.

    Args:
        source: The source of rollouts.
        scheduler: Decides which groups begin and which are trained on.
        generator: The generator that the source's attempts call.
        rests: The generator reads the learner's tensors, so it must not run during an update.
        replayable: Attempts can be replayed (`Environment.replayable`). Otherwise those in flight
            start again when the run resumes.
        teaches: Returns True for a group with a training signal; other groups are replaced. None
            replaces no group.
        tries: Maximum number of replacements in a step, per group of the step; after that any group
            is taken.
    """

    def __init__(
        self,
        source: RolloutSource,
        scheduler: StalenessScheduler,
        generator: ResumableGenerator,
        *,
        rests: bool,
        replayable: bool,
        teaches: Callable[[Group], bool] | None = None,
        tries: int = 1,
    ) -> None:
        self.source = source
        self.scheduler = scheduler
        self.generator = generator
        self.rests = rests
        self.replayable = replayable
        self.teaches = teaches
        self.tries = tries
        self._tasks: dict[ScheduledGroup, asyncio.Task[None]] = {}
        # groups whose attempts begin with the next draw
        self._to_restart: list[ScheduledGroup] = []
        self._changed = asyncio.Event()
        self._version = 0
        self._waited = False  # True if the latest draw had to wait
        self._replaced = 0  # groups replaced since the last step

    async def draw(self, n: int, version: int) -> list[Group]:
        """Return the groups of a step, and begin new ones.

        Raises the first failure that belongs to no single attempt.
        """
        assert n == self.scheduler.per_step, "the scheduler plans steps of another size"
        self._version = version
        self._replaced = 0
        self._waited = False
        if self.rests:
            await self.generator.inner.resume()
        self.generator.open()
        for issue in self._to_restart:
            self._play(issue)
        self._to_restart = []
        self._begin(self.scheduler.room(version))
        while (chosen := self.scheduler.choose(version)) is None:
            self._waited = True
            self._changed.clear()
            await self._changed.wait()
            self._raise_failures()
        if self.rests:
            await self.generator.inner.pause()
        return [issue.group for issue in chosen if issue.group is not None]

    def ack(self, ids: Sequence[str], step: int) -> None:
        self.source.ack(ids, step)

    def nack(self, ids: Sequence[str], reason: str) -> None:
        self.source.nack(ids, reason)

    def measure(self, groups: Sequence[Group]) -> Mapping[str, float]:
        numbers, concurrency = self.source.measure(groups), self.scheduler.concurrency
        if concurrency is None:
            return numbers
        return {
            **numbers,
            "adaptive/groups": float(concurrency.groups),
            "adaptive/waited": float(self._waited),
        }

    def adapt(self, groups: Sequence[Group], step: int, measured: Mapping[str, float]) -> None:
        """Change the number of groups in flight from the next draw on."""
        if self.scheduler.concurrency is not None:
            staleness = measure_staleness(groups, step).get("staleness_mean", 0.0)
            self.scheduler.concurrency.update(
                waited=self._waited, staleness=staleness, mismatch=measured.get(MISMATCH)
            )

    async def snapshot(self) -> Mapping[str, Any]:
        """Return the state for a checkpoint.

        Attempts in flight are interrupted and continue with the next draw.
        """
        if self._tasks and self.replayable:
            await self.generator.close(lambda: self.source.manager.playing)
        return {
            "source": await self.source.snapshot(),
            "issues": [self._stored(issue) for issue in self.scheduler.issues],
            "arrived": [issue.id for issue in self.scheduler.arrived],
            "level": None
            if self.scheduler.concurrency is None
            else self.scheduler.concurrency.level,
        }

    def _stored(self, issue: ScheduledGroup) -> dict[str, Any]:
        ready = None if issue.group is None else to_plain(issue.group.trajectories)
        journal = (
            {}
            if issue.group is not None
            else {str(seed): to_plain(drawn) for seed, drawn in issue.journal.items()}
        )
        return {"id": issue.id, "version": issue.version, "ready": ready, "journal": journal}

    async def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint.

        Attempts in flight are replayed up to the checkpoint and wait there for the next draw.
        Attempts that can't be replayed start again with the next draw.
        """
        await self.source.restore(state["source"])
        await self.generator.close(lambda: 0)
        under_way = []
        for entry in state["issues"]:
            issue = self.scheduler.begin(entry["version"], *self.source.claim(entry["id"]))
            issue.journal = {
                int(seed): from_plain(drawn) for seed, drawn in entry["journal"].items()
            }
            if entry["ready"] is None:
                under_way.append(issue)
            else:
                issue.group = Group(issue.id, issue.task, from_plain(entry["ready"]))
        issue_by_id = {issue.id: issue for issue in self.scheduler.issues}
        self.scheduler.arrived = [issue_by_id[name] for name in state["arrived"]]
        if self.scheduler.concurrency is not None and state["level"] is not None:
            self.scheduler.concurrency.level = state["level"]
        if not self.replayable:
            if under_way:
                log.warning(
                    "%d groups start again because their environment can't be replayed",
                    len(under_way),
                )
            self._to_restart = under_way
            return
        for issue in under_way:
            self._play(issue)
        await self.generator.close(lambda: self.source.manager.playing)

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks = {}
        if self.rests:
            await self.generator.inner.resume()

    # --- groups under way

    def _begin(self, count: int) -> None:
        for name, task in self.source.take(count, version=self._version):
            self._play(self.scheduler.begin(self._version, name, task))

    def _play(self, issue: ScheduledGroup) -> None:
        self._tasks[issue] = asyncio.create_task(self._group(issue))
        self._tasks[issue].add_done_callback(lambda _: self._changed.set())

    async def _group(self, issue: ScheduledGroup) -> None:
        CURRENT.set(issue if self.replayable else None)
        (group,) = await self.source.make([(issue.id, issue.task)], issue.version)
        if (
            self.teaches is not None
            and not self.teaches(group)
            and self._replaced < self.tries * self.scheduler.per_step
        ):
            self._replaced += 1
            self.scheduler.drop(issue)
            self.source.discard([issue.id], "filtered", reason="it teaches nothing")
            self._begin(1)
        else:
            self.scheduler.ready(issue, group)
            self.source.ledger.note("ready", [issue.id])
        issue.journal.clear()
        del self._tasks[issue]

    def _raise_failures(self) -> None:
        for task in self._tasks.values():
            if task.done():
                task.result()
