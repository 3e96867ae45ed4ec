"""A source around a source: tail batching (RollPacker, arXiv:2509.21009). A step begins more groups
than it takes, and trains on those that are ready first; the others are deferred, and come together
in steps of their own, which play them to their end.

So few steps wait for the longest attempts, and yet each prompt is trained on once, with attempts of
the newest weights. A group that comes again is drawn with the seeds that it had: with others, what
was long by chance would have a second chance to be short, and training would see too little of what
is long.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ratchet.experience.rollout.manager import first
from ratchet.experience.sources.rollouts import Rollouts
from ratchet.protocols import Generator
from ratchet.types import Completion, Group, Placed, Sampling, Task

log = logging.getLogger(__name__)

Job = tuple[str, Task]  # a group's id, and its task
QUIET_S = 30.0


@dataclass(eq=False)
class Drawn:
    """tokens: that attempts of a group asked for and got."""

    tokens: int = 0


# of the group whose attempts this task plays
CURRENT: ContextVar[Drawn | None] = ContextVar("drawn", default=None)


class Cuttable:
    """What attempts ask in place of their generator: it counts what is drawn for a group, and can
    be cut off. Requests of no group (an evaluation's) pass through."""

    def __init__(self, inner: Generator) -> None:
        self.inner = inner
        self._cut = False
        self._asked = 0  # requests that the generator has
        self._quiet, self._never = asyncio.Event(), asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    async def generate(
        self,
        tokens: Sequence[int] | NDArray[np.int64],
        sampling: Sampling,
        media: Sequence[Placed] = (),
    ) -> Completion:
        drawn = CURRENT.get()
        if drawn is None:
            return await self.inner.generate(tokens, sampling, media)
        await self._wanted()
        self._asked += 1
        try:
            completion = await self.inner.generate(tokens, sampling, media)
            drawn.tokens += len(completion.tokens)
        finally:
            self._asked -= 1
            if not self._asked:
                self._quiet.set()
        await self._wanted()
        return completion

    async def cut(self) -> None:
        """Interrupts what is drawn, and waits until it is counted. Who asks from now on waits until
        it is cancelled."""
        self._cut = True
        if not self._asked:
            return
        self._quiet.clear()
        self.inner.abort()
        try:
            async with asyncio.timeout(QUIET_S):
                await self._quiet.wait()
        except TimeoutError:
            log.warning(
                "%d requests that were aborted are not answered after %g s", self._asked, QUIET_S
            )

    def open(self) -> None:
        self._cut = False

    async def _wanted(self) -> None:
        if self._cut:
            await self._never.wait()


class TailBatching:
    """more: groups that a step begins beyond those it takes. last_step: the first step that is
    none.

    No more prompts are begun than the steps that are left can train on, so at the end of a stage
    none waits. The last step may have deferred and new ones, and plays all of them to their end.
    """

    def __init__(self, source: Rollouts, generator: Cuttable, *, more: int, last_step: int) -> None:
        self.source, self.generator, self.more, self.last_step = source, generator, more, last_step
        self._deferred: list[Job] = []  # in the order in which they were
        self._numbers: dict[str, float] = {}  # of the latest draw

    async def draw(self, n: int, version: int) -> list[Group]:
        to_begin = (self.last_step - version) * n - len(self._deferred)
        self._numbers = {"deferred": 0.0, "wasted_tokens": 0.0}
        if len(self._deferred) >= n or to_begin < n:
            groups = await self._whole(n, version)
        else:
            groups = await self._race(
                self.source.take(min(n + self.more, to_begin), version), n, version
            )
        return self.source.observed(groups)

    def ack(self, ids: Sequence[str], step: int) -> None:
        self.source.ack(ids, step)

    def nack(self, ids: Sequence[str], reason: str) -> None:
        self.source.nack(ids, reason)

    def measure(self, groups: Sequence[Group]) -> Mapping[str, float]:
        own = {**self._numbers, "waiting": float(len(self._deferred))}
        return {
            **self.source.measure(groups),
            **{f"tails/{name}": value for name, value in own.items()},
        }

    async def snapshot(self) -> Mapping[str, Any]:
        return {
            "source": await self.source.snapshot(),
            "deferred": [name for name, _ in self._deferred],
        }

    async def restore(self, state: Mapping[str, Any]) -> None:
        await self.source.restore(state["source"])
        self._deferred = [self.source.claim(name) for name in state["deferred"]]

    async def _whole(self, n: int, version: int) -> list[Group]:
        """Those that were deferred first; where there are fewer, new ones beside them."""
        jobs, self._deferred = self._deferred[:n], self._deferred[n:]
        self.source.ledger.note("issued", [name for name, _ in jobs], version=version)
        jobs += self.source.take(n - len(jobs), version)
        return await self.source.play(jobs, n)

    async def _race(self, jobs: Sequence[Job], n: int, version: int) -> list[Group]:
        """The first n that are ready."""
        drawn = {name: Drawn() for name, _ in jobs}
        groups = await first(
            [self._play(job, drawn[job[0]]) for job in jobs], n, parting=self.generator.cut
        )
        self.generator.open()
        ready = {group.id for group in groups}
        late = [job for job in jobs if job[0] not in ready]
        self._deferred += late
        names = [name for name, _ in late]
        self._numbers = {
            "deferred": float(len(late)),
            "wasted_tokens": float(sum(drawn[name].tokens for name in names)),
        }
        self.source.ledger.note("deferred", names, step=version)
        return groups

    async def _play(self, job: Job, drawn: Drawn) -> Group:
        CURRENT.set(drawn)
        (group,) = await self.source.play([job], 1)
        return group
