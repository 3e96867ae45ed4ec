"""Show a stage's progress: a live line on a terminal, plain lines elsewhere, or nothing."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import fmean
from typing import Literal, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from ratchet.utils.terminal_text import make_console

Mode = Literal["auto", "live", "plain", "off"]
Observer = Callable[[int, Mapping[str, float | None]], None]

# Metrics for the headline: the first one that a step reports is shown.
HEADLINES = ("rollout/reward", "policy/loss")
# Metrics that reveal a diverging policy or an entropy collapse. For each label, the first metric
# that a step reports is shown.
SIDE_METRICS = {
    "KL": ("policy/kl/kl", "batch/kl/kl", "policy/policy_gradient/old_kl"),
    "entropy": ("policy/entropy/entropy",),
}
SPEED_METRIC = "time/tokens_per_s"
BARS = "▁▂▃▄▅▆▇█"
SPARKLINE_STEPS = 24  # number of steps in the sparkline


def sparkline(values: Sequence[float]) -> str:
    """Return one block character for each value, scaled between the lowest and the highest.

    If all values are equal, each gives the middle block.
    """
    if not values:
        return ""
    low, high = min(values), max(values)
    # Halve the values first, because the difference of two huge floats may overflow.
    span = high / 2 - low / 2
    if not span:
        return BARS[len(BARS) // 2] * len(values)
    shares = [(value / 2 - low / 2) / span for value in values]
    return "".join(BARS[min(int(share * len(BARS)), len(BARS) - 1)] for share in shares)


def draw_curves(curves: Sequence[Mapping[int, float]], width: int) -> list[str]:
    """Return a sparkline for each curve, all on one scale of steps and one of values.

    Args:
        curves: Values by step, finite; at least one curve has a value.
        width: Largest number of characters. A character is the mean of the values of equally many
            steps, and a blank where a curve has none of these steps.
    """
    steps = sorted(set().union(*curves))
    size = -(-len(steps) // width)
    parts = [steps[start : start + size] for start in range(0, len(steps), size)]
    rows: list[list[float | None]] = []
    for curve in curves:
        values_by_part = [[curve[step] for step in part if step in curve] for part in parts]
        rows.append([fmean(values) if values else None for values in values_by_part])
    blocks = iter(sparkline([value for row in rows for value in row if value is not None]))
    return ["".join(" " if value is None else next(blocks) for value in row) for row in rows]


def format_duration(seconds: float) -> str:
    """Format seconds as `42s`, `3m05s` or `2h07m`."""
    whole_seconds = round(seconds)
    if whole_seconds < 60:
        return f"{whole_seconds}s"
    if whole_seconds < 3600:
        return f"{whole_seconds // 60}m{whole_seconds % 60:02d}s"
    return f"{whole_seconds // 3600}h{whole_seconds % 3600 // 60:02d}m"


@dataclass
class ProgressState:
    """The state of a stage that the progress line shows.

    Steps are counted over the whole run: `after_step` are done when the stage begins or resumes,
    and `end_step` when it ends.
    """

    stage: str
    after_step: int
    end_step: int
    clock: Callable[[], float] = time.monotonic
    step: int = 0
    headline: str = ""
    recent_values: deque[float] = field(default_factory=lambda: deque(maxlen=SPARKLINE_STEPS))
    side_metrics: dict[str, float] = field(default_factory=dict)
    tokens_per_s: float | None = None

    def __post_init__(self) -> None:
        self.step = self.after_step
        self._started = self.clock()

    def observe(self, step: int, metrics: Mapping[str, float | None]) -> None:
        self.step = step
        self.tokens_per_s = metrics.get(SPEED_METRIC)
        reported = {
            label: [v for name in names if (v := metrics.get(name)) is not None]
            for label, names in SIDE_METRICS.items()
        }
        self.side_metrics = {label: values[0] for label, values in reported.items() if values}
        name = next((name for name in HEADLINES if name in metrics), "")
        value = metrics.get(name)
        if name != self.headline:
            self.headline = name
            self.recent_values.clear()
        if value is not None and math.isfinite(value):
            self.recent_values.append(value)

    @property
    def eta_s(self) -> float | None:
        """Return the seconds left at the mean pace so far; None before the first step.

        The pace includes evaluation and saving.
        """
        steps_done = self.step - self.after_step
        return (
            (self.clock() - self._started) / steps_done * (self.end_step - self.step)
            if steps_done
            else None
        )

    def format_headline(self, *, with_sparkline: bool) -> str:
        if not self.recent_values:
            return ""
        spark = f" {sparkline(self.recent_values)}" if with_sparkline else ""
        return f"{self.headline.rpartition('/')[2]}{spark} {self.recent_values[-1]:.3f}"

    def format_side_metrics(self) -> str:
        return "  ".join(f"{label} {value:.3g}" for label, value in self.side_metrics.items())

    def format_pace(self) -> str:
        speed = f"{self.tokens_per_s:,.0f} tokens/s" if self.tokens_per_s is not None else ""
        eta = (
            f"ETA {format_duration(self.eta_s)}"
            if self.eta_s is not None and self.step < self.end_step
            else ""
        )
        return "  ".join(filter(None, (speed, eta)))


class View(Protocol):
    def show(self, state: ProgressState) -> None: ...


class PlainView:
    """A view that prints one line every `every` steps, and one for the stage's last step."""

    def __init__(self, console: Console, every: int) -> None:
        self.console, self.every = console, every

    def show(self, state: ProgressState) -> None:
        if state.step % self.every and state.step != state.end_step:
            return
        texts = (
            f"{state.stage} {state.step}/{state.end_step}",
            state.format_headline(with_sparkline=False),
        )
        texts += (state.format_side_metrics(), state.format_pace())
        self.console.print(
            "  ".join(filter(None, texts)), markup=False, highlight=False, soft_wrap=True
        )


