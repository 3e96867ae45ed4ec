"""Sinks receive the metrics of each step.

A sink never ends a run: one that fails is dropped with one warning.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Protocol

from ratchet.errors import MissingDependency, suggest_install
from ratchet.observe.metrics import StepMetrics
from ratchet.observe.reducers import Histogram
from ratchet.observe.write_files import AppendFile, replace_text
from ratchet.types import Group
from ratchet.utils import failpoints
from ratchet.utils.safe_read import parse_json

logger = logging.getLogger(__name__)

Metrics = Mapping[str, float | None]
# A line of a later step is damaged. A double represents every smaller integer exactly.
MAX_STEP = 2**53
MAX_VALUE = 1e300  # larger values are damaged: sums of a few of them may be infinite
SINK_ERRORS = (OSError, RuntimeError, ValueError)


def get_histograms(metrics: Metrics) -> Mapping[str, Histogram]:
    """Return the histograms of the step, for a sink that can show them."""
    return metrics.histograms if isinstance(metrics, StepMetrics) else {}


def get_groups(metrics: Metrics) -> Sequence[Group]:
    """Return the groups that the step trained on, for a sink that can show attempts."""
    return metrics.groups if isinstance(metrics, StepMetrics) else ()


class Sink(Protocol):
    """A receiver of each step's metrics, where None stands for a number that was not finite.

    A sink that can't write raises OSError, RuntimeError or ValueError; an adapter of an outside
    service converts that service's errors to OSError.
    """

    def write(self, step: int, metrics: Metrics) -> None: ...
    def close(self) -> None: ...


class Sinks:
    """Several sinks. One that fails is dropped with one warning, and training continues."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = list(sinks)

    def write(self, step: int, metrics: Metrics) -> None:
        for sink in list(self._sinks):
            try:
                sink.write(step, metrics)
            except SINK_ERRORS as error:
                logger.warning(
                    "%s failed at step %d and is disabled: %r",
                    type(sink).__name__,
                    step,
                    error,
                )
                self._sinks.remove(sink)

    def close(self) -> None:
        for sink in self._sinks:
            try:
                sink.close()
            except SINK_ERRORS as error:
                logger.warning("%s did not close: %r", type(sink).__name__, error)
        self._sinks = []


class JsonlSink:
    """A sink that writes `metrics.jsonl`: one line of strict JSON a step, in order.

    A line is `{"step": n, name: number or null, ...}`. It is written to the operating system whole
    or not at all. So it survives a crash of the process, but not a power failure.

    keep_through: the step that the run resumes after. Lines of later steps, and one torn by a
      crash, are removed, so that there is exactly one line a step. The default removes all.
    """

    def __init__(self, path: Path, *, keep_through: int = -1) -> None:
        kept_rows = read_jsonl(path, last_step=keep_through)
        replace_text(path, "".join(_format_line(row) for row in kept_rows))
        self._last_step = kept_rows[-1]["step"] if kept_rows else -1
        self._file = AppendFile(path)
        if missing_steps := sorted(
            set(range(1, keep_through + 1)) - {row["step"] for row in kept_rows}
        ):
            logger.warning(
                "%s lacks %d of the %d steps up to the resumed checkpoint (%s), because it was "
                "changed or could not be written. Training is not affected, but charts have gaps",
                path,
                len(missing_steps),
                keep_through,
                _format_ranges(missing_steps),
            )

    def write(self, step: int, metrics: Metrics) -> None:
        """Append one line.

        Raise OSError if it can't be written, and ValueError if the step is not after the last one
        or a number is not finite.
        """
        if step <= self._last_step:
            raise ValueError(
                f"step {step} after step {self._last_step}: a step has exactly one line"
            )
        line = _format_line({"step": step, **metrics}).encode()
        failpoints.point("metrics.begin")
        self._file.append(line)
        failpoints.point("metrics.written")
        self._last_step = step

    def close(self) -> None:
        self._file.close()


def read_jsonl(path: Path, *, last_step: int = MAX_STEP) -> list[dict[str, Any]]:
    """Return the rows of a `metrics.jsonl`. See `iter_jsonl`."""
    return list(iter_jsonl(path, last_step=last_step))


