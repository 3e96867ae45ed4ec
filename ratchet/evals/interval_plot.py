"""Draw confidence intervals as text, for reports in a file and on the terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

WIDTH = 41  # characters of the scale; odd, so that a scale around 0 has 0 in the middle
MAX_NAME_CHARS = 24


class Interval(NamedTuple):
    """A value with its confidence interval."""

    name: str
    low: float
    value: float
    high: float


def draw_intervals(intervals: Sequence[Interval], *, low: float, high: float) -> str:
    """Return a Markdown code block with a line for each interval, all on one scale.

    Intervals with a number that is not finite are left out, and parts beyond the scale are drawn
    at its ends. Return "" if no interval is left.

    Args:
        intervals: The intervals.
        low: The number at the left end of the scale.
        high: The number at its right end, more than `low`.
    """
    drawn = [interval for interval in intervals if all(map(math.isfinite, interval[1:]))]
    if not drawn:
        return ""
    names = [_clean_name(interval.name) for interval in drawn]
    margin = max(map(len, names))
    lines = [
        f"{name:{margin}}  {_draw_interval(interval, low, high)}"
        for name, interval in zip(names, drawn, strict=True)
    ]
    low_label, middle_label, high_label = (
        f"{number:g}" for number in (low, (low + high) / 2, high)
    )
    scale = f"{low_label:{(WIDTH - len(middle_label)) // 2}}{middle_label}"
    lines.append(f"{'':{margin}}  {scale}{high_label:>{WIDTH - len(scale)}}")
    return "\n".join(["```text", *lines, "```"])


def _draw_interval(interval: Interval, low: float, high: float) -> str:
    start, point, end = (
        round(min(max((number - low) / (high - low), 0.0), 1.0) * (WIDTH - 1))
        for number in interval[1:]
    )
    cells = ["·"] * WIDTH
    cells[start : end + 1] = "─" * (end + 1 - start)
    cells[WIDTH // 2] = "┼" if start < WIDTH // 2 < end else "┊"
    cells[start], cells[end] = "├", "┤"
    cells[point] = "●"
    return "".join(cells)


def _clean_name(name: str) -> str:
    """Return a name on one line that can't end the code block."""
    return " ".join(name.replace("`", "'").split())[:MAX_NAME_CHARS]
