"""Place attempts in worker processes, and replace processes that hang or die.

All work is done in the event loop of one thread, so it needs no locks, and a driver may call from
any event loop, or from several in turn. That thread also starts the processes, because on Linux
they end with the thread that started them.
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
STOP_S = 10.0  # longest wait for killed processes to end
BORNE = 3  # deaths in a row up to which the next process starts at once
MOST_REST_S = 30.0


class Pool:
    """The worker processes of an environment.

    They start with the first attempts, and end with this object or with the driver. `instance` is
    the number of an environment instance, as `join` returns it.
    """

    def __init__(self, section: Mapping[str, Any], *, processes: int, threads: int) -> None:
        self._players = itertools.count()
        self._inner = _Pool(section, processes, threads)
        weakref.finalize(self, self._inner.stop)

    def join(self) -> int:
        """Return the number of a new instance."""
        return next(self._players)

    async def reset(self, instance: int, task: Task) -> dict[str, Any]:
        """Start an attempt. Return its "messages", "tools" and "stops" (stop strings).

        The last two are missing if the environment has none. Raises Lost, Raised, DataError.
        """
        return await self._inner.run(self._inner.reset(instance, task))

    async def step(self, instance: int, message: Message) -> dict[str, Any]:
        """Take a turn. Return its "step", and "stops" as `reset` does."""
        return await self._inner.run(self._inner.step(instance, message))

    async def close(self, instance: int) -> None:
        await self._inner.run(self._inner.close(instance))

    def leave(self, instance: int) -> None:
        """Forget an instance, and close it in the background if it is still open."""
        self._inner.leave(instance)


class _Pool:
    def __init__(self, section: Mapping[str, Any], processes: int, threads: int) -> None:
        self.section, self.processes, self.threads = section, processes, threads
        self._workers: list[Worker] = []  # workers that accept attempts
        self._retired: set[Worker] = set()  # hang or leak; killed after their last attempt
        self._seats: dict[int, Seat] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._deaths = 0  # deaths in a row, without an answer between them
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
        """Stop the thread and the processes; do nothing in a fork of the driver, without either."""
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
        """Return the seat for the next attempt of an instance.

        It is in the process with the fewest attempts, or in a new one if none is idle and the limit
        allows it. The instance keeps its seat, and what it has built there, if no other is better.
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
            # A cancelled call runs in each thread. It ends soon, or its process is given up.
            await self._turn.wait()
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
        """Close a seat's instance in the background."""
        closing = asyncio.get_running_loop().create_task(self._closed(seat, quietly=True))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def _closed(self, seat: Seat, *, quietly: bool = False) -> None:
        seat.playing = False
        self._tidy(seat.worker)
        try:
            await seat.worker.call(seat, "close")
        except Lost:  # the instance ended with its process
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
    """Return the seconds to wait before the next start after `deaths` deaths in a row.

    Each start takes the machine's time.
    """
    return 0.0 if deaths <= BORNE else min(0.1 * 2 ** (deaths - BORNE), MOST_REST_S)


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    """Run the loop until it is stopped, then cancel its tasks, which ends the processes."""
    asyncio.set_event_loop(loop)
    loop.run_forever()
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
    loop.close()
