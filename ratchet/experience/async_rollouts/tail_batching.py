"""A source wrapper for tail batching (RollPacker, arXiv:2509.21009).

A step starts more groups than it trains on, and takes the groups that finish first. The others are
deferred. Once enough groups are deferred, a step plays only these and waits for all of them. The
longest attempts delay only such steps. Each prompt is still trained on once, with attempts that the
newest weights sampled.

A deferred group is played again from its start, with the same seeds. With other seeds a long
attempt could become short, and training would see too few long ones.
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

from ratchet.experience.rollout.manager import gather_first
from ratchet.experience.sources.rollouts import RolloutSource
from ratchet.generators.wrapper import GeneratorWrapper
from ratchet.protocols import Generator, Source
from ratchet.types import Completion, Group, PlacedMedium, Sampling, Task

log = logging.getLogger(__name__)

Job = tuple[str, Task]  # a group's id, and its task
ABORT_TIMEOUT_S = 30.0  # seconds that `abort_requests` waits for aborted requests


@dataclass(eq=False)
class TokenCounter:
    """A counter of the tokens that the attempts of a group have generated."""

    tokens: int = 0


# The counter of the group whose attempts the current asyncio task plays.
CURRENT_COUNTER: ContextVar[TokenCounter | None] = ContextVar("counter", default=None)


class AbortableGenerator(GeneratorWrapper):
    """A generator wrapper that counts the tokens of each group and can abort its requests.

    Requests outside a group, such as those of an evaluation, are not counted or held back.
    """

    def __init__(self, inner: Generator) -> None:
        super().__init__(inner)
        self._is_blocked = False
        self._n_requests = 0  # requests in flight
        self._all_returned = asyncio.Event()
        self._never_set = asyncio.Event()

    async def generate(
        self,
        tokens: Sequence[int] | NDArray[np.int64],
        sampling: Sampling,
        media: Sequence[PlacedMedium] = (),
    ) -> Completion:
        counter = CURRENT_COUNTER.get()
        if counter is None:
            return await self.inner.generate(tokens, sampling, media)
        await self._wait_if_blocked()
        self._n_requests += 1
        try:
            completion = await self.inner.generate(tokens, sampling, media)
            counter.tokens += len(completion.tokens)
        finally:
            self._n_requests -= 1
            if not self._n_requests:
                self._all_returned.set()
        await self._wait_if_blocked()
        return completion

    async def abort_requests(self) -> None:
        """Abort the requests in flight, and wait until their tokens are counted.

        Until `accept_requests` is called, group requests that are made or that return wait forever:
        the caller must cancel their tasks.
        """
        self._is_blocked = True
        if not self._n_requests:
            return
        self._all_returned.clear()
        self.inner.abort()
        try:
            async with asyncio.timeout(ABORT_TIMEOUT_S):
                await self._all_returned.wait()
        except TimeoutError:
            log.warning(
                "%d aborted requests have not returned after %g s",
                self._n_requests,
                ABORT_TIMEOUT_S,
            )

    def accept_requests(self) -> None:
        """Let the requests of groups pass again."""
        self._is_blocked = False

    async def _wait_if_blocked(self) -> None:
        if self._is_blocked:
            await self._never_set.wait()


class TailBatching(Source):
    """A source that defers the slowest groups of a step.

    It starts no more prompts than the remaining steps can train on, so that none is left at the end
    of a stage. The last step may mix deferred and new groups, and waits for all of them.

    Args:
        source: The source of rollouts.
        generator: The generator that the source's attempts call.
        extra_groups: Number of groups that a step starts beyond those it trains on.
        end_step: The first step after the stage.
    """

    def __init__(
        self,
        source: RolloutSource,
        generator: AbortableGenerator,
        *,
        extra_groups: int,
        end_step: int,
    ) -> None:
        self.source = source
        self.generator = generator
        self.extra_groups = extra_groups
        self.end_step = end_step
        self._deferred: list[Job] = []  # oldest first
        self._metrics: dict[str, float] = {}  # of the latest draw

    async def draw(self, n: int, version: int) -> list[Group]:
        """Return n groups: the new groups that finish first, or the oldest deferred groups."""
        # Number of new groups that the stage's remaining steps can still train on.
        max_new = (self.end_step - version) * n - len(self._deferred)
        self._metrics = {"deferred": 0.0, "wasted_tokens": 0.0}
        # With too few new groups for a whole step, the last step plays the deferred groups too.
        if len(self._deferred) >= n or max_new < n:
            groups = await self._play_deferred(n, version)
        else:
            jobs = self.source.take(min(n + self.extra_groups, max_new), version)
            groups = await self._race(jobs, n, version)
        return self.source.observe_groups(groups)

    def ack(self, ids: Sequence[str], step: int) -> None:
        self.source.ack(ids, step)

    def nack(self, ids: Sequence[str], reason: str) -> None:
        self.source.nack(ids, reason)

    def measure(self, groups: Sequence[Group]) -> Mapping[str, float]:
        metrics = {**self._metrics, "waiting": float(len(self._deferred))}
        return {
            **self.source.measure(groups),
            **{f"tails/{name}": value for name, value in metrics.items()},
        }

    async def snapshot(self) -> Mapping[str, Any]:
        return {
            "source": await self.source.snapshot(),
            "deferred": [group_id for group_id, _ in self._deferred],
        }

    async def restore(self, state: Mapping[str, Any]) -> None:
        await self.source.restore(state["source"])
        self._deferred = [self.source.claim(group_id) for group_id in state["deferred"]]

    async def _play_deferred(self, n: int, version: int) -> list[Group]:
        """Play the oldest n deferred groups to their end, and new groups if fewer are deferred."""
        jobs = self._deferred[:n]
        self._deferred = self._deferred[n:]
        self.source.ledger.note("issued", [group_id for group_id, _ in jobs], version=version)
        jobs += self.source.take(n - len(jobs), version)
        return await self.source.play(jobs, n)

    async def _race(self, jobs: Sequence[Job], n: int, version: int) -> list[Group]:
        """Return the first n groups that finish, and defer the others."""
        counters = {group_id: TokenCounter() for group_id, _ in jobs}
        groups = await gather_first(
            [self._play(job, counters[job[0]]) for job in jobs],
            n,
            before_cancel=self.generator.abort_requests,
        )
        self.generator.accept_requests()
        finished_ids = {group.id for group in groups}
        unfinished = [job for job in jobs if job[0] not in finished_ids]
        self._deferred += unfinished
        deferred_ids = [group_id for group_id, _ in unfinished]
        self._metrics = {
            "deferred": float(len(unfinished)),
            "wasted_tokens": float(sum(counters[group_id].tokens for group_id in deferred_ids)),
        }
        self.source.ledger.note("deferred", deferred_ids, step=version)
        return groups

    async def _play(self, job: Job, counter: TokenCounter) -> Group:
        CURRENT_COUNTER.set(counter)
        (group,) = await self.source.play([job], 1)
        return group
