"""A generator pool: several generators in worker processes behind one `Generator`.

A request goes to the worker with the least load, and equal prompts go to the same worker (to share
prefixes). Seeds belong to requests, so a completion does not depend on the worker that draws it. A
lost worker ends the run or is replaced. Its unanswered requests are drawn again with the same
seeds. The replacement serves once it has the weights of the other workers.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ratchet.errors import NoRoomError, RatchetError, WeightSyncError, WorkerError, WorkerRaised
from ratchet.generators.engine.stop_strings import TextDecoder
from ratchet.generators.workers.config import GeneratorWorkersConfig
from ratchet.generators.workers.receivers import PoolReceivers
from ratchet.generators.workers.worker_queue import PendingRequest, WorkerQueue
from ratchet.protocols import Generator, Shard
from ratchet.types import Completion, PlacedMedium, Sampling
from ratchet.utils.thread_pool import finish_in_thread
from ratchet.worker_protocols import Workers

log = logging.getLogger(__name__)

# Maximum duration of an exchange in which no request ends. New requests wait for its end.
EXCHANGE_WAIT_S = 0.05
MAX_SAME_PROMPT = 64  # maximum number of requests with one prompt that are sent to the same worker


class GeneratorPool(Generator):
    """A generator on workers with a `GeneratorRank` each.

    Attributes that the weight sync uses:
        push_lock: is held during a push of weights.
        push_to_some: pushes a version to the given receivers only; None: there is no weight sync.
        on_restart: is called after each restart.
    """

    can_offload = True

    def __init__(
        self,
        config: GeneratorWorkersConfig,
        model: object = None,
        tokenizer: TextDecoder | None = None,
    ) -> None:
        """Create the pool without workers; `start` starts them.

        Args:
            model: Unused, because workers load the policy's model themselves.
            tokenizer: The policy's tokenizer.
        """
        self.tokenizer = tokenizer
        self.precision = config.worker.quantisation
        self.max_restarts = config.max_restarts if config.recovery == "restart" else 0
        self.n_restarts = 0
        self.version = 0
        self.queues = [WorkerQueue(rank) for rank in range(config.workers)]
        self.push_lock = asyncio.Lock()
        self.push_to_some: Callable[[PoolReceivers, int], Awaitable[None]] | None = None
        self.on_restart: Callable[[], object] = lambda: None
        self.final_error: Exception | None = None  # the error that ended the pool
        self.records_routes = self.records_masks = False
        # Machines of the workers. A replacement starts on the same one, while it is there.
        self.hosts: set[str] = set()
        self._start_worker: Callable[[int], Workers] | None = None
        self._numbers = itertools.count()
        # Requests by number that wait until a worker can serve.
        self._unassigned: dict[int, PendingRequest] = {}
        self._recovery: asyncio.Task[None] | None = None
        self._was_pushed = self._paused = self._closed = False

    # --- workers

    def start(self, start_worker: Callable[[int], Workers]) -> None:
        """Start all workers.

        Args:
            start_worker: Starts the worker of a rank, with its component. It is called again to
                replace a lost worker.
        """
        self._start_worker = start_worker
        with ThreadPoolExecutor(len(self.queues)) as threads:
            for queue, process in zip(
                self.queues, threads.map(start_worker, range(len(self.queues))), strict=True
            ):
                queue.process = process
                queue.is_current = True
        self.records_routes, self.records_masks = (
            all(process.call_now(name)[0] for process in self._processes)
            for name in ("records_routes", "records_masks")
        )
        self.hosts = {str(process.call_now("host")[0]) for process in self._processes}

    @property
    def receivers(self) -> PoolReceivers:
        """Return the receivers of weights at all workers."""
        return PoolReceivers(self, self.queues)

    @property
    def present_receivers(self) -> PoolReceivers:
        """Return the receivers of weights at the workers that run."""
        return PoolReceivers(self, [q for q in self.queues if q.process is not None])

    @property
    def _processes(self) -> list[Workers]:
        return [queue.process for queue in self.queues if queue.process is not None]

    async def rebuild(self, *, retries_absent: bool = False) -> bool:
        """Start a new process for each lost worker. Return True if a worker was lost.

        The process starts with the run's first weights, and serves requests after a push. A worker
        for which no machine has room is absent: the others do its work, and it is no longer counted
        as lost. Raise the error that ended the pool, if there is one.

        Args:
            retries_absent: True to look for room for absent workers again.
        """
        queues = [
            q for q in self.queues if q.process is None and (retries_absent or not q.is_absent)
        ]
        is_change = not all(queue.is_absent for queue in queues)
        await asyncio.gather(*(self._replace(queue) for queue in queues))
        if self.final_error is not None:
            raise self.final_error
        return is_change

    async def _replace(self, queue: WorkerQueue) -> None:
        if queue.lost_process is not None:
            await finish_in_thread(queue.lost_process.close)
            queue.lost_process = None
        while self.final_error is None:
            try:
                process = await finish_in_thread(lambda: self._start_process(queue))
                queue.is_absent = False
                if self._paused:
                    await process.call("pause")
            except NoRoomError as error:
                self._mark_absent(queue, error)
            except WorkerError as error:
                queue.process = None
                self._count_loss(error)
                continue
            return

    def _mark_absent(self, queue: WorkerQueue, error: NoRoomError) -> None:
        """Go on without a worker, or end the pool if it was the last."""
        if queue.is_absent:
            return
        queue.is_absent = True
        n_present = sum(not queue.is_absent for queue in self.queues)
        if n_present == 0:
            self._end_pool(error)
            return
        log.warning(
            "%s. Generation goes on with %d of %d workers, and looks for room at each weight sync",
            error,
            n_present,
            len(self.queues),
        )

    def _start_process(self, queue: WorkerQueue) -> Workers:
        """Start a worker's process, where `close` finds it even if the recovery is cancelled."""
        assert self._start_worker is not None, "`start` was not called"
        queue.process = self._start_worker(queue.rank)
        return queue.process

    def _count_loss(self, error: Exception, redrawn_requests: int = 0) -> None:
        """Count the loss of a worker, and end the pool if it exceeds the allowed restarts.

        Args:
            redrawn_requests: Number of requests that are drawn again.
        """
        if self.n_restarts >= self.max_restarts:
            self._end_pool(error)
            return
        self.n_restarts += 1
        log.warning(
            "generator restart %d of at most %d, %d requests are drawn again: %s",
            self.n_restarts,
            self.max_restarts,
            redrawn_requests,
            error,
        )
        self.on_restart()

    def _end_pool(self, error: Exception) -> None:
        if self.final_error is None:
            self.final_error = error
        for request in self._list_outstanding():
            request.deliver(self.final_error)
        self._unassigned.clear()

    def _list_outstanding(self) -> list[PendingRequest]:
        queued = [
            request
            for queue in self.queues
            for request in (*queue.sent.values(), *queue.waiting.values())
        ]
        return [*queued, *self._unassigned.values()]

    def mark_lost(self, queue: WorkerQueue, process: Workers, error: Exception) -> None:
        """Mark a worker as lost; later reports of the same loss are ignored."""
        if queue.process is not process or self._closed:
            return
        unanswered = queue.mark_lost()
        for request in unanswered:
            if request.is_aborted:
                request.deliver_aborted()
        redrawn = [request for request in unanswered if not request.future.done()]
        self._unassigned.update((request.number, request) for request in redrawn)
        self._count_loss(error, len(redrawn))
        self._assign_all()

    def _start_recovery(self) -> None:
        if self._recovery is None or self._recovery.done():
            self._recovery = asyncio.get_running_loop().create_task(self._recover())

    async def _recover(self) -> None:
        """Replace lost workers and push the current weights to them while requests wait.

        The learner waits for these requests, so the version does not change meanwhile. If no
        request waits any more, replacements get their weights by the learner's next push.
        """
        try:
            async with self.push_lock:
                while await self.rebuild() or self._stale_queues:
                    if not self._stale_queues or not self._list_outstanding():
                        return
                    await self._update_weights(self._stale_queues)
        except Exception as error:
            self._end_pool(error)

    @property
    def _stale_queues(self) -> list[WorkerQueue]:
        return [
            queue for queue in self.queues if queue.process is not None and not queue.is_current
        ]

    async def _update_weights(self, queues: Sequence[WorkerQueue]) -> None:
        if not self._was_pushed:  # all workers still have the weights that they started with
            self.mark_current(queues)
            return
        if self.push_to_some is None:
            raise WeightSyncError(
                f"version {self.version} can't be pushed to a restarted worker: there is no weight "
                "sync"
            )
        try:
            await self.push_to_some(PoolReceivers(self, queues), self.version)
        except WeightSyncError:
            # If no worker was lost during the push, the weight sync itself failed.
            if all(queue.process is not None for queue in queues):
                raise

    def mark_current(self, queues: Sequence[WorkerQueue], version: int | None = None) -> None:
        """Mark workers as having the current weights, so that they serve.

        Args:
            version: The version that was pushed to them; None: no push was needed.
        """
        if version is not None:
            self.version = version
            self._was_pushed = True
        for queue in queues:
            queue.is_current = True
        self._assign_all()

    # --- requests

    async def generate(
        self,
        tokens: Sequence[int] | NDArray[np.int64],
        sampling: Sampling,
        media: Sequence[PlacedMedium] = (),
    ) -> Completion:
        """Return the completion of a prompt.

        Raises the errors of the workers' generators, or WorkerError if a worker is lost and not
        replaced.
        """
        assert self._start_worker is not None, (
            "generator.kind=workers starts with the run's other processes: call `start` first"
        )
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        request = PendingRequest(
            next(self._numbers), np.array(tokens, dtype=np.int64), sampling, future, tuple(media)
        )
        self._assign(request)
        try:
            return await future
        except asyncio.CancelledError:
            if self._unassigned.pop(request.number, None) is None:
                # `any` stops at the queue that had the request.
                any(queue.cancel(request) for queue in self.queues)
            raise

    def _assign(self, request: PendingRequest) -> None:
        if self.final_error is not None:
            request.deliver(self.final_error)
            return
        serving_queues = [queue for queue in self.queues if queue.is_current]
        if len(serving_queues) < sum(not queue.is_absent for queue in self.queues):
            self._start_recovery()
        if not serving_queues:
            self._unassigned[request.number] = request
            return
        queues_with_prompt = (
            queue
            for queue in serving_queues
            if 0 < queue.request_count_by_prompt[request.key] < MAX_SAME_PROMPT
        )
        queue = next(queues_with_prompt, None) or min(serving_queues, key=lambda queue: queue.load)
        queue.add(request)
        self._start_exchanges(queue)

    def _assign_all(self) -> None:
        unassigned, self._unassigned = self._unassigned, {}
        for request in unassigned.values():
            self._assign(request)

    def _start_exchanges(self, queue: WorkerQueue) -> None:
        loop = asyncio.get_running_loop()
        if (
            queue.exchange_task is None
            or queue.exchange_task.done()
            or queue.exchange_task.get_loop() is not loop
        ):
            queue.exchange_task = loop.create_task(self._run_exchanges(queue))

    async def _run_exchanges(self, queue: WorkerQueue) -> None:
        """Exchange requests and completions with a worker while its queue is busy."""
        process = queue.process
        assert process is not None, "requests go to serving workers only"
        # Let concurrent callers join the first batch, so that equal prompts are computed once.
        await asyncio.sleep(0)
        while queue.busy and queue.process is process:
            requests, cancelled, abort = queue.take_batch()
            try:
                (results,) = await process.call(
                    "exchange", requests, cancelled, EXCHANGE_WAIT_S, abort
                )
            # Any error means that the sent requests get no answer.
            except Exception as error:
                self.mark_lost(queue, process, error)
                return
            for number, answer in (*results.unpack(), *results.errors.items()):
                if isinstance(answer, Exception) and not _is_request_error(answer):
                    self.mark_lost(queue, process, answer)
                    return
                if (request := queue.pop_sent(number)) is not None:
                    request.deliver(answer)
            # Let callers that continue with these completions join the next exchange.
            await asyncio.sleep(0)

    # --- control

    def abort(self) -> None:
        """End all requests; they return their partial completions."""
        for queue in self.queues:
            queue.abort()
        for request in self._unassigned.values():
            request.deliver_aborted()
        self._unassigned.clear()

    async def pause(self) -> None:
        self._paused = True
        await self._call_running("pause")

    async def resume(self) -> None:
        self._paused = False
        await self._call_running("resume")

    async def onload(self) -> None:
        await self._call_running("onload")

    async def offload(self) -> None:
        await self._call_running("offload")

    async def _call_running(self, method: str) -> None:
        """Call a method of all running workers.

        The loss of a worker raises an error only if it ended the pool. Otherwise the worker is
        replaced when a request needs it.
        """
        present = self.present_receivers.queues
        results = await asyncio.gather(
            *(self.call_worker(queue, method) for queue in present), return_exceptions=True
        )
        for result in results:
            if isinstance(result, BaseException) and (
                self.final_error is not None or not isinstance(result, WorkerError)
            ):
                raise result

    async def call_worker(
        self, queue: WorkerQueue, method: str, *arguments: Any, timeout_s: float | None = None
    ) -> Any:
        """Call a method of one worker's component.

        Raises the component's errors, or WorkerError if the worker is lost.

        Args:
            timeout_s: Time limit of the call; None: the workers' default.
        """
        if (process := queue.process) is None:
            raise self.final_error or WorkerError(f"generator rank {queue.rank} was lost")
        try:
            (answer,) = await (process if timeout_s is None else process.within(timeout_s)).call(
                method, *arguments
            )
        except WorkerRaised:
            raise
        except WorkerError as error:
            self.mark_lost(queue, process, error)
            raise
        return answer

    async def call_each(
        self,
        method: str,
        arguments_by_worker: Sequence[Sequence[Any]],
        *,
        timeout_s: float | None = None,
    ) -> list[Any]:
        """Call a method of every worker, with separate arguments for each.

        Raises the first error while other workers may still be running: see `give_up`.
        """
        pairs = zip(self.queues, arguments_by_worker, strict=True)
        return await asyncio.gather(
            *(
                self.call_worker(queue, method, *arguments, timeout_s=timeout_s)
                for queue, arguments in pairs
            )
        )

    def give_up(self, error: Exception) -> None:
        """Mark all workers as lost, so that every caller fails at once instead of waiting."""
        for queue in self.queues:
            if queue.process is not None:
                self.mark_lost(queue, queue.process, error)

    @property
    def size(self) -> int:
        """Return the number of workers."""
        return len(self.queues)

    # --- weights that pass through this process

    async def prepare(self, manifest: Mapping[str, Any]) -> None:
        await self._call_all("prepare", manifest)

    async def receive(self, shards: Iterator[Shard]) -> None:
        await self._call_all("receive", list(shards))

    async def commit(self, version: int) -> None:
        await self._call_all("commit", version)
        self.mark_current(self.queues, version)

    async def rollback(self) -> None:
        await self._call_all("rollback")

    async def _call_all(self, method: str, *arguments: Any) -> None:
        await asyncio.gather(
            *(self.call_worker(q, method, *arguments) for q in self.queues if not q.is_absent)
        )

    def weights(self) -> Iterator[Shard]:
        """Yield the first worker's weights; nothing if its generator does not expose them."""
        for process in self._processes[:1]:
            yield from process.call_now("weights")[0]

    async def close(self) -> None:
        """End the workers. Callers that still wait for a completion are cancelled."""
        self._closed = True
        for task in (self._recovery, *(queue.exchange_task for queue in self.queues)):
            if task is not None:
                task.cancel()
        for request in self._list_outstanding():
            request.future.cancel()
        if self._recovery is not None and not self._recovery.done():
            # A process that is being closed or started now must be known below.
            await asyncio.wait([self._recovery])
        lost_processes = [queue.lost_process for queue in self.queues if queue.lost_process]
        processes = [*self._processes, *lost_processes]
        await asyncio.gather(*(asyncio.to_thread(process.close) for process in processes))


def _is_request_error(error: Exception) -> bool:
    """True if the error concerns only the request, so that the generator still works."""
    return isinstance(error, RatchetError) and not isinstance(error, WorkerError)
