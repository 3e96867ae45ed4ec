"""The file `trace.json`: when each part of a run began and ended, for Perfetto
(https://ui.perfetto.dev) or chrome://tracing.

It has the Trace Event Format's JSON array form, whose closing bracket may be missing: it is written
as the run goes, and a crash leaves a readable file. Times are of the wall clock, so that a resumed
run continues in the same file, after a gap.
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

RUN, ATTEMPTS = 1, 2  # what the format calls processes
EACH = 128  # steps at the beginning that are all traced
MOST_ATTEMPTS = 64  # of a step


def traced(step: int) -> bool:
    """Return True if this step (from 0) is traced: the first ones, then every second, every fourth,
    and so on, the same number in each doubling of the steps."""
    return step % (1 << (step // EACH).bit_length()) == 0


class Trace:
    """The trace file of a run. Tracks are the format's threads; spans of the run nest. Attempts
    overlap, so they are async events."""

    def __init__(self, path: Path, activity: Activity = ACTIVITY) -> None:
        """Open the file. Raises OSError if it can't be made or read."""
        self.activity = activity
        self._offset_s = time.time() - activity.clock()
        self._tracks: dict[str, int] = {}
        self._events: list[dict[str, Any]] = []
        self._file: BinaryIO | None = os.fdopen(open_unshared(path, os.O_RDWR | os.O_CREAT), "r+b")
        kept = _whole(self._file.read())
        self._file.seek(0)
        self._file.truncate()
        self._file.write(kept + b",\n" if kept else b"[\n")
        for process, name in ((RUN, "run"), (ATTEMPTS, "attempts")):
            self._note("M", process, 0, "process_name", args={"name": name})

    def begin_step(self, step: int) -> None:
        """Start a step. step: from 0, over the whole run."""
        on = traced(step)
        self.activity.listener = self.span if on else None
        self.activity.attempts = self.attempt if on else None
        self.activity.attempts_left = MOST_ATTEMPTS

    def span(self, track: str, name: str, start: float, end: float) -> None:
        """Add a span; times are seconds of the activity's clock."""
        thread = self._tracks.get(track)
        if thread is None:
            thread = self._tracks[track] = len(self._tracks) + 1
            self._note("M", RUN, thread, "thread_name", args={"name": track})
            self._note("M", RUN, thread, "thread_sort_index", args={"sort_index": thread})
        self._note("X", RUN, thread, name, ts=self._us(start), dur=self._us(end) - self._us(start))

    def attempt(self, group: str, name: str, start: float, end: float) -> None:
        event = {"cat": "attempt", "id": f"{group}#{name}"}
        self._note("b", ATTEMPTS, 1, f"{group}#{name}", ts=self._us(start), **event)
        self._note("e", ATTEMPTS, 1, f"{group}#{name}", ts=self._us(end), **event)

    def flush(self) -> None:
        """Write what was added. A disk that fails costs the trace, and not the run."""
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
        """End the array, so that any JSON reader accepts it."""
        self.activity.listener = self.activity.attempts = None
        self.flush()
        if self._file is not None:
            with self._file as file, suppress(OSError):
                file.seek(-2, os.SEEK_CUR)  # the last comma
                file.write(b"\n]\n")

    def _us(self, moment: float) -> int:
        return round((moment + self._offset_s) * 1e6)

    def _note(self, phase: str, process: int, thread: int, name: str, **more: Any) -> None:
        self._events.append({"ph": phase, "pid": process, "tid": thread, "name": name, **more})


@contextmanager
def tracing(path: Path | None) -> Iterator[Trace | None]:
    """Yield a trace inside the block; None without a path, and if the file can't be made."""
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


def _whole(content: bytes) -> bytes:
    """Return the content without the end of the array or an event torn by a crash, up to the last
    whole event."""
    content = content.removesuffix(b"\n]\n") + b",\n" if content.endswith(b"}\n]\n") else content
    return content[: max(content.rfind(b"},\n") + 1, 0)]
