"""Generate so that requests can be interrupted at any token and resumed, here or in a new process.

A group's completions go into its journal under the request's seed, which identifies attempt and
turn. An attempt that is replayed from the start gets the same completions from the journal, turn by
turn, and then continues. So a checkpoint needs no state of a `replayable` environment, and a
run that saves takes the same path as one that resumes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ratchet.experience.async_rollouts.staleness_scheduler import ScheduledGroup
from ratchet.protocols import Generator
from ratchet.types import Completion, Placed, Sampling, StopReason

log = logging.getLogger(__name__)

# The group whose attempts the current asyncio task plays.
CURRENT: ContextVar[ScheduledGroup | None] = ContextVar("issue", default=None)
POLL_S = 0.001
QUIET_S = 30.0
HOPS = 32  # event-loop iterations; exceeds the longest chain of tasks that wait for one another


class ResumableGenerator:
    """A generator wrapper that can interrupt the requests of groups and resume them.

    Requests outside a group, such as those of an evaluation, pass through.
    """

    def __init__(self, inner: Generator) -> None:
        self.inner = inner
        self._closed = False
        # Requests that wait for `open`, by (number of the group, seed).
        self._waiting: dict[tuple[int, int], asyncio.Future[None]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    async def generate(
        self,
        tokens: Sequence[int] | NDArray[np.int64],
        sampling: Sampling,
        media: Sequence[Placed] = (),
    ) -> Completion:
        issue = CURRENT.get()
        if issue is None:
            return await self.inner.generate(tokens, sampling, media)
        drawn = issue.journal.get(sampling.seed)
        while drawn is None or drawn.stop is StopReason.ABORTED:
            await self._opened(issue, sampling.seed)
            continuation = await self.inner.generate(
                *_remaining_request(tokens, sampling, drawn), media
            )
            drawn = issue.journal[sampling.seed] = join_completions(drawn, continuation)
            if drawn.stop is StopReason.ABORTED and not self._closed:
                break  # the request was aborted for another reason
        return drawn

    async def close(self, playing: Callable[[], int]) -> None:
        """Interrupt all requests, and wait until every attempt waits in `generate`.

        Attempts that spend more than QUIET_S in an environment or a reward are left there; the
        resumed run repeats their turn.

        Args:
            playing: Returns the number of attempts in flight.
        """
        self._closed = True
        self.inner.abort()
        try:
            async with asyncio.timeout(QUIET_S):
                await _run_event_loop()
                while len(self._waiting) < playing():
                    await asyncio.sleep(POLL_S)
                    await _run_event_loop()
        except TimeoutError:
            log.warning(
                "%d attempts are still busy in an environment or a reward after %g s",
                playing() - len(self._waiting),
                QUIET_S,
            )

    def open(self) -> None:
        """Resume the waiting requests in a fixed order, so that runs are reproducible."""
        self._closed = False
        for key in sorted(self._waiting):
            if not self._waiting[key].done():
                self._waiting[key].set_result(None)

    async def _opened(self, issue: ScheduledGroup, seed: int) -> None:
        if not self._closed:
            return
        key = issue.number, seed
        self._waiting[key] = asyncio.get_running_loop().create_future()
        try:
            await self._waiting[key]
        finally:
            del self._waiting[key]


async def _run_event_loop() -> None:
    """Let the event loop run until finished attempts have reached all tasks that wait for them."""
    for _ in range(HOPS):
        await asyncio.sleep(0)


def _remaining_request(
    tokens: Sequence[int] | NDArray[np.int64], sampling: Sampling, drawn: Completion | None
) -> tuple[Sequence[int] | NDArray[np.int64], Sampling]:
    if drawn is None or not len(drawn.tokens):
        return tokens, sampling
    count = len(drawn.tokens)
    remaining = replace(
        sampling, max_new_tokens=sampling.max_new_tokens - count, drawn=sampling.drawn + count
    )
    return np.concatenate([np.asarray(tokens, dtype=np.int64), drawn.tokens]), remaining


def join_completions(drawn: Completion | None, continuation: Completion) -> Completion:
    """Return a completion with its continuation appended.

    If both parts have recorded the experts of a token, those of the first part are kept.
    """
    if drawn is None:
        return continuation
    routes = continuation.routes
    if routes is not None and drawn.routes is not None:
        routes = routes.copy()
        is_routed = drawn.routes[:, 0, 0] >= 0
        routes[: len(is_routed)][is_routed] = drawn.routes[is_routed]
    return Completion(
        tokens=np.concatenate([drawn.tokens, continuation.tokens]),
        logprobs=np.concatenate([drawn.logprobs, continuation.logprobs]),
        log_kept_mass=np.concatenate([drawn.log_kept_mass, continuation.log_kept_mass]),
        versions=np.concatenate([drawn.versions, continuation.versions]),
        stop=continuation.stop,
        routes=routes,
        extras=continuation.extras,
    )
