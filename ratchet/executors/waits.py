"""Who waits for whom, and since when: every wait for another process is in one table while it lasts.

`kill -USR1 <driver>` writes the table to standard error and into the log; `ratchet status RUN` prints it (`answer_status`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Wait:
    """owner: who waits. name: for what. whom: for whom still, in words. timeout_s: after which somebody ends it."""

    owner: str
    name: str
    whom: Callable[[], str]
    timeout_s: float
    since: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.since


_waits: dict[Wait, None] = {}  # in order of their beginnings
_lock = threading.RLock()  # a signal may come while this thread holds it


def begin(wait: Wait) -> Wait:
    with _lock:
        _waits[wait] = None
    return wait


def end(wait: Wait) -> None:
    with _lock:
        _waits.pop(wait, None)


@contextlib.contextmanager
def waiting(owner: str, name: str, whom: str, timeout_s: float) -> Iterator[None]:
    """For a wait that keeps its own deadline."""
    wait = begin(Wait(owner, name, lambda: whom, timeout_s))
    try:
        yield
    finally:
        end(wait)


def table() -> str:
    """A line for each wait, the oldest first."""
    with _lock:
        waits = list(_waits)
    if not waits:
        return f"process {os.getpid()} waits for no other process"
    rows = [("who", "waits for", "to", "since", "at most")]
    rows += [(w.owner, w.whom(), w.name, f"{w.seconds:.1f} s", f"{w.timeout_s:g} s") for w in waits]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)


@contextlib.contextmanager
def shown_on_signal() -> Iterator[None]:
    """SIGUSR1 writes the table, inside the block. To be entered in the main thread."""

    def show(number: int, frame: object) -> None:
        text = table()
        sys.stderr.write(f"{text}\n")
        log.info("waits:\n%s", text)

    before = signal.signal(signal.SIGUSR1, show)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


@contextlib.contextmanager
def answer_status(address: str) -> Iterator[None]:
    """A process of the same user that connects to the Unix socket at `address` is sent the table, inside the block: even while
    the main thread waits without listening to signals. Raises OSError where no socket can be made there."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        threading.Thread(target=_answer, args=(listener,), name="status", daemon=True).start()
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # the thread is in accept


def _answer(listener: socket.socket) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:  # it was closed
            return
        with connection, contextlib.suppress(OSError):
            connection.settimeout(5)
            if _user_of(connection) == os.getuid():
                connection.sendall(table().encode())


def _user_of(connection: socket.socket) -> int:
    """Of the process at the other end. On Linux an address may be no file, which only its owner could open."""
    if sys.platform != "linux":
        return os.getuid()
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return user


def ask_status(address: str, timeout_s: float = 10.0) -> str:
    """The table of the process that answers at `address`. Raises OSError where none does."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(timeout_s)
        connection.connect(address)
        pieces = bytearray()
        while piece := connection.recv(2**16):
            pieces += piece
        return pieces.decode()
