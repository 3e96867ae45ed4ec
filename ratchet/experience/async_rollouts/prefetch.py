"""A source around a source: rollouts that begin before the step that trains on them, by a bounded
number of versions of the weights, and others in place of groups that teach nothing.

Attempts go on while the learner works, and across pushes: each token keeps the version of the
weights that drew it. Where the generator reads the learner's own tensors, they rest from the moment
a step has its groups until the weights are pushed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ratchet.experience.async_rollouts.resumable_generator import CURRENT, Interruptible
from ratchet.experience.async_rollouts.staleness_scheduler import GenerateScheduler, Issue
from ratchet.experience.rollout.metrics import measure_staleness
from ratchet.experience.rollout.plain_values import restored, stored
from ratchet.experience.sources.rollouts import Rollouts
from ratchet.types import Group

MISMATCH = "batch/correction/kl"  # the metric that `Concurrency` holds a target of

log = logging.getLogger(__name__)


def teaches(group: Group, *, by_parts: bool = False) -> bool:
    """True if the attempts of a group have rewards that differ: else none is better than another.

    These are rewards as judged, before the algorithm's shaping: DAPO (arXiv:2503.14476) eq. 8
    counts right answers, whatever a penalty for length adds. by_parts: the named parts of a reward
    count each by itself, for algorithms that read them.
    """
    rows = [row for row in group.trajectories if row.use == "train" and row.reward is not None]
    if by_parts:
        return len({(row.reward, *sorted(row.reward_parts.items())) for row in rows}) > 1
    return len({row.reward for row in rows}) > 1


class Prefetch:
    """source: what it draws from. generator: what the source's attempts ask. rests: whether it must
    not generate while the learner works. replayable: whether what an attempt has done can be done
    again (`Environment.replayable`); else one that was under way begins anew when the run resumes.

    teaches: whether a group is worth a step's while; others are replaced, but for `tries` groups a
    place in a step, after which what comes is taken as it is.
    """

    def __init__(
        self,
        source: Rollouts,
        scheduler: GenerateScheduler,
        generator: Interruptible,
        *,
        rests: bool,
        replayable: bool,
        teaches: Callable[[Group], bool] | None = None,
        tries: int = 1,
    ) -> None:
        self.source, self.scheduler, self.generator = source, scheduler, generator
        self.rests, self.replayable, self.teaches, self.tries = rests, replayable, teaches, tries
        self._tasks: dict[Issue, asyncio.Task[None]] = {}
        self._anew: list[Issue] = []  # whose attempts begin with the next draw
        self._changed = asyncio.Event()
        self._version = 0
        self._waited = False  # whether the latest draw had to
        self._tried = 0  # groups that taught nothing, since the last step

    async def draw(self, n: int, version: int) -> list[Group]:
        """Raises what broke an attempt that is nobody's fault."""
        assert n == self.scheduler.per_step, "a step takes as many groups as the scheduler was told"
        self._version, self._tried, self._waited = version, 0, False
        if self.rests:
            await self.generator.inner.resume()
        self.generator.open()
        for issue in self._anew:
            self._play(issue)
        self._anew = []
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
        """Makes more or fewer groups be under way from the next draw on."""
        if self.scheduler.concurrency is not None:
            staleness = measure_staleness(groups, step).get("staleness_mean", 0.0)
            self.scheduler.concurrency.heed(
                waited=self._waited, staleness=staleness, mismatch=measured.get(MISMATCH)
            )

    async def snapshot(self) -> Mapping[str, Any]:
        """Interrupts what is under way; the next draw lets it go on."""
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

    def _stored(self, issue: Issue) -> dict[str, Any]:
        ready = None if issue.group is None else stored(issue.group.trajectories)
        journal = (
            {}
            if issue.group is not None
            else {str(seed): stored(drawn) for seed, drawn in issue.journal.items()}
        )
        return {"id": issue.id, "version": issue.version, "ready": ready, "journal": journal}

    async def restore(self, state: Mapping[str, Any]) -> None:
        """What was under way plays again what it had played, and waits there for the next draw;
        where that can't be, it begins anew with that."""
        await self.source.restore(state["source"])
        await self.generator.close(lambda: 0)
        under_way = []
        for one in state["issues"]:
            issue = self.scheduler.begin(one["version"], *self.source.claim(one["id"]))
            issue.journal = {int(seed): restored(drawn) for seed, drawn in one["journal"].items()}
            if one["ready"] is None:
                under_way.append(issue)
            else:
                issue.group = Group(issue.id, issue.task, restored(one["ready"]))
        named = {issue.id: issue for issue in self.scheduler.issues}
        self.scheduler.arrived = [named[name] for name in state["arrived"]]
        if self.scheduler.concurrency is not None and state["level"] is not None:
            self.scheduler.concurrency.level = state["level"]
        if not self.replayable:
            if under_way:
                log.warning(
                    "%d groups begin anew: what their environment did can't be done again",
                    len(under_way),
                )
            self._anew = under_way
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

    def _play(self, issue: Issue) -> None:
        self._tasks[issue] = asyncio.create_task(self._group(issue))
        self._tasks[issue].add_done_callback(lambda _: self._changed.set())

    async def _group(self, issue: Issue) -> None:
        CURRENT.set(issue if self.replayable else None)
        (group,) = await self.source.make([(issue.id, issue.task)], issue.version)
        if (
            self.teaches is not None
            and not self.teaches(group)
            and self._tried < self.tries * self.scheduler.per_step
        ):
            self._tried += 1
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
