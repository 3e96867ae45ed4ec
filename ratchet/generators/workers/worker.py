"""What lives in the process of a generator's worker: the generator, and its ends of links.

Calls come one at a time, and what was begun goes on only while one of them waits. So the driver
asks in exchanges: each brings new requests, generates for a while, and takes along what has ended.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import socket
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ratchet.errors import RatchetError, WorkerRaised
from ratchet.generators.workers.batch_protocol import Answered, Asked
from ratchet.protocols import Closeable, Generator, Placeable, Shard, ShowsWeights
from ratchet.types import Completion, Placed, Sampling

TOGETHER_S = 0.005  # after the first completion: what ends by then travels with it


class GeneratorRank:
    """generator: made in this process. intake: makes the receiving end of a link, of the generator
    and its place among the link's receivers."""

    def __init__(self, generator: Generator, intake: Callable[[Generator, int], Any]) -> None:
        self.generator = generator
        self._intake = intake
        self._intakes: dict[int, Any] = {}
        self._running: dict[int, asyncio.Task[Completion]] = {}
        self._done: dict[int, asyncio.Task[Completion]] = {}
        self._some: asyncio.Future[None] | None = None  # set when something is done

    def host(self) -> str:
        return socket.gethostname()

    def records_routes(self) -> bool:
        return getattr(self.generator, "records_routes", False)

    # --- requests

    async def exchange(
        self, asked: Asked, cancelled: Sequence[int], wait_s: float, abort: bool = False
    ) -> Answered:
        """Begins new requests, and generates until some have ended, at most for so many seconds.
        Gives what has ended. abort: those of before end with what they have."""
        if abort:
            self.generator.abort()
        for number in cancelled:
            if (task := self._running.pop(number, None)) is not None:
                task.cancel()
        for request in asked.each():
            self._begin(*request)
        if self._running and not self._done:
            self._some = asyncio.get_running_loop().create_future()
            await asyncio.wait([self._some], timeout=wait_s)
        if self._running and self._done:
            await asyncio.sleep(TOGETHER_S)
        else:
            await asyncio.sleep(0)  # those that are cancelled hear of it
        done, self._done = self._done, {}
        results = {number: _result(task) for number, task in done.items()}
        errors = {number: one for number, one in results.items() if isinstance(one, Exception)}
        return Answered.of(
            {number: one for number, one in results.items() if isinstance(one, Completion)}, errors
        )

    def _begin(
        self, number: int, tokens: NDArray[np.int64], sampling: Sampling, media: Sequence[Placed]
    ) -> None:
        task = self._running[number] = asyncio.ensure_future(
            self.generator.generate(tokens, sampling, media)
        )

        def ended(task: asyncio.Task[Completion]) -> None:
            # nobody waits for one that was cancelled
            if self._running.pop(number, None) is not None:
                self._done[number] = task
                if self._some is not None and not self._some.done():
                    self._some.set_result(None)

        task.add_done_callback(ended)

    async def pause(self) -> None:
        await self.generator.pause()

    async def resume(self) -> None:
        await self.generator.resume()

    # --- weights

    async def link(self, place: int, method: str, *arguments: Any) -> Any:
        """Calls the receiving end of a link. place: among the link's receivers."""
        if place not in self._intakes:
            self._intakes[place] = self._intake(self.generator, place)
        found = getattr(self._intakes[place], method)(*arguments)
        return await found if inspect.isawaitable(found) else found

    async def prepare(self, manifest: Mapping[str, Any]) -> None:
        await self.generator.prepare(manifest)

    async def receive(self, shards: Sequence[Shard]) -> None:
        await self.generator.receive(iter(shards))

    async def commit(self, version: int) -> None:
        await self.generator.commit(version)

    async def rollback(self) -> None:
        await self.generator.rollback()

    def weights(self) -> list[Shard]:
        """On the CPU; nothing where the generator doesn't show them."""
        if not isinstance(self.generator, ShowsWeights):
            return []
        return [
            Shard(
                shard.name, shard.shape, shard.offsets, shard.tensor.detach().to("cpu", copy=True)
            )
            for shard in self.generator.weights()
        ]

    # --- the accelerator

    async def onload(self) -> None:
        if isinstance(self.generator, Placeable):
            await self.generator.onload()

    async def offload(self) -> None:
        if isinstance(self.generator, Placeable):
            await self.generator.offload()

    async def close(self) -> None:
        for task in self._running.values():
            task.cancel()
        if isinstance(self.generator, Closeable):
            await self.generator.close()


def _result(task: asyncio.Task[Completion]) -> Completion | Exception:
    """The error in a form that can be sent: one of ours as itself, where it can be made again from
    its parts."""
    if task.cancelled():
        return WorkerRaised("the generator cancelled the request")
    error = task.exception()
    if error is None:
        return task.result()
    said = "".join(traceback.format_exception(error))
    if not isinstance(error, RatchetError):
        return WorkerRaised(said)
    try:
        made = copy.copy(error)
    except Exception:  # whatever its own __reduce__ does
        return WorkerRaised(said)
    made.add_note(f"raised in the generator's worker:\n{said}")
    return made
