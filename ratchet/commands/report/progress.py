"""Read how far a run is, for the list of runs. Most lines of its metrics are not parsed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from ratchet.commands.report.metrics import MAX_LINE_BYTES, parse_row, to_float
from ratchet.errors import RunDirectoryError
from ratchet.observe.sinks import MAX_STEP, MAX_VALUE
from ratchet.runs.run_dir import RunDirectory
from ratchet.utils.safe_read import open_file

BLOCK_BYTES = 2**20  # metrics are read in blocks of this size
RECENT_STEPS = 20  # number of latest steps whose mean time predicts the remaining time
RESULT_NAMES = ("eval/accuracy", "eval/loss", "eval/min_reward", "eval/max_reward")
TIMESTAMP_BYTES = len("2026-01-01T00:00:00.000Z")  # at the beginning of run.log


class ProgressReader:
    """A reader of a run's progress. Each read continues where the last read of the file ended."""

    def __init__(self, directory: RunDirectory) -> None:
        self.directory = directory
        self._stages: list[tuple[str, int]] = []  # name and number of steps of each
        self._recipe_time: float | None = None  # when the recipe that was read had changed
        self._forget()

    def _forget(self) -> None:
        self._inode, self._position = 0, 0
        self._step = 0
        self._results: dict[str, float] = {}
        self._is_share = True
        self._recent_s: list[float] = []

    def read(self, *, read_recipe: bool = True) -> dict[str, Any]:
        """Return the run's stages, last step, number of steps, start and latest results.

        `is_share` says if the accuracy may be shown as a percentage: it is False once a reward of
        an evaluation was below 0 or above 1. `seconds_left` is the number of steps still to run
        times the mean time of the latest steps. Without `read_recipe`, the stages are those of the
        last read.
        """
        self._read_metrics()
        if read_recipe and self.has_new_recipe():
            self._read_stages()
        stages = self._stages
        steps = sum(n_steps for _, n_steps in stages)
        seconds_left = None
        if self._recent_s and steps:
            seconds_left = max(0, steps - self._step) * fmean(self._recent_s)
        return {
            "stages": stages,
            "step": self._step,
            "steps": steps or None,
            "started": self._read_start(),
            "seconds_left": seconds_left,
            "accuracy": self._results.get("eval/accuracy"),
            "loss": self._results.get("eval/loss"),
            "is_share": self._is_share,
        }

    def has_new_recipe(self) -> bool:
        """Return True if the recipe has changed since it was read, or was not read yet."""
        return self._get_recipe_time() != self._recipe_time

    def _get_recipe_time(self) -> float | None:
        try:
            return self.directory.config.stat().st_mtime
        except OSError:
            return None

    def _read_stages(self) -> None:
        """Read the stages; there are none if the recipe is damaged or absent."""
        self._recipe_time = self._get_recipe_time()
        try:
            self._stages = list_stages(self.directory.read_config())
        except RunDirectoryError:
            self._stages = []

    def _read_start(self) -> str | None:
        """Return the timestamp of the first line of run.log; None if there is none."""
        try:
            with open_file(self.directory.log) as file:
                text = file.read(TIMESTAMP_BYTES).decode("ascii", "replace")
        except OSError:
            return None
        return text if text[4:5] == "-" and text.endswith("Z") else None

    def _read_metrics(self) -> None:
        """Read the lines that were added to metrics.jsonl since the last call."""
        try:
            status = self.directory.metrics.stat()
            if status.st_ino != self._inode or status.st_size < self._position:
                self._forget()  # the run resumed from a checkpoint
                self._inode = status.st_ino
            if status.st_size == self._position:
                return
            with open_file(self.directory.metrics) as file:
                file.seek(self._position)
                while lines := file.readlines(BLOCK_BYTES):
                    complete = [line for line in lines if line.endswith(b"\n")]
                    self._position += sum(map(len, complete))
                    self._record_lines(complete)
                    if len(complete) < len(lines):
                        return
        except OSError:
            return

    def _record_lines(self, lines: Sequence[bytes]) -> None:
        """Record the results in new lines of metrics, and the times of the latest steps.

        Only lines with results and the last RECENT_STEPS lines are parsed.
        """
        for index, line in enumerate(lines):
            is_recent = index >= len(lines) - RECENT_STEPS
            has_result = any(b'"%s"' % name.encode() in line for name in RESULT_NAMES)
            is_read = (is_recent or has_result) and len(line) <= MAX_LINE_BYTES
            row = parse_row(line) if is_read else None
            if row is None:
                continue
            self._step = max(self._step, row["step"])
            results = _read_numbers(row, RESULT_NAMES)
            self._results |= results
            if results.get("eval/min_reward", 0.0) < 0 or results.get("eval/max_reward", 1.0) > 1:
                self._is_share = False
            if is_recent:
                seconds = _read_numbers(row, ("time/step_s",)).values()
                self._recent_s = [*self._recent_s, *seconds][-RECENT_STEPS:]


def list_stages(config: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Return name and number of steps of each stage of a resolved recipe."""
    stages = config.get("stages")
    return [
        (str(stage.get("name", index)), steps)
        for index, stage in enumerate(stages if isinstance(stages, list) else [])
        if isinstance(stage, Mapping)
        and type(steps := stage.get("steps")) is int
        and steps < MAX_STEP
    ]


def _read_numbers(row: Mapping[str, Any], names: Sequence[str]) -> dict[str, float]:
    """Return the numbers among some metrics of a row, without damaged ones."""
    numbers = {name: to_float(row.get(name)) for name in names}
    return {
        name: number
        for name, number in numbers.items()
        if number is not None and abs(number) < MAX_VALUE
    }
