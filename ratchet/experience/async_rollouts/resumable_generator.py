"""Interrupt generation requests at any token, and resume them in this process or in a new one.

A generator that takes turns with the learner on an accelerator (colocation) is interrupted for each
update. Its requests then continue with the new weights.

A group's completions go into its journal under the request's seed, which identifies attempt and
turn. A resumed run replays an attempt from its start: each turn gets its completion from the
journal, until the journal ends and sampling continues. So a checkpoint needs no state of a
`replayable` environment. Saving a checkpoint interrupts and resumes all requests too, so a run that
continues after the checkpoint and a run that resumes from it sample in the same way.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ratchet.allowed_tokens import AllowedTokens
from ratchet.experience.async_rollouts.staleness_scheduler import ScheduledGroup
from ratchet.generators.wrapper import GeneratorWrapper
from ratchet.protocols import Generator
from ratchet.types import Completion, PlacedMedium, Sampling, StopReason

log = logging.getLogger(__name__)

# The group whose attempts the current asyncio task plays; None: its completions are not journaled.
CURRENT_GROUP: ContextVar[ScheduledGroup | None] = ContextVar("group", default=None)
POLL_S = 0.001  # seconds between two looks at the attempts that are still busy
ABORT_POLL_S = 0.01  # seconds between two aborts of requests that still run
INTERRUPT_TIMEOUT_S = 30.0
EVENT_LOOP_ITERATIONS = 32  # more than the longest chain of tasks that wait for one another


class ResumableGenerator(GeneratorWrapper):
    """A generator wrapper for attempts, which can interrupt their requests and resume them.

    Requests outside a group are interrupted too, but leave nothing in a journal.
    """

    def __init__(self, inner: Generator) -> None:
        super().__init__(inner)
        self._is_interrupted = False
        self._n_running = 0  # requests that `inner` has
        self._numbers = itertools.count()
        # Requests that wait for `resume_requests`, by (number of the group, seed, number of
        # the request).
        self._waiting: dict[tuple[int, int, int], asyncio.Future[None]] = {}

    async def generate(
        self,
        tokens: Sequence[int] | NDArray[np.int64],
        sampling: Sampling,
        media: Sequence[PlacedMedium] = (),
    ) -> Completion:
        group = CURRENT_GROUP.get()
        journal = {} if group is None else group.journal
        key = (-1 if group is None else group.number), sampling.seed, next(self._numbers)
        completion = journal.get(sampling.seed)
        while completion is None or completion.stop is StopReason.ABORTED:
            await self._wait_until_resumed(key)
            self._n_running += 1
            try:
                continuation = await self.inner.generate(
                    *_make_remaining_request(tokens, sampling, completion), media
                )
            finally:
                self._n_running -= 1
            completion = journal[sampling.seed] = join_completions(completion, continuation)
            if completion.stop is StopReason.ABORTED and not self._is_interrupted:
                break  # the request was aborted for another reason
        return completion

    async def interrupt_running(self) -> None:
        """Interrupt all requests, and return once `inner` has none.

        Attempts that are busy in an environment or a reward go on until their next request.
        """
        self._is_interrupted = True
        while self._n_running:
            self.inner.abort()
            await _let_tasks_continue()
            # A request that `inner` did not know yet is aborted by a later call.
            if self._n_running:
                await asyncio.sleep(ABORT_POLL_S)

    async def interrupt_requests(self, count_playing: Callable[[], int]) -> None:
        """Interrupt all requests, and wait until every attempt waits in `generate`.

        Attempts that are still busy in an environment or a reward after INTERRUPT_TIMEOUT_S are not
        waited for. The resumed run repeats their turn.

        Args:
            count_playing: Returns the number of attempts in flight.
        """
        try:
            async with asyncio.timeout(INTERRUPT_TIMEOUT_S):
                await self.interrupt_running()
                await _let_tasks_continue()
                while len(self._waiting) < count_playing():
                    await asyncio.sleep(POLL_S)
                    await _let_tasks_continue()
        except TimeoutError:
            log.warning(
                "%d attempts are still busy in an environment or a reward after %g s",
                count_playing() - len(self._waiting),
                INTERRUPT_TIMEOUT_S,
            )

    def resume_requests(self) -> None:
        """Resume the waiting requests in a fixed order, so that runs are reproducible."""
        self._is_interrupted = False
        for key in sorted(self._waiting):
            if not self._waiting[key].done():
                self._waiting[key].set_result(None)

    async def _wait_until_resumed(self, key: tuple[int, int, int]) -> None:
        # Requests may be interrupted again before the ones just resumed have continued.
        while self._is_interrupted:
            self._waiting[key] = asyncio.get_running_loop().create_future()
            try:
                await self._waiting[key]
            finally:
                del self._waiting[key]


async def _let_tasks_continue() -> None:
    """Let the event loop run until all tasks that awaited a finished request have continued."""
    for _ in range(EVENT_LOOP_ITERATIONS):
        await asyncio.sleep(0)


def _make_remaining_request(
    tokens: Sequence[int] | NDArray[np.int64],
    sampling: Sampling,
    partial_completion: Completion | None,
) -> tuple[Sequence[int] | NDArray[np.int64], Sampling]:
    """Return (prompt tokens, sampling) that continue an interrupted completion."""
    if partial_completion is None or not len(partial_completion.tokens):
        return tokens, sampling
    n_drawn = len(partial_completion.tokens)
    remaining_sampling = replace(
        sampling, max_new_tokens=sampling.max_new_tokens - n_drawn, drawn=sampling.drawn + n_drawn
    )
    return np.concatenate(
        [np.asarray(tokens, dtype=np.int64), partial_completion.tokens]
    ), remaining_sampling


def join_completions(first: Completion | None, continuation: Completion) -> Completion:
    """Return a completion with its continuation appended.

    If both completions have recorded the experts of a token, those of `first` are kept.
    """
    if first is None:
        return continuation
    routes = continuation.routes
    if routes is not None and first.routes is not None:
        routes = routes.copy()
        is_routed = first.routes[:, 0, 0] >= 0
        routes[: len(is_routed)][is_routed] = first.routes[is_routed]
    return Completion(
        tokens=np.concatenate([first.tokens, continuation.tokens]),
        logprobs=np.concatenate([first.logprobs, continuation.logprobs]),
        log_kept_mass=np.concatenate([first.log_kept_mass, continuation.log_kept_mass]),
        versions=np.concatenate([first.versions, continuation.versions]),
        stop=continuation.stop,
        routes=routes,
        extras=continuation.extras,
        allowed=AllowedTokens.concatenate(
            [(part.allowed, len(part.tokens)) for part in (first, continuation)]
        ),
    )
