"""Show runs in notebooks: curves, a group's attempts with coloured tokens, and the whole report.

Jupyter, VS Code and marimo display an object through its method `_repr_html_`. All text of a model
is escaped, and the report runs in a frame that can't reach the notebook.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from ratchet.commands.report import MAX_TOKENS
from ratchet.commands.report.page import make_report_page
from ratchet.commands.report.runs import RunReader
from ratchet.commands.report.watch import CURVES, shrink_curve
from ratchet.errors import ConfigError, DataError
from ratchet.observe.progress import sparkline
from ratchet.utils.terminal_text import escape_controls

Colouring = Literal["logprob", "advantage", "ratio", "value", "share"]
WIDTH, HEIGHT = 220, 70  # size of a curve, in pixels
REPORT_HEIGHT = 800  # pixels
TERMINAL_WIDTH = 40  # characters of a curve in plain text
RED, GREEN = "220, 60, 40", "40, 150, 70"
UNLIKELY_NATS = 5.0  # a token of this log-probability, negated, has the full colour
LOG_RATIO = 0.5  # an importance ratio of exp(0.5) has the full colour


class RunView:
    """A run on disk, which a notebook shows as the curves of its main metrics.

    Args:
        run: The run directory. The run may be under way.

    Raises:
        RunNotFound: The directory holds no run.
    """

    def __init__(self, run: str | Path) -> None:
        self._reader = RunReader(Path(run))

    def read_curves(self) -> dict[str, tuple[NDArray[np.int64], NDArray[np.float64]]]:
        """Return each main metric's steps and finite values, by the curve's name.

        Curves without values, or that are 0 throughout, are left out.
        """
        columns, _ = self._reader.metrics.read_part(max_cells=None)
        curves: dict[str, tuple[NDArray[np.int64], NDArray[np.float64]]] = {}
        for label, names in CURVES.items():
            for name in names:
                values = columns.get(name, np.empty(0))
                is_finite = np.isfinite(values)
                if label not in curves and values[is_finite].any():
                    steps = columns["step"].astype(np.int64)
                    curves[label] = steps[is_finite], values[is_finite]
        return curves

    def show_group(
        self, step: int, index: int = 0, *, color_by: Colouring = "logprob"
    ) -> GroupView:
        """Return a recorded group, to be displayed.

        Args:
            step: The step.
            index: Position of the group in the step; from 0.
            color_by: The number that colours each token.

        Raises:
            DataError: The step or the group is not in the record.
            ConfigError: `color_by` is none of the numbers.
        """
        if color_by not in get_args(Colouring):
            raise ConfigError(f"color_by={color_by!r}: use one of {', '.join(get_args(Colouring))}")
        rollouts = self._reader.rollouts
        if step not in rollouts.record.steps:
            steps = sorted(rollouts.record.steps)
            known = f"it has steps {steps[0]} to {steps[-1]}" if steps else "it has none"
            raise DataError(f"step {step} is not in the record: {known}")
        groups = rollouts.record.table(["group_index"], steps=[step])["group_index"].to_pylist()
        names = list(dict.fromkeys(groups))
        if not 0 <= index < len(names):
            raise DataError(f"step {step} has {len(names)} groups: index {index} is none of them")
        positions = [i for i, name in enumerate(groups) if name == names[index]]
        return GroupView(rollouts.read_details(step, positions), color_by)

    def show_report(self, *, rollouts: int = 100) -> ReportView:
        """Return the run's report page, to be displayed inside the notebook.

        Args:
            rollouts: Maximum number of rollouts whose texts are included.

        Raises:
            ConfigError: `rollouts` is negative.
        """
        if rollouts < 0:
            raise ConfigError(f"rollouts={rollouts}: use 0 or more")
        page = make_report_page([self._reader], rollouts=rollouts, max_tokens=MAX_TOKENS)
        return ReportView(page)

    def __repr__(self) -> str:
        lines = [escape_controls(f"{self._reader.name} ({self._reader.read_state()})")]
        for name, (_, values) in self.read_curves().items():
            bars = sparkline(shrink_curve(values, TERMINAL_WIDTH))
            lines.append(f"{name:16}{bars:{TERMINAL_WIDTH}} {values[0]:.3g} -> {values[-1]:.3g}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        title = html.escape(f"{self._reader.name} ({self._reader.read_state()})")
        curves = "".join(
            _draw_curve(name, steps, values) for name, (steps, values) in self.read_curves().items()
        )
        return f"<div><b>{title}</b><div style='display:flex;flex-wrap:wrap'>{curves}</div></div>"


class GroupView:
    """The attempts of one group, with each token coloured by one of its numbers.

    Attributes:
        attempts: What the report shows of each attempt: `facts`, `messages`, `tokens`, ...
    """

    def __init__(self, attempts: Sequence[Mapping[str, Any]], color_by: Colouring) -> None:
        self.attempts = attempts
        self._color_by: Colouring = color_by

    def __repr__(self) -> str:
        return "\n".join(
            escape_controls(f"{_describe_attempt(attempt)}: {''.join(attempt['tokens']['text'])}")
            for attempt in self.attempts
        )

    def _repr_html_(self) -> str:
        name = self._color_by
        numbers = [x for attempt in self.attempts for x in attempt["tokens"].get(name) or ()]
        largest = max((abs(x) for x in numbers if x is not None), default=0.0)
        if not numbers:
            note = f"The record has no {name} of these tokens."
        else:
            note = f"Colour: {name}. A token under the pointer shows its value."
        attempts = "".join(_draw_attempt(attempt, name, largest) for attempt in self.attempts)
        return f"<div><small>{note}</small>{attempts}</div>"


class ReportView:
    """The report page of a run, displayed in a frame.

    Attributes:
        page: The page, as `ratchet report` writes it.
    """

    def __init__(self, page: str) -> None:
        self.page = page

    def __repr__(self) -> str:
        return f"a report of {len(self.page):,} characters, which a notebook displays"

    def _repr_html_(self) -> str:
        return (
            f"<iframe sandbox='allow-scripts' style='width:100%;height:{REPORT_HEIGHT}px;border:0' "
            f'srcdoc="{html.escape(self.page)}"></iframe>'
        )


def _draw_curve(name: str, steps: NDArray[np.int64], values: NDArray[np.float64]) -> str:
    """Return a figure of one metric: its curve, and its first and last value."""
    low, high = float(values.min()), float(values.max())
    x = (steps - steps[0]) / max(1, steps[-1] - steps[0]) * WIDTH
    y = HEIGHT - (values - low) / ((high - low) or 1.0) * HEIGHT
    points = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True))
    caption = f"{html.escape(name)}: {values[0]:.3g} &rarr; {values[-1]:.3g}"
    return (
        f"<figure style='margin:8px;width:{WIDTH}px'><figcaption>{caption}</figcaption>"
        f"<svg width='{WIDTH}' height='{HEIGHT + 4}' viewBox='0 -2 {WIDTH} {HEIGHT + 4}'>"
        "<polyline fill='none' stroke='currentColor' stroke-width='1.5' "
        f"points='{points}'/></svg></figure>"
    )


def _describe_attempt(attempt: Mapping[str, Any]) -> str:
    facts = attempt["facts"]
    parts = [
        f"{name} {facts[name]:.3g}"
        for name in ("reward", "advantage")
        if facts.get(name) is not None
    ]
    return ", ".join([*parts, facts.get("outcome") or "no outcome"])


def _draw_attempt(attempt: Mapping[str, Any], name: Colouring, largest: float) -> str:
    """Return the heading and the tokens of an attempt.

    Args:
        attempt: The attempt.
        name: The number that colours the tokens.
        largest: The largest absolute value of that number in the group.
    """
    tokens = attempt["tokens"]
    values = tokens.get(name) or [None] * len(tokens["text"])
    spans = [
        _draw_token(text, f"{name} {value}", _choose_color(name, value, largest))
        if value is not None and version >= 0
        else f"<span style='opacity:0.6'>{html.escape(text)}</span>"
        for text, value, version in zip(tokens["text"], values, tokens["version"], strict=True)
    ]
    return (
        f"<div style='margin:8px 0'><small>{html.escape(_describe_attempt(attempt))}</small>"
        f"<div style='white-space:pre-wrap;font-family:monospace'>{''.join(spans)}</div></div>"
    )


def _draw_token(text: str, title: str, color: str) -> str:
    style = f"background:{color}"
    return f"<span title='{html.escape(title)}' style='{style}'>{html.escape(text)}</span>"


def _choose_color(name: Colouring, value: float, largest: float) -> str:
    """Return a CSS colour, more opaque for a larger amount; green above 0 and red below."""
    if name == "logprob":
        amount = value / UNLIKELY_NATS
    elif name == "ratio":
        amount = math.log(max(value, 1e-30)) / LOG_RATIO
    else:
        amount = value / (largest or 1.0)
    opacity = 0.75 * min(1.0, abs(amount))
    return f"rgba({GREEN if amount > 0 else RED}, {opacity:.2f})"
