"""Define the driver's handle of a worker: its pending calls, its heartbeats and its end."""

from __future__ import annotations

import abc
import itertools
import queue
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from ratchet.errors import VersionMismatch, WorkerDied, WorkerError, link_symptom
from ratchet.executors.protocol import get_versions
from ratchet.observe.stall_report import format_report, record_event
from ratchet.processes.frames import EMPTY, Connection, FrameKind, Parcel, PeerGone

# Maximum time until a worker's first message. Imports take long on a busy machine.
START_S = 180.0
Answer = tuple[FrameKind, Parcel]


@dataclass(frozen=True)
class WorkerName:
    """The name of a worker in messages."""

    role: str
    rank: int
    world_size: int
    host: str

    def __str__(self) -> str:
        return f"{self.role} rank {self.rank} of {self.world_size} on {self.host}"


class WorkerHandle(abc.ABC):
    """The handle of one worker process.

    The future `gone` is done when the process has ended or was given up. Its result is None if the
    driver closed the worker, else the error.
    """

    def __init__(self, name: WorkerName, silence_s: float) -> None:
        self.name = name
        self.gone: Future[WorkerError | None] = Future()
        self.is_closing = False
        self._max_silence_s = silence_s
        self._silent_for_s: float = 0.0
        # Process id and host as the worker reported them.
        self.pid: int | None = None
        self.reported_host = ""
        self._has_greeted = False
        self._final_error: WorkerError | None = None  # raised by every later call
        # Pending calls by number: the name of each, and the future of its answer.
        self._calls: dict[int, tuple[str, Future[Answer]]] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    def submit(self, request: Any, name: str) -> Future[Answer]:
        """Send a request and return the future of its answer.

        Answers come in the order of the requests. The future fails with the WorkerError that ends
        the process.
        """
        answer: Future[Answer] = Future()
        with self._lock:
            if self._final_error is not None:
                answer.set_exception(self._final_error)
                return answer
            number = next(self._numbers)
            self._calls[number] = name, answer
        record_event(str(self.name), f"was sent '{name}'")
        self._send(number, request)
        return answer

    def prepare_shared(self, request: Parcel) -> Any:
        """Prepare a request once for submission to several workers; Ray stores it once."""
        return request

    def check(self, passed_s: float) -> None:
        """End a process that has been silent for too long. Call this regularly.

        passed_s: the caller's interval between checks, not the measured time since the last check.
        After a suspension of the driver, the measured time would end all workers.
        """
        if self.gone.done():
            return
        self._silent_for_s += passed_s
        if self._silent_for_s > (self._max_silence_s if self._has_greeted else START_S):
            detail = "" if self._has_greeted else ": it never started"
            error = self.make_death_error(
                f"was silent for {self._silent_for_s:.0f} s{detail}{self.describe_state()}, and "
                "was killed"
            )
            error.add_note(format_report())
            self.give_up(error)

    def make_death_error(self, ending: str, signal: str = "") -> WorkerDied:
        """Return the error of a dead worker. ending: the message after the worker's name."""
        pending_call = next((f" in '{name}'" for name, _ in self._calls.values()), "")
        worker = self.name
        return WorkerDied(
            f"{worker} {ending}{pending_call}. {link_symptom('a-worker-process-died')}",
            role=worker.role,
            rank=worker.rank,
            host=worker.host,
            signal=signal,
            tail=self.read_log_tail(),
        )

    def give_up(self, error: WorkerError) -> None:
        """Kill the process and fail all its calls with the error. Does not block."""
        self._end(error)
        self.kill()

    def read_log_tail(self) -> str:
        """Return the last lines of the worker's log; "" if they can't be read."""
        return ""

    def describe_state(self) -> str:
        """Return the operating system's state of a silent process as " (...)", or ""."""
        return ""

    @abc.abstractmethod
    def close(self) -> None:
        """Order the worker to close its component and to exit. Does not block."""

    @abc.abstractmethod
    def kill(self) -> None:
        """Kill the process. Does not block."""

    @abc.abstractmethod
    def _send(self, number: int, request: Any) -> None:
        """Send a request. An implementation must not block."""

    # --- events that subclasses report

    def _reset_silence(self) -> None:
        self._silent_for_s = 0.0

    def _check_greeting(self, greeting: Mapping[str, Any]) -> None:
        """Check the worker's greeting. Raises VersionMismatch."""
        expected = get_versions()
        actual = {key: greeting.get(key) for key in expected}
        if actual != expected:
            differences = ", ".join(
                f"{key} {expected[key]} in the driver and {actual[key]} in the worker"
                for key in expected
                if expected[key] != actual[key]
            )
            raise VersionMismatch(
                f"{self.name} has another version than the driver: {differences}; install the same "
                "version on all hosts"
            )
        self._has_greeted = True
        self.pid = greeting["pid"]
        self.reported_host = greeting["host"]

    def _complete(self, number: int, answer: Answer) -> None:
        with self._lock:
            name, future = self._calls.pop(number, ("", None))
        record_event(str(self.name), f"answered '{name}'")
        if future is not None:  # None: the call failed earlier, when the worker was given up
            future.set_result(answer)

    def _end(self, error: WorkerError | None) -> None:
        """Fail all calls, then report the end.

        The calls fail first, because completing `gone` makes the worker group close all workers,
        and their errors must not hide this one.
        """
        with self._lock:
            if self._final_error is not None:
                return
            self._final_error = error or WorkerError(f"{self.name} was closed")
            calls = self._calls
            self._calls = {}
        for _, future in calls.values():
            future.set_exception(self._final_error)
        self.gone.set_result(error)


