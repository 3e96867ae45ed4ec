"""The weight receivers of generator workers, for a weight sync."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ratchet.generators.workers.worker_queue import WorkerQueue

if TYPE_CHECKING:
    from ratchet.generators.workers.pool import GeneratorPool


class PoolReceivers:
    """The weight receivers at some of the workers, with the interface of `Ranks`."""

    def __init__(self, pool: GeneratorPool, queues: Sequence[WorkerQueue]) -> None:
        self.pool = pool
        self.queues = list(queues)

    @property
    def size(self) -> int:
        """Return the number of receivers."""
        return len(self.queues)

    async def call(self, method: str, /, *arguments: Any) -> list[Any]:
        """Call a method of every receiver and return the results."""
        calls = (
            self.pool.call_worker(queue, "call_receiver", index, method, *arguments)
            for index, queue in enumerate(self.queues)
        )
        results = await asyncio.gather(*calls)
        if method == "commit":
            self.pool.mark_current(self.queues, arguments[0])
        return results
