"""Run a worker behind a socket: it reads calls, runs them, replies and sends heartbeats.

The worker ends with the driver.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from ratchet.executors.worker import ComponentHost
from ratchet.processes.frames import (
    EMPTY,
    Connection,
    Frame,
    FrameKind,
    Parcel,
    PeerGone,
    dump_json,
)
from ratchet.processes.output_log import truncate_log
from ratchet.processes.process_group import end_group

BEAT_S = 1.0  # seconds between heartbeats


def main(connection: Connection, log: str, environment: Mapping[str, str]) -> None:
    """Run a worker in a process that the fork server has started.

    Args:
        connection: The connection to the driver.
        log: The worker's log file.
        environment: Environment variables to set.
    """
    os.environ.update(environment)
    serve(connection, Path(log), on_driver_lost=end_group)


def serve(
    connection: Connection, log: Path | None = None, *, on_driver_lost: Callable[[], object]
) -> None:
    """Run a worker until the driver closes it.

    Args:
        connection: The connection to the driver.
        log: the worker's log file, which is kept small; None: it has none.
        on_driver_lost: called in another thread if the connection ends without a close, even
            while a call runs.
    """
    worker = ComponentHost()
    calls: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
    closed = threading.Event()

    def write(kind: FrameKind, number: int = 0, parcel: Parcel = EMPTY) -> None:
        # After an error the reading thread notices the lost connection, and ends the worker.
        with contextlib.suppress(OSError):
            connection.send(kind, number, parcel)

    def read() -> None:
        try:
            while (frame := connection.receive()).kind is not FrameKind.CLOSE:
                calls.put(frame)
        except PeerGone:
            if not closed.is_set():
                on_driver_lost()
        calls.put(None)

    def beat() -> None:
        while not closed.wait(BEAT_S):
            write(FrameKind.BEAT)
            if log is not None:
                truncate_log(log)

    write(FrameKind.HELLO, parcel=dump_json(worker.greet()))
    for job in (read, beat):
        threading.Thread(target=job, name=f"worker-{job.__name__}", daemon=True).start()
    try:
        while (call := calls.get()) is not None:
            kind, answer = worker.answer(call.parcel)
            write(kind, call.number, answer)
        worker.close()
    finally:
        closed.set()
        connection.socket.close()
