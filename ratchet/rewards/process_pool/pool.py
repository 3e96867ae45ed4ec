"""Worker processes for reward functions that may never end.

Such functions use computer algebra or a user's regular expression. A thread can't be stopped, and
Python's own `re` holds the GIL while it backtracks, so one hostile answer would stall every rollout
of the driver. Here each call has a limit on processor time and memory. A worker that exceeds the
time dies alone and is replaced. The limit is on processor time, so that a loaded machine doesn't
turn right answers into wrong answers.
"""

from __future__ import annotations

import asyncio
import json
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ratchet.errors import RatchetError
from ratchet.observe.exit_status import describe_exit
from ratchet.observe.stall_report import waiting

START_S = 120.0  # limit on the wall time of a worker's imports, on a busy machine
# Calls after which a worker is replaced, because a computer algebra system's caches grow with each.
CALLS_PER_WORKER = 2000
BOOTSTRAP = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]); from "
    "ratchet.rewards.process_pool.worker_main import main; main"
)


class ProcessorTimeExceeded(RatchetError):
    """The call exceeded its limit on processor time."""


class PoolWorkerError(RatchetError):
    """The function raised, or its process did not start or died twice.

    The message holds the traceback or the cause of death.
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
        self.function, self.cpu_s, self.memory_mib = function, cpu_s, memory_mib
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
        request = json.dumps(arguments) + "\n"
        # Try twice, since a worker may be killed from outside.
        for is_last_try in (False, True):
            worker = self._take_worker()
            try:
                with waiting("rewards", self.function, "reward workers", worker.wall_s):
                    reply = worker.request(request)
            except _WorkerDeath as death:
                worker.kill()
                if death.signal_number == signal.SIGPROF:
                    raise ProcessorTimeExceeded(
                        f"{self.function} took more than {self.cpu_s:g} s of processor time"
                    ) from None
                if is_last_try:
                    raise PoolWorkerError(
                        f"the process of {self.function} died ({death})"
                    ) from None
                continue
            self._return_worker(worker)
            if "error" in reply:
                raise PoolWorkerError(f"{self.function} raised:\n{reply['error']}")
            return reply["value"]
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

    signal_number: the signal that killed it; 0 or less if no signal did.
    """

    def __init__(self, reason: str, signal_number: int = 0) -> None:
        super().__init__(reason)
        self.signal_number = signal_number


class _Worker:
    def __init__(self, function: str, cpu_s: float, memory_mib: int) -> None:
        self.n_calls = 0
        # The worker itself limits its processor time. This limit on wall time ends calls that
        # sleep, or that get no processor time for very long.
        self.wall_s = 30.0 + 20.0 * cpu_s
        code = f"{BOOTSTRAP}({function!r}, {cpu_s!r}, {memory_mib!r})"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            # With a fixed hash seed, sets of symbols are iterated in the same order in every run.
            env={"PYTHONHASHSEED": "0"},
            start_new_session=True,  # Ctrl-C is for the driver
        )
        self._buffer = b""
        try:
            self._receive(START_S)
        except _WorkerDeath as death:
            self.kill()
            raise PoolWorkerError(f"the process of {function} did not start ({death})") from None

    def request(self, request: str) -> dict[str, Any]:
        """Send a request and return the reply. Raise _WorkerDeath."""
        assert self.process.stdin is not None
        self.n_calls += 1
        try:
            self.process.stdin.write(request.encode("ascii"))
            self.process.stdin.flush()
        except OSError:
            raise self._wait_for_death() from None
        return json.loads(self._receive(self.wall_s))

    def _receive(self, limit_s: float) -> bytes:
        assert self.process.stdout is not None
        pipe = self.process.stdout.fileno()
        poll = select.poll()
        poll.register(pipe, select.POLLIN)
        end = time.monotonic() + limit_s
        while b"\n" not in self._buffer:
            if not poll.poll(max(0.0, end - time.monotonic()) * 1000):
                raise _WorkerDeath(f"no answer within {limit_s:.0f} s")
            chunk = self.process.stdout.read1(2**16)  # pyright: ignore[reportAttributeAccessIssue]
            if not chunk:
                raise self._wait_for_death()
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _wait_for_death(self) -> _WorkerDeath:
        try:
            code = self.process.wait(5)
        except subprocess.TimeoutExpired:
            return _WorkerDeath("it closed its pipes")
        return _WorkerDeath(describe_exit(code)[0], signal_number=-code)

    def kill(self) -> None:
        self.process.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except OSError:  # closing flushes, which fails if the process is dead
                continue
        self.process.wait()


def _close(idle: list[_Worker]) -> None:
    while idle:
        idle.pop().kill()
