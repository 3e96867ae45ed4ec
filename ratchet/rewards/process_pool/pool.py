"""Worker processes for reward functions that may never end.

Such functions use computer algebra or a user's regular expression. A thread can't be stopped, and
Python's own `re` holds the GIL while it backtracks, so one hostile answer would stall every rollout
of the driver. Here each call has a limit on processor time and memory. Only the worker that exceeds
the time dies, and it is replaced. The limit is on processor time, so that a loaded machine doesn't
turn right answers into wrong answers.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ratchet.errors import RatchetError
from ratchet.observe.stall_report import waiting
from ratchet.processes.exit_status import describe_exit
from ratchet.processes.frames import Frame, FrameKind, Parcel, PeerGone, dump_json
from ratchet.processes.spawn import SpawnedProcess

START_S = 120.0  # limit on the wall time of a worker's imports, on a busy machine
# Calls after which a worker is replaced, because a computer algebra system's caches grow with each.
CALLS_PER_WORKER = 2000


class ProcessorTimeExceeded(RatchetError):
    """The call exceeded its limit on processor time."""


class PoolWorkerError(RatchetError):
    """The function raised an exception, or its process did not start or died twice.

    The message has the traceback or the cause of death.
    """


class RewardWorkers:
    """A pool of worker processes that call one function. A worker starts when it is needed.

    The workers inherit no environment variables, and end when this object or this process ends.

    Args:
        function: "module:name" of a function with JSON arguments and a JSON result.
        cpu_s: Limit on the processor time of a call.
        memory_mib: Limit on the memory of a worker.
        size: Maximum number of workers.
    """

    def __init__(
        self, function: str, *, cpu_s: float, memory_mib: int = 2048, size: int = 2
    ) -> None:
        self.function = function
        self.cpu_s = cpu_s
        self.memory_mib = memory_mib
        self._threads = ThreadPoolExecutor(size, thread_name_prefix="reward-worker")
        self._idle: list[_Worker] = []
        self._lock = threading.Lock()
        weakref.finalize(self, _close, self._idle)

    async def call(self, *arguments: Any) -> Any:
        """Return the function's result. Raise ProcessorTimeExceeded or PoolWorkerError."""
        return await asyncio.get_running_loop().run_in_executor(
            self._threads, self._call, arguments
        )

    def _call(self, arguments: tuple[Any, ...]) -> Any:
        request = dump_json(arguments)
        # Try twice, since a worker may be killed from outside.
        for is_last_try in (False, True):
            worker = self._take_worker()
            try:
                with waiting("rewards", self.function, "reward workers", worker.wall_s):
                    reply = worker.request(request)
            except _WorkerDeath as death:
                worker.kill()
                if death.status == -signal.SIGPROF:
                    raise ProcessorTimeExceeded(
                        f"{self.function} took more than {self.cpu_s:g} s of processor time"
                    ) from None
                if is_last_try:
                    raise PoolWorkerError(
                        f"the process of {self.function} died ({death})"
                    ) from None
                continue
            self._return_worker(worker)
            value = reply.parcel.load_json()
            if reply.kind is FrameKind.RAISED:
                raise PoolWorkerError(f"{self.function} raised:\n{value}")
            return value
        raise AssertionError("unreachable")

    def _take_worker(self) -> _Worker:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return _Worker(self.function, self.cpu_s, self.memory_mib)

    def _return_worker(self, worker: _Worker) -> None:
        if worker.n_calls >= CALLS_PER_WORKER:
            worker.kill()
            return
        with self._lock:
            self._idle.append(worker)


class _WorkerDeath(Exception):
    """The worker died or gave no answer in time.

    Attributes:
        status: The worker's exit status, as in `subprocess`; None if it gave no answer.
    """

    def __init__(self, reason: str, status: int | None = None) -> None:
        super().__init__(reason)
        self.status = status


class _Worker:
    def __init__(self, function: str, cpu_s: float, memory_mib: int) -> None:
        self.n_calls = 0
        # The worker itself limits its processor time. This limit on wall time ends calls that
        # sleep, or that get no processor time for very long.
        self.wall_s = 30.0 + 20.0 * cpu_s
        self.process = SpawnedProcess(
            "ratchet.rewards.process_pool.worker_main:serve",
            (function, cpu_s, memory_mib),
            # With a fixed hash seed, sets of symbols are iterated in the same order in every run.
            environment={"PYTHONHASHSEED": "0"},
            stderr=subprocess.DEVNULL,
        )
        try:
            self._exchange(None, START_S)
        except _WorkerDeath as death:
            self.kill()
            raise PoolWorkerError(f"the process of {function} did not start: {death}") from None

    def request(self, request: Parcel) -> Frame:
        """Send a request and return the reply. Raise _WorkerDeath."""
        self.n_calls += 1
        return self._exchange(request, self.wall_s)

    def _exchange(self, request: Parcel | None, limit_s: float) -> Frame:
        """Send the request, if there is one, and return the next frame. Raise _WorkerDeath."""
        connection = self.process.connection
        connection.socket.settimeout(limit_s)
        try:
            if request is not None:
                connection.send(FrameKind.CALL, self.n_calls, request)
            frame = connection.receive()
        except TimeoutError:
            raise _WorkerDeath(f"no answer within {limit_s:.0f} s") from None
        except (PeerGone, OSError):
            status = self.process.end()
            raise _WorkerDeath(describe_exit(status)[0], status) from None
        if frame.kind is FrameKind.RAISED and not frame.number:
            raise _WorkerDeath(frame.parcel.load_json())
        return frame

    def kill(self) -> None:
        self.process.end()
        self.process.connection.socket.close()


def _close(idle: list[_Worker]) -> None:
    while idle:
        idle.pop().kill()
