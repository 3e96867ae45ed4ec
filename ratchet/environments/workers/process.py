"""Start a worker process from the driver, send it calls, and watch for its end."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import psutil

from ratchet.data.codec import from_plain
from ratchet.environments.workers.protocol import pack
from ratchet.errors import RatchetError
from ratchet.executors.env_vars import inherit_environment
from ratchet.processes.exit_status import describe_exit
from ratchet.processes.frames import Frame, FrameKind, Parcel, encode_frame, receive_async
from ratchet.processes.spawn import SpawnedProcess
from ratchet.rewards.deadline import RemotePause
from ratchet.utils import credentials

log = logging.getLogger(__name__)

START_S = 120.0  # time limit of a start, enough for imports and data on a busy machine
# Threads or file descriptors that attempts may leave open before their process is replaced.
MAX_LEAKED = 256
# Time limit for a cancelled call to end. It can end only at its next `await`. A call that does not
# end in time is considered hung.
CANCEL_S = 1.0


class EnvironmentProcessLost(RatchetError):
    """The worker process of an attempt died, or was retired because it hangs."""


class EnvironmentRaised(RatchetError):
    """The environment raised an exception in its process. The message has the traceback."""


@dataclass(eq=False)
class Assignment:
    """The thread of a worker to which one environment instance is assigned."""

    worker: Worker
    thread: int
    number: int = field(default_factory=itertools.count().__next__)
    """A unique number, by which the worker identifies the instance."""
    is_playing: bool = True
    """True while an attempt is running."""


@dataclass(eq=False)
class _Call:
    """A call that the process has not answered yet."""

    assignment: Assignment
    answer: asyncio.Future[Any]
    pause: RemotePause | None


class Worker:
    """A worker process, for use in one event loop.

    Args:
        on_change: Called when the process hangs, leaks or has ended, and when a cancelled call has
            ended.
    """

    def __init__(self, section: Mapping[str, Any], on_change: Callable[[Worker], None]) -> None:
        self.assignments: set[Assignment] = set()
        self.end_reason = ""  # why the process ended; "" while it runs
        self.hung_threads: set[int] = set()  # threads whose cancelled call did not end in time
        self.has_leaks = False  # True if finished attempts left too much open, see MAX_LEAKED
        # Numbers of threads and file descriptors after the first attempt.
        self._first_open_counts: dict[str, int] | None = None
        self._on_change = on_change
        self._calls: dict[int, _Call] = {}
        self._call_numbers = itertools.count(1)
        self.process = SpawnedProcess(
            "ratchet.environments.workers.worker_main:serve",
            # There are many workers, so numerical libraries must not start a thread per core.
            environment=inherit_environment(OMP_NUM_THREADS="1"),
        )
        self.ready = asyncio.get_running_loop().create_future()
        # Read the exception even if no caller awaits it, because asyncio would log it otherwise.
        self.ready.add_done_callback(lambda ready: ready.cancelled() or ready.exception())
        self._writer: asyncio.StreamWriter | None = None
        self._serving = asyncio.create_task(self._serve(section))

    @property
    def n_playing(self) -> int:
        return sum(assignment.is_playing for assignment in self.assignments)

    def count_load(self, thread: int) -> tuple[int, int]:
        """Return how many cancelled calls of a thread still run, and how many attempts it plays."""
        n_cancelled = sum(
            call.assignment.thread == thread
            for call in self._calls.values()
            if call.answer.cancelled()
        )
        n_playing = sum(
            assignment.is_playing for assignment in self.assignments if assignment.thread == thread
        )
        return n_cancelled, n_playing

    async def call(
        self,
        assignment: Assignment,
        operation: str,
        argument: Any = None,
        pause: RemotePause | None = None,
    ) -> Any:
        """Run an operation in the process and return its result.

        With `pause`, the process can pause the attempt's deadline while it runs a judged program.
        Cancelling this call cancels the operation. Raises EnvironmentProcessLost and
        EnvironmentRaised, and DataError for values that can't be sent.
        """
        request = pack(
            {
                "op": operation,
                "thread": assignment.thread,
                "instance": assignment.number,
                "argument": argument,
                "limit_s": pause and pause.seconds,
            }
        )
        await asyncio.shield(self.ready)
        if self.end_reason or assignment.thread in self.hung_threads:
            raise self._make_lost_error(assignment)
        number = next(self._call_numbers)
        answer = asyncio.get_running_loop().create_future()
        self._send(FrameKind.CALL, number, request)
        self._calls[number] = _Call(assignment, answer, pause)
        try:
            return await answer
        except asyncio.CancelledError:
            self._send(FrameKind.CANCEL, number, pack({"thread": assignment.thread}))
            asyncio.get_running_loop().call_later(CANCEL_S, self._check_cancelled, number)
            raise

    def check_leaks(self) -> None:
        """Compare the threads and open files with those after the first attempt."""
        open_counts = _count_open(self.process.pid)
        self._first_open_counts = first_counts = self._first_open_counts or open_counts
        leaked = {
            name: count - first_counts.get(name, count) for name, count in open_counts.items()
        }
        if not self.has_leaks and max(leaked.values(), default=0) > MAX_LEAKED:
            self.has_leaks = True
            log.warning(
                "worker process %d is replaced: since its first attempt it has %s",
                self.process.pid,
                ", ".join(f"{count} more {name}" for name, count in leaked.items()),
            )
            self._on_change(self)

    def kill(self) -> None:
        """Kill the process and its process group, with all that environments started."""
        self.process.kill()

    def _make_lost_error(self, assignment: Assignment) -> EnvironmentProcessLost:
        if self.end_reason:
            return EnvironmentProcessLost(self.end_reason)
        reason = f"another call, which was cancelled, hangs in its thread {assignment.thread}"
        return EnvironmentProcessLost(f"worker process {self.process.pid} is given up: {reason}")

    def _check_cancelled(self, number: int) -> None:
        """Mark a thread as hung if a cancelled call has not ended, and fail its other calls."""
        if self.end_reason or number not in self._calls:
            return
        thread = self._calls[number].assignment.thread
        self.hung_threads.add(thread)
        for call in self._calls.values():
            if call.assignment.thread == thread and not call.answer.done():
                call.answer.set_exception(self._make_lost_error(call.assignment))
        self._on_change(self)

    def _send(self, kind: FrameKind, number: int, parcel: Parcel) -> None:
        assert self._writer is not None, "a call to a process that is not ready"
        # A lost connection fails the calls where replies are read. Here some versions of Python
        # (3.12.1 among them) would raise TypeError for it.
        if not self._writer.transport.is_closing():
            self._writer.writelines(encode_frame(kind, number, parcel))

    # --- messages from the process

    async def _serve(self, section: Mapping[str, Any]) -> None:
        """Start the environment in the process, and handle its replies until it ends."""
        reason = ""
        try:
            reader, self._writer = await asyncio.open_connection(
                sock=self.process.connection.socket
            )
            setup = {"section": section, "credentials": credentials.get_environment()}
            self._send(FrameKind.CALL, 0, pack(setup))
            async with asyncio.timeout(START_S):
                greeting = await receive_async(reader)
            if greeting.kind is FrameKind.RAISED:
                error = greeting.parcel.load_json()
                reason = f"the environment could not be created in a worker process:\n{error}"
                return
            self.ready.set_result(None)
            while (reply := await receive_async(reader)).number:
                self._handle_reply(reply)
            reason = f"worker process {self.process.pid} failed:\n{reply.parcel.load_json()}"
        except TimeoutError:
            reason = f"worker process {self.process.pid} was not ready after {START_S:g} s"
        except (asyncio.IncompleteReadError, OSError):
            pass  # the process ended
        finally:
            self.kill()
            if self._writer is not None:
                self._writer.close()
            await self._wait_for_end(reason)

    def _handle_reply(self, reply: Frame) -> None:
        value = reply.parcel.load_json()
        if reply.kind is FrameKind.PAUSE:
            call = self._calls[reply.number]
            if call.pause is not None and not call.answer.done():
                call.pause.set(value)
            return
        call = self._calls.pop(reply.number)
        if call.answer.cancelled():
            self._on_change(self)
        elif not call.answer.done():
            if reply.kind is FrameKind.RAISED:
                call.answer.set_exception(
                    EnvironmentRaised(f"in worker process {self.process.pid}:\n{value}")
                )
            else:
                call.answer.set_result(from_plain(value))

    async def _wait_for_end(self, reason: str) -> None:
        """Wait until the process has ended, and fail all open calls.

        Args:
            reason: The reason of the end; "" if the process died by itself.
        """
        # The process was killed, or closed its socket while dying.
        while (status := self.process.poll()) is None:
            await asyncio.sleep(0.002)
        self.end_reason = (
            reason or f"worker process {self.process.pid} died ({describe_exit(status)[0]})"
        )
        if not self.ready.done():
            self.ready.set_exception(EnvironmentProcessLost(self.end_reason))
        for call in self._calls.values():
            if not call.answer.done():
                call.answer.set_exception(EnvironmentProcessLost(self.end_reason))
        self._on_change(self)


def _count_open(pid: int) -> dict[str, int]:
    """Return the numbers of a process's threads and file descriptors; {} if they are unknown."""
    try:
        process = psutil.Process(pid)
        return {"threads": process.num_threads(), "file descriptors": process.num_fds()}
    except psutil.Error:
        return {}
