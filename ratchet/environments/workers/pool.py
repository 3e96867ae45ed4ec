"""Place attempts in worker processes, and replace processes that hang or die.

All work is done in the event loop of one thread. So the work needs no locks, and a driver may call
from any event loop, or from several in turn. This thread also starts the processes, because on
Linux they end with the thread that started them.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import threading
import weakref
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from ratchet.environments.workers.process import (
    Assignment,
    EnvironmentProcessLost,
    EnvironmentRaised,
    Worker,
)
from ratchet.protocols import Step
from ratchet.rewards.deadline import RemotePause
from ratchet.types import Message, Task

log = logging.getLogger(__name__)

T = TypeVar("T")
STOP_S = 10.0  # maximum wait for killed processes to end
MAX_QUICK_RESTARTS = 3  # deaths in a row after which the next process still starts at once
MAX_BACKOFF_S = 30.0


class Pool:
    """The worker processes of an environment.

    The processes start with the first attempts, and end with this object or with the driver. In all
    methods, `instance` is the number of an environment instance, which `register` returns.
    """

    def __init__(self, section: Mapping[str, Any], *, processes: int, threads: int) -> None:
        self._instances = itertools.count()
        self._inner = _PoolState(section, processes, threads)
        weakref.finalize(self, self._inner.stop)

    def register(self) -> int:
        """Return the number of a new instance."""
        return next(self._instances)

    async def reset(self, instance: int, task: Task) -> dict[str, Any]:
        """Start an attempt. Return its "messages", "stop_strings" and, if there are any, "tools".

        Raises EnvironmentProcessLost, EnvironmentRaised and DataError.
        """
        with _caller_pause() as pause:
            return await self._inner.run(self._inner.reset(instance, task, pause))

    async def step(self, instance: int, message: Message) -> dict[str, Any]:
        """Take a turn. Return its "step", and the "stop_strings" of the next turn."""
        with _caller_pause() as pause:
            return await self._inner.run(self._inner.step(instance, message, pause))

    async def reward_cut_attempt(self, instance: int, messages: Sequence[Message]) -> float | None:
        """Return the environment's reward of a cut-off attempt, which ends with this call."""
        with _caller_pause() as pause:
            work = self._inner.step(instance, list(messages), pause, "reward_cut_attempt")
            return (await self._inner.run(work))["reward"]

    async def close(self, instance: int) -> None:
        await self._inner.run(self._inner.close(instance))

    def unregister(self, instance: int) -> None:
        """Forget an instance, and close it in the background if it is still open."""
        self._inner.unregister(instance)


