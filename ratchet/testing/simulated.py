"""A simulated generator and learner, which only take time, to test the real schedulers."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from pydantic import Field

from ratchet.config.base import Section
from ratchet.experience.async_rollouts.staleness_scheduler import ScheduledGroup, StalenessScheduler
from ratchet.learners.wrapper import LearnerWrapper
from ratchet.protocols import LossTerm
from ratchet.testing.fakes import FakeGenerator
from ratchet.types import Completion, Group, PlacedMedium, Sampling, StopReason, Task


class SlowGenerator(FakeGenerator):
    """A generator whose requests take log-normal seconds, drawn from the request's seed.

    A request returns one token, a stop token if it has any; an aborted request returns none.
    """

    class Config(Section):
        mean_s: float = Field(0.4, gt=0)
        """Mean duration of a request, in seconds."""
        sigma: float = Field(1.0, ge=0)
        """Standard deviation of the duration's logarithm; 1 gives a heavy tail."""
        slots: int = Field(8, ge=1)
        """Maximum number of requests at the same time."""

    def __init__(self, config: Any, *_: Any) -> None:
        super().__init__(lambda tokens, sampling: sampling.stop_ids[:1] or [0])
        self.config = config
        self._slots = asyncio.Semaphore(config.slots)
        self._aborted = asyncio.Event()

    async def generate(
        self, tokens: Any, sampling: Sampling, media: Sequence[PlacedMedium] = ()
    ) -> Completion:
        aborted = self._aborted
        async with self._slots:
            with suppress(TimeoutError):
                async with asyncio.timeout(
                    draw_seconds(sampling.seed, self.config.mean_s, self.config.sigma)
                ):
                    await aborted.wait()
        completion = await super().generate(tokens, sampling, media)
        return _without_tokens(completion) if aborted.is_set() else completion

    def abort(self) -> None:
        aborted, self._aborted = self._aborted, asyncio.Event()
        aborted.set()


def _without_tokens(completion: Completion) -> Completion:
    empty_columns = {
        name: getattr(completion, name)[:0]
        for name in ("tokens", "logprobs", "log_kept_mass", "versions")
    }
    return replace(completion, stop=StopReason.ABORTED, **empty_columns)


def draw_seconds(seed: int, mean_s: float, sigma: float) -> float:
    return random.Random(seed).lognormvariate(0.0, sigma) * mean_s / math.exp(sigma**2 / 2)


class SlowLearner(LearnerWrapper):
    """A learner whose updates take `seconds` longer."""

    def __init__(self, inner: Any, seconds: float) -> None:
        super().__init__(inner)
        self.seconds = seconds

    async def update(self, mini: Any, terms: Sequence[LossTerm]) -> Mapping[str, float]:
        await asyncio.sleep(self.seconds)
        return await super().update(mini, terms)


def compute_best_step_ends(
    scheduler: StalenessScheduler,
    *,
    attempts: int,
    slots: int,
    update_s: float,
    seconds: Callable[[int, int], float],
) -> list[float]:
    """Return the time in seconds of each step's end if only requests and updates take time.

    No run under the same bound on staleness can be faster. Any free slot serves any request. A
    group begins only when a slot is free, with the latest weights.

    Args:
        attempts: Number of attempts of a group.
        seconds: Duration of a request, by the numbers of its group and attempt.
    """
    clock, n_free_slots, is_training = 0.0, slots, False
    step_ends, n_attempts_left = list[float](), dict[ScheduledGroup, int]()
    waiting = deque[tuple[ScheduledGroup, int]]()
    tie_breakers = itertools.count()
    # Heap of ends: (time, tie-breaker, group of the request; None for an update).
    pending_ends: list[tuple[float, int, ScheduledGroup | None]] = []
    while len(step_ends) < scheduler.end_step:
        step = len(step_ends)
        # While a step trains, its groups still take up room that the next step may not use.
        while n_free_slots and (
            waiting or scheduler.count_startable(step) > is_training * scheduler.groups_per_step
        ):
            if not waiting:
                scheduled_group = scheduler.begin(
                    step, str(scheduler.n_started), Task(str(scheduler.n_started), ())
                )
                n_attempts_left[scheduled_group] = attempts
                waiting.extend((scheduled_group, attempt) for attempt in range(attempts))
            scheduled_group, attempt = waiting.popleft()
            n_free_slots -= 1
            heapq.heappush(
                pending_ends,
                (
                    clock + seconds(scheduled_group.number, attempt),
                    next(tie_breakers),
                    scheduled_group,
                ),
            )
        if not is_training and scheduler.choose(step) is not None:
            is_training = True
            heapq.heappush(pending_ends, (clock + update_s, next(tie_breakers), None))
            continue
        clock, _, group = heapq.heappop(pending_ends)
        if group is None:
            step_ends.append(clock)
            is_training = False
            continue
        n_free_slots += 1
        n_attempts_left[group] -= 1
        if not n_attempts_left[group]:
            scheduler.mark_ready(group, Group(group.id, group.task, ()))
    return step_ends