def iter_jsonl(path: Path, *, last_step: int = MAX_STEP) -> Iterator[dict[str, Any]]:
    """Yield the rows of a `metrics.jsonl` by increasing step; none if there is no such file.

    Damaged lines, and steps out of order, are left out.

    last_step: the last step to read. Later ones are no reason to leave out others behind them.
    """
    if not path.is_file():  # reading a pipe would block
        return
    step_before = None
    with path.open("rb") as file:
        for line in file:
            try:
                row = parse_json(line, parse_constant=_reject_constant)
            except ValueError:  # torn by a crash, or not UTF-8
                continue
            step = row.get("step") if isinstance(row, dict) else None
            if (
                type(step) is int
                and step <= last_step
                and (step_before is None or step > step_before)
            ):
                step_before = step
                yield row


def _format_ranges(steps: Sequence[int]) -> str:
    """Return increasing numbers as `3-5, 9`, at most four ranges."""
    known_steps = set(steps)
    first_steps = [step for step in steps if step - 1 not in known_steps]
    last_steps = [step for step in steps if step + 1 not in known_steps]
    ranges = [
        f"{first}-{last}" if first < last else str(first)
        for first, last in zip(first_steps, last_steps, strict=True)
    ]
    return ", ".join(ranges[:4]) + (", ..." if len(ranges) > 4 else "")


def _reject_constant(constant: str) -> float:
    raise ValueError(f"{constant} is not JSON")


def _format_line(row: Mapping[str, Any]) -> str:
    return json.dumps(row, allow_nan=False) + "\n"


def has_tensorboard() -> bool:
    """Return True if the package tensorboard is installed."""
    return find_spec("tensorboard") is not None


def open_tensorboard(
    setting: bool | Literal["auto"], directory: Path, *, keep_through: int = -1
) -> TensorBoardSink | None:
    """Return the sink that `logging.tensorboard` selects; None for no sink.

    "auto" without TensorBoard gives no sink, and a line in the log. Raises like `TensorBoardSink`.
    """
    if setting == "auto" and not has_tensorboard():
        logger.info(
            "TensorBoard is not installed, so there is no tensorboard/. To get it: %s.",
            suggest_install("tensorboard"),
        )
        return None
    return TensorBoardSink(directory, keep_through=keep_through) if setting else None


class TensorBoardSink:
    """A sink that writes scalars (float32) and histograms as TensorBoard event files.

    Construction raises MissingDependency without TensorBoard. Events are written immediately, with
    TensorBoard's `RecordWriter`. Its `EventFileWriter` is not used, because it imports TensorFlow
    if that is installed, and writes from a thread.

    keep_through: the step that the run resumes after. TensorBoard hides later steps of earlier
      files.
    """

    def __init__(self, directory: Path, *, keep_through: int = -1) -> None:
        if not has_tensorboard():
            raise MissingDependency(
                "tensorboard", extra="tensorboard", needed_for="logging.tensorboard: true"
            )
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        events: Any = event_pb2  # generated at import: a type checker sees empty modules
        summaries: Any = summary_pb2
        self._event = events.Event
        self._summary = summaries.Summary
        self._histogram = summaries.HistogramProto
        directory.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads the files of a directory in the order of their names. A counter keeps
        # that order even if the clock goes back.
        count = sum(1 for _ in directory.glob("events.out.tfevents.*"))
        name = f"events.out.tfevents.{count:010d}.{socket.gethostname()}.{os.getpid()}"
        self._writer = RecordWriter((directory / name).open("xb"))
        self._write(file_version="brain.Event:2")
        self._write(
            step=keep_through + 1, session_log=events.SessionLog(status=events.SessionLog.START)
        )

    def write(self, step: int, metrics: Metrics) -> None:
        values = [
            self._summary.Value(tag=name, simple_value=value)
            for name, value in metrics.items()
            if value is not None
        ]
        values += [
            self._summary.Value(tag=name, histo=self._encode_histogram(histogram))
            for name, histogram in get_histograms(metrics).items()
        ]
        self._write(step=step, summary=self._summary(value=values))

    def close(self) -> None:
        self._writer.close()

    def _encode_histogram(self, histogram: Histogram) -> Any:
        """Return a histogram as TensorBoard's proto.

        TensorBoard stores only each bin's upper end. A bin of count 0 that ends at the first edge
        is therefore put in front.
        """
        limits, counts = histogram.edges, [0.0, *map(float, histogram.counts)]
        extremes = {"min": histogram.lowest, "max": histogram.highest}
        sums = {
            "num": float(histogram.count),
            "sum": histogram.total,
            "sum_squares": histogram.squares,
        }
        return self._histogram(**extremes, **sums, bucket_limit=limits, bucket=counts)

    def _write(self, **fields: Any) -> None:
        self._writer.write(self._event(wall_time=time.time(), **fields).SerializeToString())
        self._writer.flush()
