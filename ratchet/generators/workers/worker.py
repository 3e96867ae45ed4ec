"""The component of a generator worker process, with its generator and weight receivers.

The process runs one call at a time, and generation advances only during a call. So the driver calls
`exchange` repeatedly: each call brings new requests, generates for a while, and returns the
completions of requests that have ended.
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
from ratchet.generators.workers.batch_protocol import CompletionBatch, RequestBatch
from ratchet.protocols import Generator, Shard
from ratchet.types import Completion, PlacedMedium, Sampling

GATHER_S = 0.005  # wait after the first completion, so that the call can return others too


class GeneratorRank:
    """The component of one generator worker.

    Args:
        generator: a generator of this process.
        make_receiver: creates a weight receiver from the generator and the worker's index among
            the receivers of the weight sync.
    """

    def __init__(
        self, generator: Generator, make_receiver: Callable[[Generator, int], Any]
    ) -> None:
        self.generator = generator
        self._make_receiver = make_receiver
        self._receivers: dict[int, Any] = {}
        self._running: dict[int, asyncio.Task[Completion]] = {}
        self._ended_tasks: dict[int, asyncio.Task[Completion]] = {}
        self._first_done: asyncio.Future[None] | None = None  # set when a request has ended

    def host(self) -> str:
        """Return the name of this machine."""
        return socket.gethostname()

    def records_routes(self) -> bool:
        """Return True if the generator can record the experts that each token was routed to."""
        return self.generator.records_routes

    def records_masks(self) -> bool:
        """Return True if completions record the tokens that a grammar allowed."""
        return self.generator.records_masks

    # --- requests

    async def exchange(
        self, requests: RequestBatch, cancelled: Sequence[int], wait_s: float, abort: bool = False
    ) -> CompletionBatch:
        """Start new requests, generate until some requests have ended, and return their results.

        Args:
            requests: the new requests.
            cancelled: numbers of earlier requests to cancel.
            wait_s: maximum time to generate if no request ends, in seconds.
            abort: end all running requests first; they return their partial completions.
        """
        if abort:
            self.generator.abort()
        for number in cancelled:
            if (task := self._running.pop(number, None)) is not None:
                task.cancel()
        for request in requests.unpack():
            self._begin(*request)
        if self._running and not self._ended_tasks:
            self._first_done = asyncio.get_running_loop().create_future()
            await asyncio.wait([self._first_done], timeout=wait_s)
        if self._running and self._ended_tasks:
            await asyncio.sleep(GATHER_S)
        else:
            await asyncio.sleep(0)  # let cancelled tasks end
        tasks = self._ended_tasks
        self._ended_tasks = {}
        results = {number: _get_result(task) for number, task in tasks.items()}
        errors = {
            number: result for number, result in results.items() if isinstance(result, Exception)
        }
        return CompletionBatch.from_completions(
            {
                number: result
                for number, result in results.items()
                if isinstance(result, Completion)
            },
            errors,
        )

    def _begin(
        self,
        number: int,
        tokens: NDArray[np.int64],
        sampling: Sampling,
        media: Sequence[PlacedMedium],
    ) -> None:
        task = self._running[number] = asyncio.ensure_future(
            self.generator.generate(tokens, sampling, media)
        )

        def collect_ended(task: asyncio.Task[Completion]) -> None:
            # A cancelled request is no longer in `_running`, and its result is not returned.
            if self._running.pop(number, None) is not None:
                self._ended_tasks[number] = task
                if self._first_done is not None and not self._first_done.done():
                    self._first_done.set_result(None)

        task.add_done_callback(collect_ended)

    async def pause(self) -> None:
        await self.generator.pause()

    async def resume(self) -> None:
        await self.generator.resume()

    # --- weights

    async def call_receiver(self, receiver_index: int, method: str, *arguments: Any) -> Any:
        """Call a method of a weight receiver, and return its result.

        Args:
            receiver_index: index among the receivers of the weight sync.
            method: name of the method, which may be a coroutine.
        """
        if receiver_index not in self._receivers:
            self._receivers[receiver_index] = self._make_receiver(self.generator, receiver_index)
        result = getattr(self._receivers[receiver_index], method)(*arguments)
        return await result if inspect.isawaitable(result) else result

    async def prepare(self, manifest: Mapping[str, Any]) -> None:
        await self.generator.prepare(manifest)

    async def receive(self, shards: Sequence[Shard]) -> None:
        await self.generator.receive(iter(shards))

    async def commit(self, version: int) -> None:
        await self.generator.commit(version)

    async def rollback(self) -> None:
        await self.generator.rollback()

    def weights(self) -> list[Shard]:
        """Return copies of the weights on the CPU; [] if the generator's weights can't be read."""
        return [
            Shard(
                shard.name, shard.shape, shard.offsets, shard.tensor.detach().to("cpu", copy=True)
            )
            for shard in self.generator.weights()
        ]

    # --- the accelerator

    async def onload(self) -> None:
        await self.generator.onload()

    async def offload(self) -> None:
        await self.generator.offload()

    async def close(self) -> None:
        for task in self._running.values():
            task.cancel()
        await self.generator.close()


def _get_result(task: asyncio.Task[Completion]) -> Completion | Exception:
    """Return a task's completion, or its error in a form that can be sent.

    A RatchetError is sent as a copy if it can be copied; any other error becomes a WorkerRaised.
    """
    if task.cancelled():
        return WorkerRaised("the generator cancelled the request")
    error = task.exception()
    if error is None:
        return task.result()
    text = "".join(traceback.format_exception(error))
    if not isinstance(error, RatchetError):
        return WorkerRaised(text)
    try:
        copied_error = copy.copy(error)
    except Exception:  # a custom __reduce__ may raise any type
        return WorkerRaised(text)
    copied_error.add_note(f"raised in the generator's worker:\n{text}")
    return copied_error
