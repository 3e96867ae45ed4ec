"""The command `ratchet watch`: a run in the terminal, drawn anew while it trains.

It shows the curves of the current stage, the latest recorded attempts, alarms and, on the machine
that trains, what the run waits for. All of it is read from the run's files, as the page of
`ratchet ui` reads them.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ratchet.commands.report.runs import RunReader
from ratchet.errors import DataError, RunDirectoryError
from ratchet.observe.progress import SIDE_METRICS, format_duration, sparkline
from ratchet.observe.sinks import MAX_VALUE
from ratchet.runs.live_status import query_status
from ratchet.utils.terminal_text import make_console, shorten_text

# Curve -> the metrics that it may show; the first one that the stage has is taken.
CURVES: Mapping[str, Sequence[str]] = {
    "reward": ("rollout/reward",),
    "accuracy": ("eval/accuracy",),
    "held-out loss": ("eval/loss",),
    "loss": ("policy/loss",),
    **SIDE_METRICS,
    "attempt tokens": ("rollout/length_mean",),
    "failed share": ("rollout/failed_share",),
    "seconds a step": ("time/step_s",),
    "tokens/s": ("time/tokens_per_s",),
}
CURVE_WIDTH = 36  # characters
N_SAMPLES = 4
SAMPLE_CHARS = 300  # characters of a prompt and of an answer that are shown
N_ALARMS = 3
NO_MESSAGE: Mapping[str, Any] = {"content": "", "parts": None}
SAMPLE_COLUMNS = ["step", "reward", "outcome", "messages"]


def watch_run(path: Path, *, once: bool, every_s: float) -> None:
    """Draw a run until it ends, or until Ctrl-C.

    Args:
        path: The run directory.
        once: Print one frame and return.
        every_s: Seconds between two frames.

    Raises:
        RunNotFound: `path` holds no run.
    """
    frames, console = RunFrames(path), make_console()
    if once:
        console.print(frames.draw())
        return
    with (
        suppress(KeyboardInterrupt),
        Live(frames.draw(), console=console, auto_refresh=False, vertical_overflow="crop") as live,
    ):
        while frames.run.read_state() == "running":
            time.sleep(every_s)
            live.update(frames.draw(), refresh=True)


class RunFrames:
    """The frames of a run. Each frame reads what the run wrote since the last one."""

    def __init__(self, path: Path, *, query_waits: Callable[[Path], str] = query_status) -> None:
        self.path = path
        self.run = RunReader(path)
        self.query_waits = query_waits
        self._forget()

    def _forget(self) -> None:
        self._steps: list[int] = []
        self._values: dict[str, list[float]] = {
            name: [] for names in CURVES.values() for name in names
        }

    def draw(self) -> RenderableType:
        """Return the frame of the run as it is now."""
        progress, state = self.run.progress.read(), self.run.read_state()
        self._read_metrics(progress["step"])
        parts: list[RenderableType] = [_draw_head(self.run.name, state, progress)]
        first_step = find_stage(progress["stages"], progress["step"])[2]
        parts.append(self._draw_curves(first_step))
        parts += self._draw_samples()
        parts += [
            Text(f"alarm at step {alarm['step']}: {alarm['message']}", style="bold red")
            for alarm in self.run.read_alarms()[:N_ALARMS]
        ]
        if state == "running":
            parts.append(Panel(Text(self._describe_waits()), title="now", title_align="left"))
        return Group(*parts)

    def _read_metrics(self, last_step: int) -> None:
        """Add the steps that were written since the last frame."""
        if self._steps and self._steps[-1] > last_step:  # the run resumed from a checkpoint
            self._forget()
        has_more = True
        while has_more:
            columns, has_more = self.run.metrics.read_part(self._steps[-1] if self._steps else -1)
            steps = columns["step"].astype(int).tolist()
            self._steps += steps
            for name, values in self._values.items():
                values += columns.get(name, np.full(len(steps), np.nan)).tolist()

    def _draw_curves(self, first_step: int) -> Table:
        """Return a row for each curve of the stage whose first step is `first_step`.

        Curves that are 0 throughout are left out.
        """
        table = Table(box=None, pad_edge=False)
        for name in ("", "", "first", "last"):
            table.add_column(name, justify="right" if name else "left", no_wrap=True)
        start = next(
            (i for i, step in enumerate(self._steps) if step >= first_step), len(self._steps)
        )
        for label, names in CURVES.items():
            curves = (np.array(self._values[name][start:]) for name in names)
            finite = next(
                (values for curve in curves if len(values := curve[np.abs(curve) < MAX_VALUE])),
                None,
            )
            if finite is None or not finite.any():
                continue
            bars = sparkline(shrink_curve(finite, CURVE_WIDTH))
            table.add_row(label, bars, f"{finite[0]:,.3g}", f"{finite[-1]:,.3g}")
        return table

    def _draw_samples(self) -> list[RenderableType]:
        """Return the latest recorded attempts; [] if the run records none."""
        try:
            record = self.run.rollouts.record
            step = max(record.steps, default=None)
            rows = [] if step is None else record.table(SAMPLE_COLUMNS, steps=[step]).to_pylist()
        except DataError as error:  # a file was removed or replaced just now
            return [Text(str(error))]
        if not rows:
            return []
        table = Table(title=f"attempts of step {step}", title_justify="left", expand=True)
        table.add_column("reward", justify="right", no_wrap=True)
        table.add_column("outcome", no_wrap=True)
        table.add_column("prompt", overflow="fold", ratio=2)
        table.add_column("answer", overflow="fold", ratio=3)
        # Attempts of different groups lie apart.
        for row in rows[:: max(1, len(rows) // N_SAMPLES)][:N_SAMPLES]:
            *prompt, answer = map(_write_text, row["messages"] or [NO_MESSAGE])
            reward = row["reward"]
            table.add_row(
                "-" if reward is None or not math.isfinite(reward) else f"{reward:.3f}",
                row["outcome"] or "-",
                Text(shorten_text("\n".join(prompt), SAMPLE_CHARS)),
                Text(shorten_text(answer, SAMPLE_CHARS)),
            )
        return [table]

    def _describe_waits(self) -> str:
        try:
            return self.query_waits(self.path)
        except RunDirectoryError as error:  # it is on another machine, or has just ended
            return str(error)


def _write_text(message: Mapping[str, Any]) -> str:
    """Return the text of a recorded message, with "(image)" for an image."""
    if message["content"] is not None:
        return message["content"]
    return "".join(
        part["value"] if part["type"] == "text" else f"({part['type']})"
        for part in message["parts"] or ()
    )


def find_stage(stages: Sequence[tuple[str, int]], step: int) -> tuple[int, str, int]:
    """Return number, name and first step of the stage in which a run is; steps count from 1.

    A run without readable stages is in the stage (1, "", 1).
    """
    ends = list(itertools.accumulate(n_steps for _, n_steps in stages))
    for number, ((name, n_steps), end) in enumerate(zip(stages, ends, strict=True), 1):
        if step < end or number == len(stages):
            return number, name, end - n_steps + 1
    return 1, "", 1


def shrink_curve(values: NDArray[np.float64], width: int) -> list[float]:
    """Return at most `width` means of equally long parts of a curve."""
    if len(values) <= width:
        return values.tolist()
    return [float(part.mean()) for part in np.array_split(values, width)]


def _draw_head(name: str, state: str, progress: Mapping[str, Any]) -> RenderableType:
    """Return the lines with the run's name, state, stage, steps and remaining time."""
    step = progress["step"]
    steps = progress["steps"]
    left_s = progress["seconds_left"]
    number, stage, _ = find_stage(progress["stages"], step)
    facts = [name, state]
    if stage:
        facts.append(f"stage {number} of {len(progress['stages'])}: {stage}")
    facts.append(f"step {step:,} of {steps:,}" if steps else f"step {step:,}")
    if state == "running" and left_s is not None:
        facts.append(f"{format_duration(left_s)} left")
    if progress["accuracy"] is not None:
        accuracy = progress["accuracy"]
        is_share = progress["is_share"]
        facts.append(f"accuracy {accuracy:.1%}" if is_share else f"held-out reward {accuracy:.3f}")
    bar = ProgressBar(total=steps or 1, completed=min(step, steps or 0))
    return Group(Text("  ·  ".join(facts), style="bold"), bar)
