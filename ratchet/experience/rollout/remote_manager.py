"""Play whole groups in the generator workers, which run environments and rewards too.

Environments and rewards use as many cores as there are workers; only finished groups come back.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Protocol

from ratchet.errors import WorkerError
from ratchet.experience.rollout.columns import PackedGroups
from ratchet.observe.stall_report import GENERATE, waiting
from ratchet.types import Group, Sampling, Task

# Timeout of a step's groups; attempts have their own in `rollouts.attempt_timeout_s`.
LONGEST_S = 7 * 86_400.0
CLOSE_S = 60.0


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
    """A `GroupPlayer` that plays in `ratchet.training.rollout_workers.GroupRank`s.

    Args:
        players: the workers.
        stage: the arguments of `GroupRank.begin`.
    """

    def __init__(self, players: RolloutWorkers, stage: Sequence[Any]) -> None:
        self.players = players
        self.stage = stage
        self.playing = 0
        self._begun = False

    async def groups(
        self,
        jobs: Sequence[tuple[str, Task]],
        sampling: Sampling,
        *,
        attempts: int,
        greedy: bool = False,
        redundant: int = 0,
        wanted: int | None = None,
    ) -> list[Group]:
        """Play groups like `RolloutManager.groups`.

        Seeds belong to attempts, so a group does not depend on the worker that plays it.

        Raises:
            WorkerError: A worker is lost.
        """
        assert not redundant, "the configuration refuses them here"
        assert wanted in (None, len(jobs)), "nothing is redundant"
        size = self.players.size
        shares = [jobs[i::size] for i in range(size)]
        self.playing += len(jobs)
        try:
            with waiting("groups", GENERATE, "workers", None):
                if not self._begun:
                    await self.players.call_each("begin", [self.stage] * size)
                    self._begun = True
                arguments = [(share, sampling, attempts, greedy) for share in shares]
                answers: list[PackedGroups] = await self.players.call_each(
                    "play", arguments, timeout_s=LONGEST_S
                )
        except BaseException as error:
            self.players.give_up(
                error
                if isinstance(error, Exception)
                else WorkerError("a step's groups were given up")
            )
            raise
        finally:
            self.playing -= len(jobs)
        parts = [
            list(answer.groups([task for _, task in share]))
            for answer, share in zip(answers, shares, strict=True)
        ]
        return [parts[i % size][i // size] for i in range(len(jobs))]

    async def close(self) -> None:
        """Close the stage's environments. Errors are ignored: lost workers have none to close."""
        if self._begun:
            self._begun = False
            with suppress(Exception):
                await self.players.call_each("leave", [()] * self.players.size, timeout_s=CLOSE_S)
