"""Read a run's `metrics.jsonl` in parts of bounded size, each after a given step.

A run of a week has some hundred thousand steps, and a page requests the new ones every few seconds.
So no row stays in memory, only the file positions of some steps, and `TIMES` of each step, which
are compared with the plan.
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

MOST_CELLS = 2**19  # steps times metrics in one part: 4 MiB
MOST_LINE = 2**20  # bytes of a line, some 20,000 metrics; a longer line is damaged
LARGEST_STEP = 2**53  # a double represents every smaller integer exactly
MOST_PLACES = 64  # maximum number of steps whose file positions are remembered
TIMES = ("time/step_s", "time/processor_s")


class MetricsPart(NamedTuple):
    """The metrics of consecutive steps.

    Attributes:
        columns: One column for each metric and for "step"; NaN if a step lacks the metric.
        has_more: True if further steps exist.
    """

    columns: dict[str, NDArray[np.float64]]
    has_more: bool


class MetricsFile:
    """A reader of a `metrics.jsonl` that may grow, or be rewritten when its run resumes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # Inode and size of the file when it was last read.
        self._seen = (0, 0)
        # step -> file offset of the end of its line
        self._places: dict[int, int] = {}
        self._times = {name: array("d") for name in ("step", *TIMES)}

    def part(self, after: int = -1, *, most_cells: int | None = MOST_CELLS) -> MetricsPart:
        """Return the metrics of the steps after step `after`.

        Args:
            after: Return only later steps.
            most_cells: Maximum number of steps times metrics, though one step always fits; None:
                all steps.
        """
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
        """Return the columns `step` and `TIMES` of all steps, kept in memory (24 bytes a step)."""
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
        """Yield (step, file offset of its line's end, row) of later steps, in increasing order.

        Damaged lines are skipped.
        """
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
    """Return the row of a line; None if the line is incomplete, damaged or has no valid step."""
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
    """Return the columns, padded with NaN to equal length."""
    length = len(columns["step"])
    arrays = {name: np.full(length, np.nan) for name in columns}
    for name, column in columns.items():
        arrays[name][: len(column)] = column
    return arrays
