"""Start a worker process from the driver, send it calls, and watch for its end."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ratchet.environments.workers.protocol import HEAD, frame, packed, unpacked
from ratchet.errors import RatchetError
from ratchet.observe.exit_status import describe_exit
from ratchet.utils import credentials

log = logging.getLogger(__name__)

START_S = 120.0  # for imports and data, on a busy machine
# Threads, or file descriptors, that attempts may leave open before their process is replaced.
MOST_LEFT = 256
# Time for a cancelled call to end. A call that awaits ends at once, one that computes when it next
# awaits.
GRACE_S = 1.0
BOOTSTRAP = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]); "
    "from ratchet.environments.workers.worker_main import main; main(int(sys.argv[2]), "
    "int(sys.argv[3]))"
)


class Lost(RatchetError):
    """The process of an attempt died, or was given up."""


class Raised(RatchetError):
    """The environment raised in its process; the message holds the traceback."""


@dataclass(eq=False)
class Seat:
    """The thread of a worker in which one environment instance plays its attempts.

    playing: True while an attempt is running.
    """

    worker: Worker
    thread: int
    number: int = field(default_factory=itertools.count().__next__)
    playing: bool = True


@dataclass(eq=False)
class _Call:
    seat: Seat
    answer: asyncio.Future[Any]


class Worker:
    """A worker process, to be used in one event loop.

    changed: called when the process hangs, leaks or has ended, and when a cancelled call has ended.
    """

    def __init__(self, section: Mapping[str, Any], changed: Callable[[Worker], None]) -> None:
        self.seats: set[Seat] = set()
        self.ended = ""  # how the process ended
        self.hung: set[int] = set()  # threads in which a cancelled call did not end in time
        self.leaks = False  # True if finished attempts have left more than MOST_LEFT open
        self._at_first: dict[str, int] | None = None
        self._changed = changed
        self._calls: dict[int, _Call] = {}
        self._numbers = itertools.count()
        ours, worker_end = socket.socketpair()
        with worker_end:
            self.process = _started(worker_end)
        self.ready = asyncio.get_running_loop().create_future()
        # Read the exception even if no caller awaits it: asyncio would log it as never retrieved.
        self.ready.add_done_callback(lambda ready: ready.cancelled() or ready.exception())
        self._writer: asyncio.StreamWriter | None = None
        self._serving = asyncio.create_task(self._serve(ours, section))

    @property
    def playing(self) -> int:
        return sum(seat.playing for seat in self.seats)

    def load(self, thread: int) -> tuple[int, int]:
        """Return (cancelled calls that still run in a thread, attempts that it plays)."""
        stuck = sum(
            call.seat.thread == thread for call in self._calls.values() if call.answer.cancelled()
        )
        return stuck, sum(seat.playing for seat in self.seats if seat.thread == thread)

    async def call(self, seat: Seat, op: str, given: Any = None) -> Any:
        """Run an operation in the process and return its result.

        If this is cancelled, so is the operation. Raises Lost and Raised, and DataError for values
        that can't be sent.
        """
        given = packed(given)
        await asyncio.shield(self.ready)
        if self.ended or seat.thread in self.hung:
            raise self._lost(seat)
        number = next(self._numbers)
        answer = asyncio.get_running_loop().create_future()
        self._send(
            {"id": number, "op": op, "thread": seat.thread, "attempt": seat.number, "given": given}
        )
        self._calls[number] = _Call(seat, answer)
        try:
            return await answer
        except asyncio.CancelledError:
            self._send({"id": number, "op": "cancel", "thread": seat.thread})
            asyncio.get_running_loop().call_later(GRACE_S, self._must_be_over, number)
            raise

    def look(self) -> None:
        """Check for leaks: compare what is open after an attempt with what the first left open."""
        held = _left_open(self.process.pid)
        self._at_first = self._at_first or held
        grown = {name: count - self._at_first.get(name, count) for name, count in held.items()}
        if not self.leaks and max(grown.values(), default=0) > MOST_LEFT:
            self.leaks = True
            leaks = ", ".join(f"{count} more {name}" for name, count in grown.items())
            log.warning(
                "worker process %d is replaced: since its first attempt it holds %s",
                self.process.pid,
                leaks,
            )
            self._changed(self)

    def kill(self) -> None:
        """Kill the process, and all that environments started in its process group."""
        if self.process.returncode is None:
            # PermissionError: macOS raises it for a dead process.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def _lost(self, seat: Seat) -> Lost:
        if self.ended:
            return Lost(self.ended)
        why = f"another call, which was cancelled, hangs in its thread {seat.thread}"
        return Lost(f"worker process {self.process.pid} is given up: {why}")

    def _must_be_over(self, number: int) -> None:
        if self.ended or number not in self._calls:
            return
        thread = self._calls[number].seat.thread
        self.hung.add(thread)
        for call in self._calls.values():
            if call.seat.thread == thread and not call.answer.done():
                call.answer.set_exception(self._lost(call.seat))
        self._changed(self)

    def _send(self, values: Mapping[str, Any]) -> None:
        assert self._writer is not None, "a call to a process that is not ready"
        self._writer.write(frame(values))

    # --- messages from the process

    async def _serve(self, ours: socket.socket, section: Mapping[str, Any]) -> None:
        how = ""
        try:
            reader, self._writer = await asyncio.open_connection(sock=ours)
            self._send({"of": section, "credentials": credentials.get_offered()})
            async with asyncio.timeout(START_S):
                first = await _received(reader)
            if "error" in first:
                how = f"the environment could not be made in a worker process:\n{first['error']}"
                return
            self.ready.set_result(None)
            while True:
                self._take(await _received(reader))
        except TimeoutError:
            how = f"worker process {self.process.pid} was not ready after {START_S:g} s"
        except (asyncio.IncompleteReadError, OSError):
            pass  # it ended
        finally:
            self.kill()
            if self._writer is not None:
                self._writer.close()
            await self._buried(how)

    def _take(self, said: Mapping[str, Any]) -> None:
        call = self._calls.pop(said["id"])
        if call.answer.cancelled():
            self._changed(self)
        elif not call.answer.done():
            if "error" in said:
                call.answer.set_exception(
                    Raised(f"in worker process {self.process.pid}:\n{said['error']}")
                )
            else:
                call.answer.set_result(unpacked(said["value"]))

    async def _buried(self, how: str) -> None:
        while self.process.poll() is None:  # killed, or closed its socket while dying
            await asyncio.sleep(0.002)
        self.ended = (
            how
            or f"worker process {self.process.pid} died "
            f"({describe_exit(self.process.returncode)[0]})"
        )
        if not self.ready.done():
            self.ready.set_exception(Lost(self.ended))
        for call in self._calls.values():
            if not call.answer.done():
                call.answer.set_exception(Lost(self.ended))
        self._changed(self)


def _started(theirs: socket.socket) -> subprocess.Popen[bytes]:
    """Start a process that inherits the environment variables, standard output and error, and one
    end of a socket."""
    arguments = [json.dumps(sys.path), str(theirs.fileno()), str(os.getpid())]
    return subprocess.Popen(
        # There are many workers: numerical libraries must not start a thread per core in each.
        ["/usr/bin/env", "OMP_NUM_THREADS=1", sys.executable, "-c", BOOTSTRAP, *arguments],
        stdin=subprocess.DEVNULL,
        pass_fds=(theirs.fileno(),),
        start_new_session=True,  # Ctrl-C is for the driver
    )


async def _received(reader: asyncio.StreamReader) -> dict[str, Any]:
    (length,) = HEAD.unpack(await reader.readexactly(HEAD.size))
    return json.loads(await reader.readexactly(length))


def _left_open(pid: int) -> dict[str, int]:
    """Return a process's numbers of threads and file descriptors; {} if they can't be read."""
    try:
        return {
            "threads": len(os.listdir(f"/proc/{pid}/task")),
            "file descriptors": len(os.listdir(f"/proc/{pid}/fd")),
        }
    except OSError:
        return {}
