"""Play whole groups in rollout workers: generator workers that run environments and rewards too.

Environments and rewards then use as many cores as there are workers, and only finished groups are
sent to the driver.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Protocol

from ratchet.errors import WorkerError
from ratchet.experience.rollout.columns import PackedGroups
from ratchet.observe.stall_report import GENERATE, waiting
from ratchet.types import Group, Sampling, Task

# Timeout of a step's groups. An attempt's timeout is `rollouts.attempt_timeout_s`.
STEP_TIMEOUT_S = 7 * 86_400.0
CLOSE_TIMEOUT_S = 60.0


class RolloutWorkers(Protocol):
    """A group of workers, each with a generator that has the current weights."""

    async def call_each(
        self,
        method: str,
        arguments_by_worker: Sequence[Sequence[Any]],
        *,
        timeout_s: float | None = None,
    ) -> list[Any]: ...

    def give_up(self, error: Exception) -> None: ...

    @property
    def size(self) -> int: ...


class RemoteRolloutManager:
    """A `GroupPlayer` whose groups are played by `ratchet.training.workers.rollouts.RolloutWorker`.

    Args:
        workers: The rollout workers.
        begin_arguments: The arguments of `RolloutWorker.begin`.
    """

    def __init__(self, workers: RolloutWorkers, begin_arguments: Sequence[Any]) -> None:
        self.workers = workers
        self.begin_arguments = begin_arguments
        self.n_playing = 0
        self._has_begun = False

    async def groups(
        self,
        jobs: Sequence[tuple[str, Task]],
        sampling: Sampling,
        *,
        attempts: int,
        greedy: bool = False,
        redundant: int = 0,
        keep_first: int | None = None,
    ) -> list[Group]:
        """Play groups like `RolloutManager.groups`.

        Seeds belong to attempts, so a group does not depend on the worker that plays it.

        Raises:
            WorkerError: A worker is lost.
        """
        assert not redundant, "the configuration refuses redundant attempts in rollout workers"
        assert keep_first in (None, len(jobs)), "there are no redundant groups"
        size = self.workers.size
        jobs_by_worker = [jobs[i::size] for i in range(size)]
        self.n_playing += len(jobs)
        try:
            with waiting("groups", GENERATE, "workers", None):
                if not self._has_begun:
                    await self.workers.call_each("begin", [self.begin_arguments] * size)
                    self._has_begun = True
                arguments = [
                    (worker_jobs, sampling, attempts, greedy) for worker_jobs in jobs_by_worker
                ]
                packed_by_worker: list[PackedGroups] = await self.workers.call_each(
                    "play", arguments, timeout_s=STEP_TIMEOUT_S
                )
        except BaseException as error:
            self.workers.give_up(
                error
                if isinstance(error, Exception)
                else WorkerError("a step's groups were given up")
            )
            raise
        finally:
            self.n_playing -= len(jobs)
        groups_by_worker = [
            list(packed.unpack([task for _, task in worker_jobs]))
            for packed, worker_jobs in zip(packed_by_worker, jobs_by_worker, strict=True)
        ]
        return [groups_by_worker[i % size][i // size] for i in range(len(jobs))]

    async def close(self) -> None:
        """Close the stage's environments. Errors are ignored: lost workers have none to close."""
        if self._has_begun:
            self._has_begun = False
            with suppress(Exception):
                await self.workers.call_each(
                    "leave", [()] * self.workers.size, timeout_s=CLOSE_TIMEOUT_S
                )
