"""A worker behind a socket: reads calls, runs them, answers, and shows that it lives. It ends with
the driver."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from ratchet.executors.protocol import Kind, Parcel, receive, send
from ratchet.executors.shm_cleanup import remove, shared_by
from ratchet.executors.worker import Worker

BEAT_S = 1.0  # between signs of life
# a log file that grew beyond the first is cut to its last part
LOG_BYTES, KEPT_BYTES = 4 * 2**20, 2**16
PR_SET_PDEATHSIG = 1


def serve(
    connection: socket.socket, log: Path | None = None, *, lost: Callable[[], object]
) -> None:
    """Returns when the driver says so. lost: called in another thread when the driver is gone,
    whatever happens here."""
    worker, calls = Worker(), queue.SimpleQueue[tuple[int, Parcel] | None]()
    closed, sending = threading.Event(), threading.Lock()

    def write(kind: Kind, number: int = 0, parcel: Parcel | None = None) -> None:
        try:
            with sending:
                send(connection, kind, number, parcel)
        except OSError:  # the reader sees it too, and ends us
            pass

    def read() -> None:
        try:
            while True:
                kind, number, parcel = receive(connection)
                if kind is Kind.CLOSE:
                    break
                calls.put((number, parcel))
        except EOFError:
            if not closed.is_set():
                lost()
        calls.put(None)

    def beat() -> None:
        while not closed.wait(BEAT_S):
            write(Kind.BEAT)
            if log is not None:
                _bound(log)

    write(Kind.HELLO, parcel=Parcel(json.dumps(worker.greet()).encode()))
    for job in (read, beat):
        threading.Thread(target=job, name=f"worker-{job.__name__}", daemon=True).start()
    try:
        while (call := calls.get()) is not None:
            number, request = call
            write(*_numbered(worker.answer(request), number))
        worker.close()
    finally:
        closed.set()
        connection.close()


def _numbered(answer: tuple[Kind, Parcel], number: int) -> tuple[Kind, int, Parcel]:
    kind, parcel = answer
    return kind, number, parcel


def _bound(log: Path) -> None:
    """What is written meanwhile may be lost; a disk that is full of it would be worse."""
    try:
        if log.stat().st_size <= LOG_BYTES:
            return
        with log.open("r+b") as file:
            file.seek(-KEPT_BYTES, os.SEEK_END)
            kept = file.read()
            file.seek(0)
            file.truncate()
            file.write(kept)
    except OSError:  # removed, or the disk is full: no reason to stop
        pass


def die_with_parent(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """The kernel signals this process when the thread that started it ends. On other systems than
    Linux the end of the connection has to do."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(number), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def end_group() -> NoReturn:
    """Of this process, with all that it started and left in its group, and what they have in shared
    memory."""
    remove(shared_by(os.getpgrp()))
    os.killpg(0, signal.SIGKILL)
    raise AssertionError("it is dead")


def log_to(path: Path) -> None:
    """Standard output, standard error and logging of this process go to the end of a file."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for descriptor in (1, 2):
        os.dup2(file, descriptor)
    os.close(file)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
    )


def tail_of(path: Path, lines: int = 20) -> str:
    """The last lines; "" where there are none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - KEPT_BYTES))
            return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])
    except OSError:
        return ""