class SocketWorkerHandle(WorkerHandle):
    """The handle of a worker behind a socket; `ratchet.executors.worker_main` is its other end.

    describe_end: waits briefly for the process to end. Returns a description of its end, and the
      name of the signal that ended it or "".
    """

    def __init__(
        self,
        name: WorkerName,
        connection: Connection,
        silence_s: float,
        describe_end: Callable[[], tuple[str, str]],
    ) -> None:
        super().__init__(name, silence_s)
        self._connection = connection
        connection.on_data = self._reset_silence
        self._describe_end = describe_end
        self._requests: queue.SimpleQueue[tuple[FrameKind, int, Parcel] | None] = (
            queue.SimpleQueue()
        )
        for job in (self._read, self._write):
            threading.Thread(target=job, name=f"{name.role}-{name.rank}", daemon=True).start()

    def close(self) -> None:
        self.is_closing = True
        self._requests.put((FrameKind.CLOSE, 0, EMPTY))

    def kill(self) -> None:
        """Close the connection, which ends the process."""
        self._connection.shut_down()

    def _send(self, number: int, request: Parcel) -> None:
        self._requests.put((FrameKind.CALL, number, request))

    def _write(self) -> None:
        while (request := self._requests.get()) is not None:
            try:
                self._connection.send(*request)
            except OSError:  # `_read` notices it too, and reports how the worker ended
                return

    def _read(self) -> None:
        try:
            while True:
                kind, number, parcel = self._connection.receive()
                if kind is FrameKind.HELLO:
                    self._check_greeting(parcel.load_json())
                elif not self._has_greeted:
                    raise VersionMismatch(
                        f"{self.name} speaks another protocol than the driver: install the same "
                        "version there"
                    )
                elif kind is not FrameKind.BEAT:
                    self._complete(number, (kind, parcel))
        except PeerGone:
            if not self.gone.done():
                ending, signal = self._describe_end()
                self._end(
                    None
                    if self.is_closing and not signal
                    else self.make_death_error(f"died ({ending})", signal)
                )
                if not self.is_closing:
                    self.kill()
        except WorkerError as error:
            self.give_up(error)
        finally:
            self._connection.shut_down()
            self._requests.put(None)
            self._connection.socket.close()
