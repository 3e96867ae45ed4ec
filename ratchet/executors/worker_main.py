"""Run a worker behind a socket: it reads calls, runs them, replies and sends heartbeats.

The worker ends with the driver.
"""

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

from ratchet.executors.protocol import FrameKind, Parcel, receive, send
from ratchet.executors.shm_cleanup import list_shared_memory, remove_paths
from ratchet.executors.worker import ComponentHost
from ratchet.utils.safe_read import read_last_lines

BEAT_S = 1.0  # seconds between heartbeats
# A log file larger than LOG_BYTES is truncated to its last KEPT_BYTES.
LOG_BYTES, KEPT_BYTES = 4 * 2**20, 2**16
PR_SET_PDEATHSIG = 1


def serve(
    connection: socket.socket, log: Path | None = None, *, on_driver_lost: Callable[[], object]
) -> None:
    """Run a worker until the driver closes it.

    Args:
        connection: the socket to the driver.
        log: the worker's log file, which is kept small; None: it has none.
        on_driver_lost: called in another thread if the connection ends without a close, even
            while a call runs.
    """
    worker = ComponentHost()
    calls: queue.SimpleQueue[tuple[int, Parcel] | None] = queue.SimpleQueue()
    closed = threading.Event()
    send_lock = threading.Lock()

    def write(kind: FrameKind, number: int = 0, parcel: Parcel | None = None) -> None:
        try:
            with send_lock:
                send(connection, kind, number, parcel)
        except OSError:  # the reading thread notices the lost connection, and ends the worker
            pass

    def read() -> None:
        try:
            while True:
                kind, number, parcel = receive(connection)
                if kind is FrameKind.CLOSE:
                    break
                calls.put((number, parcel))
        except EOFError:
            if not closed.is_set():
                on_driver_lost()
        calls.put(None)

    def beat() -> None:
        while not closed.wait(BEAT_S):
            write(FrameKind.BEAT)
            if log is not None:
                _truncate_log(log)

    write(FrameKind.HELLO, parcel=Parcel(json.dumps(worker.greet()).encode()))
    for job in (read, beat):
        threading.Thread(target=job, name=f"worker-{job.__name__}", daemon=True).start()
    try:
        while (call := calls.get()) is not None:
            number, request = call
            write(*_add_number(worker.answer(request), number))
        worker.close()
    finally:
        closed.set()
        connection.close()


def _add_number(answer: tuple[FrameKind, Parcel], number: int) -> tuple[FrameKind, int, Parcel]:
    kind, parcel = answer
    return kind, number, parcel


def _truncate_log(log: Path) -> None:
    """Truncate a large log to its last part.

    Lines written meanwhile may be lost; a full disk would be worse.
    """
    try:
        if log.stat().st_size <= LOG_BYTES:
            return
        with log.open("r+b") as file:
            file.seek(-KEPT_BYTES, os.SEEK_END)
            last_bytes = file.read()
            file.seek(0)
            file.truncate()
            file.write(last_bytes)
    except OSError:  # the log was removed, or the disk is full; the worker can continue
        pass


def die_with_parent(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Let the kernel signal this process when the thread that started it ends.

    Exit at once if the parent has already ended. On systems other than Linux the process notices
    only the end of its connection.

    Args:
        parent: process id of the parent.
        number: the signal to send.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(number), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def end_group() -> NoReturn:
    """Kill this process and its process group, after removing their shared memory."""
    remove_paths(list_shared_memory(os.getpgrp()))
    os.killpg(0, signal.SIGKILL)
    raise AssertionError("SIGKILL did not end this process")


def redirect_output(path: Path) -> None:
    """Append standard output, standard error and logging of this process to a file."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for descriptor in (1, 2):
        os.dup2(file, descriptor)
    os.close(file)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
    )


def read_tail(path: Path, lines: int = 20) -> str:
    """Return the last lines of a log; "" if it can't be read."""
    return "\n".join(read_last_lines(path, lines, max_bytes=KEPT_BYTES))