class LiveView:
    def __init__(self, progress: Progress, state: ProgressState) -> None:
        self.progress = progress
        self.supports_blocks = (progress.console.encoding or "").lower().startswith("utf")
        self.task = progress.add_task(
            state.stage, total=state.end_step, completed=state.step, headline="", side="", pace=""
        )

    def show(self, state: ProgressState) -> None:
        headline = state.format_headline(with_sparkline=self.supports_blocks)
        side, pace = state.format_side_metrics(), state.format_pace()
        self.progress.update(
            self.task, completed=state.step, headline=headline, side=side, pace=pace, refresh=True
        )


@contextmanager
def show_progress(
    stage: str,
    *,
    after_step: int,
    end_step: int,
    mode: Mode = "auto",
    every: int = 10,
    console: Console | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Observer]:
    """Yield an observer that shows each step's progress.

    Args:
        after_step: Number of steps of the run that are done when the stage begins or resumes.
        end_step: Number of steps of the run that are done when the stage ends.
        mode: "auto" is live on a terminal, else plain.
        every: Number of steps between two plain lines.
    """
    console = console or make_console()
    state = ProgressState(stage, after_step, end_step, clock)
    if mode == "off":
        yield state.observe
    elif mode == "live" or (mode == "auto" and console.is_terminal):
        columns = [
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
        ]
        columns += [
            TextColumn(f"{{task.fields[{name}]}}", markup=False)
            for name in ("headline", "side", "pace")
        ]
        with Progress(*columns, console=console, auto_refresh=False) as progress:
            yield _make_observer(state, LiveView(progress, state))
    else:
        yield _make_observer(state, PlainView(console, every))


def _make_observer(state: ProgressState, view: View) -> Observer:
    def observe(step: int, metrics: Mapping[str, float | None]) -> None:
        state.observe(step, metrics)
        view.show(state)

    return observe
