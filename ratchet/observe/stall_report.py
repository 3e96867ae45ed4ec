"""Stall reports: a table of what the run waits for, and the last event of each component.

The run may wait for another process, an environment or a reward. `kill -USR1 <driver>` writes the
table to standard error and to the log; `ratchet status RUN` prints it (`answer_status`).
`log_stalls` logs it when the run makes no progress. Errors about a missed deadline include it.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from ratchet.errors import link_symptom
from ratchet.observe.tracing.busy_time import BUSY_TIME
from ratchet.utils.tracer import TRACER, Span

log = logging.getLogger(__name__)

GENERATE = "generate"  # name of waits during which a generator works
RUN = "the run"  # the component whose events are the run's phases
# Maximum number of components whose last event is kept. The one with the oldest event is dropped.
MAX_COMPONENTS = 256


@dataclass(eq=False, slots=True)
class Wait:
    """A context that lists a wait in the table while it lasts.

    owner: the component that waits.
    name: the operation.
    awaited: the components that it waits for, in words, or a function that returns them.
    timeout_s: seconds from the start until the deadline, which other code enforces; inf: none.
    """

    owner: str
    name: str
    awaited: Callable[[], str] | str
    timeout_s: float
    start_s: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.start_s

    @property
    def awaited_text(self) -> str:
        return self.awaited if isinstance(self.awaited, str) else self.awaited()

    def __enter__(self) -> None:
        begin_wait(self)

    def __exit__(self, raised: object, *_: object) -> None:
        end_wait(self)
        if isinstance(self.awaited, str):
            record_event(
                self.awaited, f"ended '{self.name}'" if raised is None else f"failed '{self.name}'"
            )


class Event(NamedTuple):
    description: str
    time_s: float  # time.monotonic()


# An ordered set: all values are True, the oldest wait first. Adding, removing and copying are
# atomic, so threads need no lock.
_waits: dict[Wait, bool] = {}
_events: dict[str, Event] = {}  # by component, the latest last
_lock = threading.RLock()  # a signal handler may run while its thread holds it


def begin_wait(wait: Wait) -> Wait:
    _waits[wait] = True
    if wait.name == GENERATE:
        with _lock:
            BUSY_TIME.__enter__()
    return wait


def end_wait(wait: Wait) -> None:
    if _waits.pop(wait, False) and wait.name == GENERATE:
        with _lock:
            BUSY_TIME.__exit__()


def waiting(owner: str, name: str, awaited: str, timeout_s: float | None) -> Wait:
    """Return a wait whose deadline the caller enforces. timeout_s: None if there is no deadline."""
    return Wait(owner, name, awaited, math.inf if timeout_s is None else timeout_s)


def record_event(component: str, description: str) -> None:
    """Record the latest event of a component."""
    with _lock:
        _events.pop(component, None)
        _events[component] = Event(description, time.monotonic())
        if len(_events) > MAX_COMPONENTS:
            del _events[next(iter(_events))]


def forget_component(component: str) -> None:
    with _lock:
        _events.pop(component, None)


def format_waits() -> str:
    """Return one line for each wait, the oldest first; equal waits share a line."""
    waits = list(_waits)
    if not waits:
        return f"process {os.getpid()} waits for no other process"
    waits_by_text: dict[tuple[str, str, str], list[Wait]] = {}
    for wait in waits:
        waits_by_text.setdefault((wait.owner, wait.awaited_text, wait.name), []).append(wait)
    rows = [("waiting", "waits for", "to", "since", "at most")]
    for (owner, awaited, name), equal_waits in waits_by_text.items():
        waiter = owner if len(equal_waits) == 1 else f"{owner} ({len(equal_waits)})"
        timeout_s = equal_waits[0].timeout_s
        rows.append(
            (
                waiter,
                awaited,
                name,
                f"{equal_waits[0].seconds:.1f} s",
                "" if math.isinf(timeout_s) else f"{timeout_s:g} s",
            )
        )
    return _align(rows)


def format_report() -> str:
    """Return the table and the last event of each component."""
    now = time.monotonic()
    with _lock:
        rows = [
            (name, event.description, f"{now - event.time_s:.1f} s ago")
            for name, event in _events.items()
        ]
    events = _align([("component", "last event", ""), *rows]) if rows else "no events recorded yet"
    return f"{format_waits()}\n{events}"


def _align(rows: list[tuple[str, ...]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


class StallDetector:
    """A detector of stalls. It reports a run that has begun no new phase for `after_s`.

    It reports again whenever that time has doubled.
    """

    def __init__(self, after_s: float) -> None:
        self.after_s = self._next_report_s = after_s
        self._last: Event | None = None

    def check(self, now: float) -> str | None:
        """Return the text to log, or None if the run is not stalled. now: time.monotonic()."""
        last = _events.get(RUN)
        if last is None:
            return None
        if last != self._last:
            self._last, self._next_report_s = last, self.after_s
        quiet_s = now - last.time_s
        if quiet_s < self._next_report_s:
            return None
        self._next_report_s *= 2
        return (
            f"the run has made no progress for {quiet_s:.0f} s, since it {last.description}:\n"
            f"{format_report()}\n{link_symptom('it-hangs')}"
        )


@contextlib.contextmanager
def log_stalls(after_s: float | None) -> Iterator[None]:
    """Record the run's phases inside the block, and log stalls even while the main thread waits.

    after_s: see `StallDetector`; None: log nothing.
    """
    ended = threading.Event()
    stalls = StallDetector(math.inf if after_s is None else after_s)

    def watch() -> None:
        while not ended.wait(stalls.after_s / 4):
            if text := stalls.check(time.monotonic()):
                log.warning("%s", text)

    TRACER.subscribe(_record_phase, phases_only=True)
    if after_s is not None:
        threading.Thread(target=watch, name="stalls", daemon=True).start()
    try:
        yield
    finally:
        ended.set()
        TRACER.unsubscribe(_record_phase)
        forget_component(RUN)


def _record_phase(span: Span) -> None:
    record_event(RUN, f"began to {span.name} for step {span.step}")


@contextlib.contextmanager
def show_on_signal() -> Iterator[None]:
    """Make SIGUSR1 write the table, inside the block. Enter it in the main thread."""

    def show(number: int, frame: object) -> None:
        text = format_waits()
        sys.stderr.write(f"{text}\n")
        log.info("waits:\n%s", text)

    previous_handler = signal.signal(signal.SIGUSR1, show)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, previous_handler)


@contextlib.contextmanager
def answer_status(address: str) -> Iterator[None]:
    """Serve the table at the Unix socket `address` inside the block, to processes of the same user.

    It works even while the main thread waits without handling signals. Raises OSError if the socket
    can't be created.
    """
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        threading.Thread(
            target=_answer_requests, args=(listener,), name="status", daemon=True
        ).start()
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes the thread from accept


def _answer_requests(listener: socket.socket) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:  # the listener was closed
            return
        with connection, contextlib.suppress(OSError):
            connection.settimeout(5)
            if _get_peer_user(connection) == os.getuid():
                connection.sendall(format_waits().encode())


def _get_peer_user(connection: socket.socket) -> int:
    """Return the user of the process at the other end.

    Only Linux needs the check, because there an address may be an abstract name, which every user
    can connect to. On other systems it is a file that only its owner can open.
    """
    if sys.platform != "linux":
        return os.getuid()
    _, user, _ = struct.unpack(
        "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    )
    return user


def request_status(address: str) -> str:
    """Return the table of the process that answers at `address`. Raises OSError if none does."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(10.0)
        connection.connect(address)
        pieces = bytearray()
        while piece := connection.recv(2**16):
            pieces += piece
        return pieces.decode()