class _PoolState:
    """The state of a `Pool`, which is used in the pool's own thread.

    It has no reference to the `Pool`, so that an unused pool is garbage-collected.
    """

    def __init__(self, section: Mapping[str, Any], processes: int, threads: int) -> None:
        self.section = section
        self.processes = processes
        self.threads = threads
        self._workers: list[Worker] = []  # workers that accept attempts
        # Workers that hang or leak. Each is killed after its last attempt.
        self._retired: set[Worker] = set()
        self._assignments: dict[int, Assignment] = {}  # by instance
        self._closing: set[asyncio.Task[None]] = set()
        self._n_deaths = 0  # deaths in a row, without a reply between them
        self._worker_changed = asyncio.Event()
        self._start_lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._driver_pid = os.getpid()

    # --- called from any thread

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        with self._start_lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=_serve, args=(self._loop,), name="environment-workers", daemon=True
                )
                self._thread.start()
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def unregister(self, instance: int) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._unregister, instance)

    def stop(self) -> None:
        """Stop the thread and the processes. A fork of the driver has neither."""
        if self._loop is None or self._thread is None or self._driver_pid != os.getpid():
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        if threading.current_thread() is not self._thread:
            self._thread.join(STOP_S)

    # --- called in the pool's thread

    async def reset(self, instance: int, task: Task, pause: RemotePause) -> dict[str, Any]:
        assignment = await self._assign(instance)
        return await self._play(assignment, "reset", task, pause)

    async def step(
        self, instance: int, argument: Any, pause: RemotePause, operation: str = "step"
    ) -> dict[str, Any]:
        assert instance in self._assignments, f"{operation} before reset"
        return await self._play(self._assignments[instance], operation, argument, pause)

    async def close(self, instance: int) -> None:
        assignment = self._assignments.pop(instance, None)
        if assignment is not None:
            await self._close_instance(assignment)

    def _unregister(self, instance: int) -> None:
        assignment = self._assignments.pop(instance, None)
        if assignment is not None:
            self._close_later(assignment)

    async def _play(
        self, assignment: Assignment, operation: str, argument: Any, pause: RemotePause
    ) -> dict[str, Any]:
        """Run an operation of an attempt. After the attempt's end, check the worker for leaks."""
        is_continuing = False
        try:
            value = await assignment.worker.call(assignment, operation, argument, pause)
            self._n_deaths = 0
            step = value.get("step")
            is_continuing = "reward" not in value and not (isinstance(step, Step) and step.done)
            return value
        finally:
            assignment.is_playing = is_continuing
            if not is_continuing:
                assignment.worker.check_leaks()
            self._kill_if_retired(assignment.worker)

    async def _assign(self, instance: int) -> Assignment:
        """Return the worker thread for the next attempt of an instance.

        The thread is in the process with the fewest attempts, or in a new process if none is idle
        and the limit allows it. The instance keeps its thread, and the objects that it has built in
        this thread, unless another thread has a lower load.
        """
        previous = self._assignments.get(instance)
        if previous is not None:
            previous.is_playing = False
            self._kill_if_retired(previous.worker)
        if wait_s := compute_backoff_s(self._n_deaths):
            await asyncio.sleep(wait_s)
        while True:
            worker = self._get_least_loaded_worker(previous)
            current = previous if previous is not None and previous.worker is worker else None
            loads = [worker.count_load(thread) for thread in range(self.threads)]
            thread = min(
                range(self.threads),
                key=lambda t: (loads[t], current is None or t != current.thread),
            )
            n_cancelled, _ = loads[thread]
            if not n_cancelled:
                break
            self._worker_changed.clear()
            # A cancelled call still runs in each thread. It ends soon, or its process is retired.
            await self._worker_changed.wait()
        if current is not None and current.thread == thread:
            current.is_playing = True
            return current
        if previous is not None:
            self._close_later(previous)
        assignment = self._assignments[instance] = Assignment(worker, thread)
        worker.assignments.add(assignment)
        return assignment

    def _get_least_loaded_worker(self, previous: Assignment | None) -> Worker:
        worker = min(
            self._workers,
            key=lambda w: (w.n_playing, previous is None or w is not previous.worker),
            default=None,
        )
        if worker is None or (worker.n_playing and len(self._workers) < self.processes):
            worker = Worker(self.section, self._on_change)
            self._workers.append(worker)
        return worker

    def _close_later(self, assignment: Assignment) -> None:
        """Close an instance in the background."""
        closing = asyncio.get_running_loop().create_task(
            self._close_instance(assignment, log_errors=True)
        )
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def _close_instance(self, assignment: Assignment, *, log_errors: bool = False) -> None:
        """Close an instance.

        Args:
            log_errors: True to log the environment's exceptions, False to raise them.
        """
        assignment.is_playing = False
        self._kill_if_retired(assignment.worker)
        try:
            await assignment.worker.call(assignment, "close")
        except EnvironmentProcessLost:  # the instance ended with its process
            pass
        except EnvironmentRaised as failure:
            if not log_errors:
                raise
            log.warning("an environment failed to close %s", failure)
        finally:
            assignment.worker.assignments.discard(assignment)

    def _on_change(self, worker: Worker) -> None:
        """Retire a worker that hangs, leaks or has ended. Attempts that wait for a worker retry."""
        if worker.hung_threads or worker.has_leaks or worker.end_reason:
            if worker in self._workers:
                self._n_deaths += bool(worker.end_reason)
                self._workers.remove(worker)
            self._retired.add(worker)
        if worker.end_reason:
            self._retired.discard(worker)
        self._kill_if_retired(worker)
        self._worker_changed.set()

    def _kill_if_retired(self, worker: Worker) -> None:
        if worker in self._retired and not worker.n_playing:
            worker.kill()


@contextlib.contextmanager
def _caller_pause() -> Iterator[RemotePause]:
    """Let a call's worker process pause the caller's deadline until the call has ended."""
    pause = RemotePause()
    try:
        yield pause
    finally:
        pause.apply(False)


def compute_backoff_s(n_deaths: int) -> float:
    """Return the seconds to wait before the next start after `n_deaths` deaths in a row.

    The wait grows exponentially, so that a process that always dies does not load the machine.
    """
    if n_deaths <= MAX_QUICK_RESTARTS:
        return 0.0
    return min(0.1 * 2 ** (n_deaths - MAX_QUICK_RESTARTS), MAX_BACKOFF_S)


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    """Run the loop until it is stopped, then cancel its tasks, which ends the processes."""
    asyncio.set_event_loop(loop)
    loop.run_forever()
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
    loop.close()
