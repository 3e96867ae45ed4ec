"""The numbers of a run's `metrics.jsonl`, read on from where a page stopped, a bounded part at a
time.

A run of a week has some hundred thousand steps, and a page requests the new ones every few seconds.
So no row stays in memory, only the file positions of some steps, and a few numbers of each step
that a plan is compared with.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ratchet.utils.safe_read import open_file

MOST_CELLS = 2**19  # steps times metrics of one part: 4 MiB
MOST_LINE = 2**20  # bytes of a line, some 20,000 metrics; a longer one is damaged
LARGEST_STEP = 2**53  # a double holds every whole number below
MOST_PLACES = 64  # in the file, of which it is known which step ends there
TIMES = ("time/step_s", "time/processor_s")


class MetricsPart(NamedTuple):
    """Columns over some steps, "step" among them, NaN where a step has no such number. has_more:
    True if further steps exist."""

    columns: dict[str, NDArray[np.float64]]
    has_more: bool


class MetricsFile:
    """A reader of one `metrics.jsonl`, which may grow, or be rewritten when its run resumes from a
    checkpoint."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # Inode and size when it was read last.
        self._seen = (0, 0)
        # step -> where in the file its line ends
        self._places: dict[int, int] = {}
        self._times = {name: array("d") for name in ("step", *TIMES)}

    def part(self, after: int = -1, *, most_cells: int | None = MOST_CELLS) -> MetricsPart:
        """Return the steps after `after`, as many as `most_cells` allow (None: all), at least
        one."""
        columns = {"step": array("d")}
        last, end, has_more = after, 0, False
        for step, place, row in self._rows(after):
            count = len(columns["step"])
            if count and most_cells is not None and (count + 1) * len(columns) > most_cells:
                has_more = True
                break
            last, end = step, place
            for name, value in row.items():
                if (number := _number(value)) is not None:
                    column = columns.setdefault(name, array("d"))
                    column.extend([math.nan] * (count - len(column)))
                    column.append(number)
        if end:
            self._remember(last, end)
        return MetricsPart(_arrays(columns), has_more)

    def times(self) -> Mapping[str, NDArray[np.float64]]:
        """Return the columns `step` and `TIMES` of all steps: 24 bytes of each stay in memory."""
        self._forget_if_rewritten()
        steps, end = self._times["step"], 0
        for step, end, row in self._rows(int(steps[-1]) if steps else -1):  # noqa: B007
            steps.append(step)
            for name in TIMES:
                number = _number(row.get(name))
                self._times[name].append(
                    math.nan if number is None or math.isinf(number) else number
                )
        if end:
            self._remember(int(steps[-1]), end)
        return _arrays(self._times)

    def _rows(self, after: int) -> Iterator[tuple[int, int, Mapping[str, Any]]]:
        """Yield (step, end of its line, row) in increasing order of steps. Damaged lines are left
        out."""
        self._forget_if_rewritten()
        start = max((step for step in self._places if step <= after), default=None)
        end = 0 if start is None else self._places[start]
        try:
            file = open_file(self.path)
        except OSError:
            return
        with file:
            file.seek(end)
            while line := file.readline(MOST_LINE):
                end += len(line)
                row = _row(line)
                if row is not None and row["step"] > after:
                    after = row["step"]
                    yield after, end, row

    def _forget_if_rewritten(self) -> None:
        try:
            stat = self.path.stat()
            now = (stat.st_ino, stat.st_size)
        except OSError:
            now = (0, 0)
        if now[0] != self._seen[0] or now[1] < self._seen[1]:
            self._places.clear()
            self._times = {name: array("d") for name in self._times}
        self._seen = now

    def _remember(self, step: int, end: int) -> None:
        self._places.pop(step, None)
        while len(self._places) >= MOST_PLACES:
            self._places.pop(next(iter(self._places)))
        self._places[step] = end


def _row(line: bytes) -> dict[str, Any] | None:
    """Return a line's row; None for one that is not yet written to its end, was torn by a crash, or
    is no step's."""
    if not line.endswith(b"\n"):
        return None
    try:
        row = json.loads(line, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    step = row.get("step") if isinstance(row, dict) else None
    return row if type(step) is int and abs(step) < LARGEST_STEP else None


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is not JSON")


def _number(value: Any) -> float | None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _arrays(columns: Mapping[str, array[float]]) -> dict[str, NDArray[np.float64]]:
    """Return columns of equal length; those that end before are filled up."""
    length = len(columns["step"])
    arrays = {name: np.full(length, np.nan) for name in columns}
    for name, column in columns.items():
        arrays[name][: len(column)] = column
    return arrays
