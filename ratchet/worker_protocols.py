"""Protocols of groups of worker processes, and of the executors that start them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Ranks(Protocol):
    """Components of one kind that are called together.

    Each component runs in a process of its own, or there is a single one in this process.
    """

    async def call(self, method: str, /, *arguments: Any) -> list[Any]:
        """Call a method on all ranks and return the results by rank.

        Raises the exception of a rank, or an error that names the rank that died.
        """
        ...


@runtime_checkable
class Workers(Ranks, Protocol):
    """The ranks of one role, each a process with a component of its own.

    `ratchet.executors.worker_group.WorkerGroup` implements it. Ranks run a call at the same time,
    and each rank runs one call after another. `each` calls a method with different arguments for
    each rank. The methods with `_now` block, for callers that can't await.
    """

    @property
    def size(self) -> int: ...
    @property
    def final_error(self) -> Exception | None:
        """Return the error with which every later call fails; None while calls are answered."""
        ...

    async def build(self, factory: str, arguments: Mapping[str, Any] | None = None) -> None:
        """Build the component of each rank.

        Args:
            factory: "module:callable", called with the rank's place (rank, world_size, rendezvous,
                device, ...) and `arguments`.
            arguments: Keyword arguments, the same for all ranks.
        """
        ...

    def within(self, timeout_s: float, *, owner: str = "driver") -> Workers:
        """Return the same workers with another time limit for calls, and the name of the caller."""
        ...

    async def call(self, method: str, /, *arguments: Any, **keywords: Any) -> list[Any]: ...
    async def each(self, method: str, arguments_by_rank: Sequence[Sequence[Any]]) -> list[Any]: ...
    def call_now(self, method: str, /, *arguments: Any, **keywords: Any) -> list[Any]:
        """Call a method on all ranks, and block until all have returned."""
        ...

    def build_now(self, factory: str, arguments: Mapping[str, Any] | None = None) -> None: ...
    def close(self) -> None: ...


@runtime_checkable
class Executor(Protocol):
    """An executor, which starts worker groups."""

    def plan(self, needs: Sequence[Any]) -> None:
        """Assign the resources of all groups, before the first group starts.

        Raises ConfigError with a table of missing resources.
        """
        ...

    def group(self, role: str, rank: int | None = None) -> Workers:
        """Start the processes of a role of the plan.

        Args:
            role: A role of the plan.
            rank: Start only this rank, as a group of one, which requires independent ranks; None
                starts all ranks. A second call, after the process ended, starts a new process on
                the same accelerators.
        """
        ...

    def close(self) -> None: ...
