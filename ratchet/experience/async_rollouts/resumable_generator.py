"""Generating that can be interrupted at any token, and goes on where it was: after a save, in this
process or in another one.

What is drawn for a group goes into its journal, by the seed of the request, which names attempt and
turn. An attempt that is played again from the start gets from it what it got before, turn after
turn, as far as it had come, and then goes on. So a checkpoint needs no state of an environment that
is `replayable`: the run that saves and the one that resumes pass through the same place.
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

from ratchet.experience.async_rollouts.staleness_scheduler import Issue
from ratchet.protocols import Generator
from ratchet.types import Completion, Placed, Sampling, StopReason

log = logging.getLogger(__name__)

# whose attempts this task plays
CURRENT: ContextVar[Issue | None] = ContextVar("issue", default=None)
POLL_S = 0.001
QUIET_S = 30.0
HOPS = 32  # turns of the event loop: more than there are tasks that wait for one another


class Interruptible:
    """What attempts ask in place of their generator. Requests of no group (an evaluation's) pass
    through."""

    def __init__(self, inner: Generator) -> None:
        self.inner = inner
        self._closed = False
        # by (number of the issue, seed)
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
            more = await self.inner.generate(*_rest(tokens, sampling, drawn), media)
            drawn = issue.journal[sampling.seed] = joined(drawn, more)
            if drawn.stop is StopReason.ABORTED and not self._closed:
                break  # somebody else wants it to end
        return drawn

    async def close(self, playing: Callable[[], int]) -> None:
        """Interrupts what is drawn, and waits until so many attempts wait here: then nothing moves.
        Those that an environment or a reward holds up for long stay where they are: their turn is
        asked for once more, by who resumes."""
        self._closed = True
        self.inner.abort()
        try:
            async with asyncio.timeout(QUIET_S):
                await _settled()
                while len(self._waiting) < playing():
                    await asyncio.sleep(POLL_S)
                    await _settled()
        except TimeoutError:
            log.warning(
                "%d attempts are still busy elsewhere after %g s",
                playing() - len(self._waiting),
                QUIET_S,
            )

    def open(self) -> None:
        """Who waits goes on in a fixed order, whatever the order in which they came."""
        self._closed = False
        for key in sorted(self._waiting):
            if not self._waiting[key].done():
                self._waiting[key].set_result(None)

    async def _opened(self, issue: Issue, seed: int) -> None:
        if not self._closed:
            return
        key = issue.number, seed
        self._waiting[key] = asyncio.get_running_loop().create_future()
        try:
            await self._waiting[key]
        finally:
            del self._waiting[key]


async def _settled() -> None:
    """What has happened reaches all who wait for it: an attempt's end its group, and that whoever
    asked for it."""
    for _ in range(HOPS):
        await asyncio.sleep(0)


def _rest(
    tokens: Sequence[int] | NDArray[np.int64], sampling: Sampling, drawn: Completion | None
) -> tuple[Sequence[int] | NDArray[np.int64], Sampling]:
    if drawn is None or not len(drawn.tokens):
        return tokens, sampling
    count = len(drawn.tokens)
    left = replace(
        sampling, max_new_tokens=sampling.max_new_tokens - count, drawn=sampling.drawn + count
    )
    return np.concatenate([np.asarray(tokens, dtype=np.int64), drawn.tokens]), left


def joined(drawn: Completion | None, more: Completion) -> Completion:
    """A completion and what went on from it. The first to compute a token says which experts
    did."""
    if drawn is None:
        return more
    routes = more.routes
    if routes is not None and drawn.routes is not None:
        routes = routes.copy()
        known = drawn.routes[:, 0, 0] >= 0
        routes[: len(known)][known] = drawn.routes[known]
    return Completion(
        tokens=np.concatenate([drawn.tokens, more.tokens]),
        logprobs=np.concatenate([drawn.logprobs, more.logprobs]),
        log_kept_mass=np.concatenate([drawn.log_kept_mass, more.log_kept_mass]),
        versions=np.concatenate([drawn.versions, more.versions]),
        stop=more.stop,
        routes=routes,
        extras=more.extras,
    )
