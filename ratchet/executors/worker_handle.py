"""One rank of a group as the driver sees it: calls that wait for its answers, its silences, and its
end."""

from __future__ import annotations

import abc
import contextlib
import itertools
import json
import queue
import socket
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from ratchet.errors import VersionMismatch, WorkerDied, WorkerError
from ratchet.executors.protocol import Kind, Parcel, receive, send, versions
from ratchet.observe.stall_report import note, report

START_S = 180.0  # until the first sign of life: imports, on a machine that does much else
Answer = tuple[Kind, Parcel]


@dataclass(frozen=True)
class Name:
    """Of a rank, in messages."""

    role: str
    rank: int
    world_size: int
    host: str

    def __str__(self) -> str:
        return f"{self.role} rank {self.rank} of {self.world_size} on {self.host}"


class Member(abc.ABC):
    """gone: done when the process has ended or was given up; with None where it was asked to, else
    with the error."""

    def __init__(self, name: Name, silence_s: float) -> None:
        self.name = name
        self.gone: Future[WorkerError | None] = Future()
        self.closing = False
        self._silence_s = silence_s
        self._silent_s: float = 0.0
        self.pid: int | None = None  # as it says, on the machine that it calls so
        self.said_host = ""
        self._greeted = False
        self._over: WorkerError | None = None  # what those who still call are told
        self._calls: dict[int, tuple[str, Future[Answer]]] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    def submit(self, request: Any, name: str) -> Future[Answer]:
        """Its answers come in the order of the requests. The future fails with the WorkerError that
        ends the process."""
        answer: Future[Answer] = Future()
        with self._lock:
            if self._over is not None:
                answer.set_exception(self._over)
                return answer
            number = next(self._numbers)
            self._calls[number] = name, answer
        note(str(self.name), f"was asked '{name}'")
        self._send(number, request)
        return answer

    def share(self, request: Parcel) -> Any:
        """The form in which the same request is given to several members of this kind."""
        return request

    def check(self, passed_s: float) -> None:
        """To be called every so often. Ends a process from which nothing was heard for too long.
        What passes while the driver itself is stopped counts as little as one such call."""
        if self.gone.done():
            return
        self._silent_s += passed_s
        if self._silent_s > (self._silence_s if self._greeted else START_S):
            why = "" if self._greeted else ": it never started"
            silent = self.died(
                f"was silent for {self._silent_s:.0f} s{why}{self.state()}, and was killed"
            )
            silent.add_note(report())
            self.give_up(silent)

    def died(self, how: str, signal: str = "") -> WorkerDied:
        doing = next((f" in '{name}'" for name, _ in self._calls.values()), "")
        n = self.name
        return WorkerDied(
            f"{n} {how}{doing}",
            role=n.role,
            rank=n.rank,
            host=n.host,
            signal=signal,
            tail=self.tail(),
        )

    def give_up(self, error: WorkerError) -> None:
        """Kills it. Whoever waits for it gets the error. Does not block."""
        self._end(error)
        self.kill()

    def tail(self) -> str:
        """The last lines that it wrote, where they can be read."""
        return ""

    def state(self) -> str:
        """What the system says of a process that is silent: " (...)" or nothing."""
        return ""

    @abc.abstractmethod
    def close(self) -> None:
        """Asks it to close its component and to end. Does not block."""

    @abc.abstractmethod
    def kill(self) -> None: ...

    @abc.abstractmethod
    def _send(self, number: int, request: Any) -> None:
        """Must not block."""

    # --- for those that hear of it

    def _heard(self) -> None:
        self._silent_s = 0.0

    def _greet(self, said: Mapping[str, Any]) -> None:
        """Raises VersionMismatch."""
        here = versions()
        other = {key: said.get(key) for key in here}
        if other != here:
            differs = ", ".join(
                f"{key} {here[key]} here and {other[key]} there"
                for key in here
                if here[key] != other[key]
            )
            raise VersionMismatch(
                f"{self.name} runs another version than the driver: {differs}; install the same on "
                "all hosts"
            )
        self._greeted, self.pid, self.said_host = True, said["pid"], said["host"]

    def _take(self, number: int, answer: Answer) -> None:
        with self._lock:
            name, future = self._calls.pop(number, ("", None))
        note(str(self.name), f"answered '{name}'")
        if future is not None:  # nobody waits for what came after it was given up
            future.set_result(answer)

    def _end(self, error: WorkerError | None) -> None:
        """Those who wait for it hear of it before those who would end its group, and so learn the
        cause."""
        with self._lock:
            if self._over is not None:
                return
            self._over = error or WorkerError(f"{self.name} was closed")
            calls, self._calls = self._calls, {}
        for _, future in calls.values():
            future.set_exception(self._over)
        self.gone.set_result(error)


class SocketMember(Member):
    """Behind a socket (`ratchet.executors.worker_main` at its other end). how: waits a little for
    the process to be gone, and says how it ended, in words, and the signal's name."""

    def __init__(
        self,
        name: Name,
        connection: socket.socket,
        silence_s: float,
        how: Callable[[], tuple[str, str]],
    ) -> None:
        super().__init__(name, silence_s)
        self._connection, self._how = connection, how
        self._requests: queue.SimpleQueue[tuple[Kind, int, Parcel | None] | None] = (
            queue.SimpleQueue()
        )
        for job in (self._read, self._write):
            threading.Thread(target=job, name=f"{name.role}-{name.rank}", daemon=True).start()

    def close(self) -> None:
        self.closing = True
        self._requests.put((Kind.CLOSE, 0, None))

    def kill(self) -> None:
        """The process ends with its connection."""
        self._hang_up()

    def _hang_up(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def _send(self, number: int, request: Parcel) -> None:
        self._requests.put((Kind.CALL, number, request))

    def _write(self) -> None:
        while (request := self._requests.get()) is not None:
            try:
                send(self._connection, *request)
            except OSError:  # the reader hears of it too, and says how it ended
                return

    def _read(self) -> None:
        try:
            while True:
                kind, number, parcel = receive(self._connection, self._heard)
                if kind is Kind.HELLO:
                    self._greet(json.loads(parcel.head))
                elif not self._greeted:
                    raise VersionMismatch(
                        f"{self.name} speaks another protocol than the driver: install the same "
                        "version there"
                    )
                elif kind is not Kind.BEAT:
                    self._take(number, (kind, parcel))
        except EOFError:
            if not self.gone.done():
                how, signal = self._how()
                self._end(
                    None if self.closing and not signal else self.died(f"died ({how})", signal)
                )
                if not self.closing:
                    self.kill()
        except WorkerError as error:
            self.give_up(error)
        finally:
            self._hang_up()
            self._requests.put(None)
            self._connection.close()
