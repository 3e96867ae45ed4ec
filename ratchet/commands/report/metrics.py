"""Read a run's `metrics.jsonl` in parts of bounded size, each after a given step.

A run of a week has some hundred thousand steps, and a page requests the new steps every few
seconds. So the metrics do not stay in memory, except TIMES of each step, which are compared with
the plan. The file positions of some steps are remembered too.
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

from ratchet.observe.sinks import MAX_STEP
from ratchet.utils.safe_read import open_file

MAX_CELLS = 2**19  # steps times metrics in one part: 4 MiB
MAX_LINE_BYTES = 2**20  # some 20,000 metrics; a longer line is damaged
MAX_POSITIONS = 64  # maximum number of steps whose file positions are remembered
TIMES = ("time/step_s", "time/processor_s")


class MetricsPart(NamedTuple):
    """The metrics of consecutive steps."""

    columns: dict[str, NDArray[np.float64]]
    """One column for each metric and for "step"; NaN if a step lacks the metric."""
    has_more: bool
    """True if further steps exist."""


class MetricsFile:
    """A reader of a `metrics.jsonl` that may grow, or be rewritten when its run resumes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # Inode and size of the file when it was last read.
        self._inode_and_size = (0, 0)
        # step -> file offset of the end of its line
        self._positions: dict[int, int] = {}
        self._times = {name: array("d") for name in ("step", *TIMES)}

    def read_part(self, after: int = -1, *, max_cells: int | None = MAX_CELLS) -> MetricsPart:
        """Return the metrics of the steps after step `after`.

        Args:
            after: Return only later steps.
            max_cells: Maximum number of steps times metrics. The first step is always returned.
                None returns all steps.
        """
        columns = {"step": array("d")}
        last_step, last_position, has_more = after, 0, False
        for step, position, row in self._iter_rows(after):
            n_steps = len(columns["step"])
            if n_steps and max_cells is not None and (n_steps + 1) * len(columns) > max_cells:
                has_more = True
                break
            last_step, last_position = step, position
            for name, value in row.items():
                if (number := to_float(value)) is not None:
                    column = columns.setdefault(name, array("d"))
                    column.extend([math.nan] * (n_steps - len(column)))
                    column.append(number)
        if last_position:
            self._remember(last_step, last_position)
        return MetricsPart(_to_arrays(columns), has_more)

    def read_times(self) -> Mapping[str, NDArray[np.float64]]:
        """Return the columns `step` and `TIMES` of all steps, kept in memory (24 bytes a step)."""
        self._forget_if_rewritten()
        steps, last_position = self._times["step"], 0
        known_step = int(steps[-1]) if steps else -1
        for step, last_position, row in self._iter_rows(known_step):  # noqa: B007
            steps.append(step)
            for name in TIMES:
                number = to_float(row.get(name))
                self._times[name].append(
                    math.nan if number is None or math.isinf(number) else number
                )
        if last_position:
            self._remember(int(steps[-1]), last_position)
        return _to_arrays(self._times)

    def _iter_rows(self, after: int) -> Iterator[tuple[int, int, Mapping[str, Any]]]:
        """Yield (step, file offset of its line's end, row) of steps after `after`, in order.

        Damaged lines are skipped.
        """
        self._forget_if_rewritten()
        known_step = max((step for step in self._positions if step <= after), default=None)
        position = 0 if known_step is None else self._positions[known_step]
        try:
            file = open_file(self.path)
        except OSError:
            return
        with file:
            file.seek(position)
            while line := file.readline(MAX_LINE_BYTES):
                position += len(line)
                row = parse_row(line)
                if row is not None and row["step"] > after:
                    after = row["step"]
                    yield after, position, row

    def _forget_if_rewritten(self) -> None:
        """Drop what is remembered if the file was replaced or became shorter."""
        try:
            stat = self.path.stat()
            inode_and_size = (stat.st_ino, stat.st_size)
        except OSError:
            inode_and_size = (0, 0)
        if (
            inode_and_size[0] != self._inode_and_size[0]
            or inode_and_size[1] < self._inode_and_size[1]
        ):
            self._positions.clear()
            self._times = {name: array("d") for name in self._times}
        self._inode_and_size = inode_and_size

    def _remember(self, step: int, position: int) -> None:
        """Remember the file offset of the end of a step's line; keep at most MAX_POSITIONS."""
        self._positions.pop(step, None)
        while len(self._positions) >= MAX_POSITIONS:
            self._positions.pop(next(iter(self._positions)))
        self._positions[step] = position


def parse_row(line: bytes) -> dict[str, Any] | None:
    """Return the row of a line; None if the line is incomplete, damaged or has no valid step."""
    if not line.endswith(b"\n"):
        return None
    try:
        row = json.loads(line, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return None
    step = row.get("step") if isinstance(row, dict) else None
    return row if type(step) is int and abs(step) < MAX_STEP else None


def _refuse_constant(constant: str) -> float:
    raise ValueError(f"{constant} is not JSON")


def to_float(value: Any) -> float | None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _to_arrays(columns: Mapping[str, array[float]]) -> dict[str, NDArray[np.float64]]:
    """Return the columns as arrays, padded with NaN to equal length."""
    length = len(columns["step"])
    arrays = {name: np.full(length, np.nan) for name in columns}
    for name, column in columns.items():
        arrays[name][: len(column)] = column
    return arrays
