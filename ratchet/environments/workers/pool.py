"""Worker processes that play attempts: placement, and recovery from a process that hangs or dies.

Everything happens in the event loop of one thread, so there is nothing to lock, and a driver may
call from any loop, or from one after another. That thread also starts the processes: on Linux they
end with the thread that started them.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import threading
import weakref
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

from ratchet.environments.workers.process import Lost, Raised, Seat, Worker
from ratchet.protocols import Step
from ratchet.types import Message, Task

log = logging.getLogger(__name__)

T = TypeVar("T")
STOP_S = 10.0  # for processes that were killed to be gone
BORNE = 3  # deaths in a row that are made up for at once
MOST_REST_S = 30.0


class Pool:
    """The pool of an environment. Processes start with the first attempts, and end with this object
    or with the driver. `instance`: the number of an instance."""

    def __init__(self, section: Mapping[str, Any], *, processes: int, threads: int) -> None:
        self._players = itertools.count()
        self._inner = _Pool(section, processes, threads)
        weakref.finalize(self, self._inner.stop)

    def join(self) -> int:
        """The number of one more instance."""
        return next(self._players)

    async def reset(self, instance: int, task: Task) -> dict[str, Any]:
        """Return the messages of the worker's instance ("messages"), and what it offers then
        ("tools", "stops"). Raises Lost, Raised, DataError."""
        return await self._inner.run(self._inner.reset(instance, task))

    async def step(self, instance: int, message: Message) -> dict[str, Any]:
        """Its "step", and "stops"."""
        return await self._inner.run(self._inner.step(instance, message))

    async def close(self, instance: int) -> None:
        await self._inner.run(self._inner.close(instance))

    def leave(self, instance: int) -> None:
        """The instance is gone, closed or not."""
        self._inner.leave(instance)


class _Pool:
    def __init__(self, section: Mapping[str, Any], processes: int, threads: int) -> None:
        self.section, self.processes, self.threads = section, processes, threads
        self._workers: list[Worker] = []  # that take attempts
        self._retired: set[Worker] = set()  # that hang, and end with their last attempt
        self._seats: dict[int, Seat] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._deaths = 0  # in a row, without an answer between them
        self._turn = asyncio.Event()
        self._starting = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._process = os.getpid()

    # --- from any thread

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        with self._starting:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=_serve, args=(self._loop,), name="environment-workers", daemon=True
                )
                self._thread.start()
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def leave(self, instance: int) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._leave, instance)

    def stop(self) -> None:
        """A fork of the driver has the object, and not the processes."""
        if self._loop is None or self._thread is None or self._process != os.getpid():
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        if threading.current_thread() is not self._thread:
            self._thread.join(STOP_S)

    # --- in the thread

    async def reset(self, instance: int, task: Task) -> dict[str, Any]:
        seat = await self._seated(instance)
        return await self._played(seat, "reset", task)

    async def step(self, instance: int, message: Message) -> dict[str, Any]:
        assert instance in self._seats, "step before reset"
        return await self._played(self._seats[instance], "step", message)

    async def close(self, instance: int) -> None:
        seat = self._seats.pop(instance, None)
        if seat is not None:
            await self._closed(seat)

    def _leave(self, instance: int) -> None:
        seat = self._seats.pop(instance, None)
        if seat is not None:
            self._close_later(seat)

    async def _played(self, seat: Seat, op: str, given: Any) -> dict[str, Any]:
        goes_on = False
        try:
            value = await seat.worker.call(seat, op, given)
            self._deaths = 0
            step = value.get("step")
            goes_on = not (isinstance(step, Step) and step.done)
            return value
        finally:
            seat.playing = goes_on
            if not goes_on:
                seat.worker.look()
            self._tidy(seat.worker)

    async def _seated(self, instance: int) -> Seat:
        """Return the process with the fewest attempts: a new one, if there may be one more and none
        is idle.

        An instance stays where it is, with what it has built there, if that place is as good as
        any.
        """
        own = self._seats.get(instance)
        if own is not None:
            own.playing = False
            self._tidy(own.worker)
        if rest := rest_s(self._deaths):
            await asyncio.sleep(rest)
        while True:
            worker = self._emptiest(own)
            present = own if own is not None and own.worker is worker else None
            loads = [worker.load(thread) for thread in range(self.threads)]
            thread = min(
                range(self.threads),
                key=lambda t: (loads[t], present is None or t != present.thread),
            )
            stuck, _ = loads[thread]
            if not stuck:
                break
            self._turn.clear()
            await self._turn.wait()  # a cancelled call ends soon, or its process is given up
        if present is not None and present.thread == thread:
            present.playing = True
            return present
        if own is not None:
            self._close_later(own)
        seat = self._seats[instance] = Seat(worker, thread)
        worker.seats.add(seat)
        return seat

    def _emptiest(self, own: Seat | None) -> Worker:
        started = min(
            self._workers,
            key=lambda w: (w.playing, own is None or w is not own.worker),
            default=None,
        )
        if started is None or (started.playing and len(self._workers) < self.processes):
            started = Worker(self.section, self._changed)
            self._workers.append(started)
        return started

    def _close_later(self, seat: Seat) -> None:
        """Close in the background."""
        closing = asyncio.get_running_loop().create_task(self._closed(seat, quietly=True))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def _closed(self, seat: Seat, *, quietly: bool = False) -> None:
        seat.playing = False
        self._tidy(seat.worker)
        try:
            await seat.worker.call(seat, "close")
        except Lost:  # what it held is gone with its process
            pass
        except Raised as failure:
            if not quietly:
                raise
            log.warning("an environment failed to close %s", failure)
        finally:
            seat.worker.seats.discard(seat)

    def _changed(self, worker: Worker) -> None:
        if worker.hung or worker.leaks or worker.ended:
            if worker in self._workers:
                self._deaths += bool(worker.ended)
                self._workers.remove(worker)
            self._retired.add(worker)
        if worker.ended:
            self._retired.discard(worker)
        self._tidy(worker)
        self._turn.set()

    def _tidy(self, worker: Worker) -> None:
        if worker in self._retired and not worker.playing:
            worker.kill()


def rest_s(deaths: int) -> float:
    """Return the seconds to wait before another process is started after `deaths` deaths in a row,
    since each start takes the machine's time."""
    return 0.0 if deaths <= BORNE else min(0.1 * 2 ** (deaths - BORNE), MOST_REST_S)


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    """Until it is stopped; its processes end with their tasks."""
    asyncio.set_event_loop(loop)
    loop.run_forever()
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
    loop.close()
