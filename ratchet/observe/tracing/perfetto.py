"""Write `trace.json`, which shows when each part of a run began and ended.

Perfetto (https://ui.perfetto.dev) and chrome://tracing open it. It is a JSON array in the Trace
Event Format, whose closing bracket may be missing, so a crash leaves a readable file. Times are
wall-clock times, so that a resumed run continues in the same file, after a gap.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from ratchet.observe.tracing.spans import ACTIVITY, Activity
from ratchet.observe.write_files import open_unshared

log = logging.getLogger(__name__)

RUN, ATTEMPTS = 1, 2  # process ids in the trace
FIRST_STEPS = 128  # number of steps at the start that are all traced
MAX_ATTEMPTS = 64  # maximum number of traced attempts in a step


def is_traced_step(step: int) -> bool:
    """True if this step (from 0) is traced.

    The first `FIRST_STEPS` steps are all traced, then every second, every fourth, and so on. The
    interval doubles when the number of steps doubles, so a trace grows slowly.
    """
    return step % (1 << (step // FIRST_STEPS).bit_length()) == 0


class Trace:
    """The trace file of a run.

    A track is a thread in the trace. Spans of the run nest; attempts overlap, so they are async
    events.
    """

    def __init__(self, path: Path, activity: Activity = ACTIVITY) -> None:
        """Open the file, or raise OSError if it can't be created or read."""
        self.activity = activity
        self._offset_s = time.time() - activity.clock()
        self._tracks: dict[str, int] = {}
        self._events: list[dict[str, Any]] = []
        self._file: BinaryIO | None = os.fdopen(open_unshared(path, os.O_RDWR | os.O_CREAT), "r+b")
        earlier_events = _keep_complete_events(self._file.read())
        self._file.seek(0)
        self._file.truncate()
        self._file.write(earlier_events + b",\n" if earlier_events else b"[\n")
        for process, name in ((RUN, "run"), (ATTEMPTS, "attempts")):
            self._add_event("M", process, 0, "process_name", args={"name": name})

    def begin_step(self, step: int) -> None:
        """Begin a step of the run, counted from 0."""
        is_traced = is_traced_step(step)
        self.activity.span_listener = self.add_span if is_traced else None
        self.activity.attempt_listener = self.add_attempt if is_traced else None
        self.activity.attempts_left = MAX_ATTEMPTS

    def add_span(self, track: str, name: str, start: float, end: float) -> None:
        """Add a span; its times are seconds of the activity's clock."""
        thread = self._tracks.get(track)
        if thread is None:
            thread = self._tracks[track] = len(self._tracks) + 1
            self._add_event("M", RUN, thread, "thread_name", args={"name": track})
            self._add_event("M", RUN, thread, "thread_sort_index", args={"sort_index": thread})
        self._add_event(
            "X",
            RUN,
            thread,
            name,
            ts=self._to_microseconds(start),
            dur=self._to_microseconds(end) - self._to_microseconds(start),
        )

    def add_attempt(self, group: str, name: str, start: float, end: float) -> None:
        event = {"cat": "attempt", "id": f"{group}#{name}"}
        self._add_event(
            "b", ATTEMPTS, 1, f"{group}#{name}", ts=self._to_microseconds(start), **event
        )
        self._add_event("e", ATTEMPTS, 1, f"{group}#{name}", ts=self._to_microseconds(end), **event)

    def flush(self) -> None:
        """Write the new events. If the disk fails, the trace ends but the run goes on."""
        events, self._events = self._events, []
        if self._file is None:
            return
        try:
            self._file.write(b"".join(json.dumps(event).encode() + b",\n" for event in events))
            self._file.flush()
        except OSError as error:
            log.warning("the trace can't be written, and ends here: %s", error)
            self._file = None

    def close(self) -> None:
        """Close the array and the file, so that any JSON reader accepts it."""
        self.activity.span_listener = self.activity.attempt_listener = None
        self.flush()
        if self._file is not None:
            with self._file as file, suppress(OSError):
                file.seek(-2, os.SEEK_CUR)  # overwrite the last comma
                file.write(b"\n]\n")

    def _to_microseconds(self, moment: float) -> int:
        return round((moment + self._offset_s) * 1e6)

    def _add_event(self, phase: str, process: int, thread: int, name: str, **fields: Any) -> None:
        self._events.append({"ph": phase, "pid": process, "tid": thread, "name": name, **fields})


@contextmanager
def open_trace(path: Path | None) -> Iterator[Trace | None]:
    """Yield the trace; None without a path, or if the file can't be created."""
    trace = None
    try:
        trace = None if path is None else Trace(path)
    except OSError as error:
        log.warning("there will be no trace: %s", error)
    try:
        yield trace
    finally:
        if trace is not None:
            trace.close()


def _keep_complete_events(content: bytes) -> bytes:
    """Return the content up to the last complete event.

    It leaves out the end of the array, or an event that a crash cut off.
    """
    content = content.removesuffix(b"\n]\n") + b",\n" if content.endswith(b"}\n]\n") else content
    return content[: max(content.rfind(b"},\n") + 1, 0)]
