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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from ratchet.observe.write_files import open_unshared
from ratchet.utils.tracer import (
    ATTEMPT_TRACK,
    REQUEST_TRACK,
    REWARD_TRACK,
    TRACER,
    Span,
    Tracer,
)

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

    def __init__(self, path: Path, tracer: Tracer = TRACER) -> None:
        """Open the file, or raise OSError if it can't be created or read."""
        self.tracer = tracer
        self._offset_s = time.time() - tracer.clock()
        self._attempts_left = 0  # number of further attempts that are traced
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
        if is_traced_step(step):
            self.tracer.subscribe(self.follow)
        else:
            self.tracer.unsubscribe(self.follow)
        self._attempts_left = MAX_ATTEMPTS

    def follow(self, span: Span) -> Callable[[], None] | None:
        """Trace a span that begins. This is a `Subscriber` of the tracer."""
        if span.track in (REQUEST_TRACK, REWARD_TRACK):
            return None
        if span.track != ATTEMPT_TRACK:
            return lambda: self._add_span(span)
        if not self._attempts_left:
            return None
        self._attempts_left -= 1
        return lambda: self._add_attempt(span)

    def _add_span(self, span: Span) -> None:
        thread = self._tracks.get(span.track)
        if thread is None:
            thread = self._tracks[span.track] = len(self._tracks) + 1
            self._add_event("M", RUN, thread, "thread_name", args={"name": span.track})
            self._add_event("M", RUN, thread, "thread_sort_index", args={"sort_index": thread})
        self._add_event(
            "X",
            RUN,
            thread,
            span.name,
            ts=self._to_microseconds(span.start_s),
            dur=self._to_microseconds(span.end_s) - self._to_microseconds(span.start_s),
        )

    def _add_attempt(self, span: Span) -> None:
        for phase, moment in (("b", span.start_s), ("e", span.end_s)):
            ts = self._to_microseconds(moment)
            self._add_event(phase, ATTEMPTS, 1, span.name, ts=ts, cat="attempt", id=span.name)

    def flush(self) -> None:
        """Write the new events. If the disk fails, the trace ends but the run continues."""
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
        """End the JSON array and close the file, so that any JSON reader accepts the file."""
        self.tracer.unsubscribe(self.follow)
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

    The closing bracket, or an event that a crash cut off, is left out.
    """
    if content.endswith(b"}\n]\n"):
        content = content.removesuffix(b"\n]\n") + b",\n"
    return content[: max(content.rfind(b"},\n") + 1, 0)]
