"""The chart `curve.svg`: reward and held-out accuracy over the steps of a run.

It is plain SVG that follows the viewer's light or dark theme.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

from ratchet.observe.sinks import read_jsonl
from ratchet.observe.write_files import replace_text

WIDTH, HEIGHT = 720, 220  # size of one panel, in SVG units
LEFT, RIGHT, TOP, BOTTOM = 64, 96, 34, 34  # margins of a panel
MAX_POINTS = 400  # of one line; longer runs are averaged over buckets of steps

STYLE = """
text { font: 13px system-ui, sans-serif; fill: #444 } .title { font-weight: 600; fill: #111 }
.grid { stroke: #ddd } .line { fill: none; stroke-width: 2; stroke-linejoin: round }
.s0 { stroke: #1668c1 } .s1 { stroke: #c2570c } .s0.dot, .s0.label { fill: #1668c1; stroke: none }
.s1.dot, .s1.label { fill: #c2570c; stroke: none }
@media (prefers-color-scheme: dark) {
  text { fill: #bbb } .title { fill: #eee } .grid { stroke: #3a3a3a }
  .s0 { stroke: #6cb0ff } .s1 { stroke: #ffa25e }
  .s0.dot, .s0.label { fill: #6cb0ff } .s1.dot, .s1.label { fill: #ffa25e }
}
"""


class Point(NamedTuple):
    step: float
    value: float


@dataclass(frozen=True)
class Panel:
    """One chart of several series over the same steps.

    Attributes:
        series: Label of each metric, by metric name.
        dots: True draws a dot at each point, for series with few points.
        span: Range that the vertical axis includes if all values lie in it.
    """

    title: str
    series: Mapping[str, str]
    dots: bool = False
    span: tuple[float, float] | None = None


PANELS = (
    Panel("Reward of the training rollouts", {"rollout/reward": "mean"}),
    Panel(
        "Held-out accuracy",
        {"eval/accuracy": "greedy", "eval/sampled": "sampled"},
        dots=True,
        span=(0.0, 1.0),
    ),
    Panel("Held-out loss", {"eval/loss": "loss"}, dots=True),
)


def write_curve(metrics_path: Path, svg_path: Path) -> bool:
    """Draw a run's `metrics.jsonl` as an SVG file.

    Return False and write no file if there is nothing to draw. Raises OSError.
    """
    svg = render_curve(read_jsonl(metrics_path))
    if svg:
        replace_text(svg_path, svg)
    return bool(svg)


def render_curve(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the panels as one SVG, below each other and over the same steps.

    Return "" if no row has any of their metrics.
    """
    drawn_panels = [(panel, lines) for panel in PANELS if (lines := _collect_lines(panel, rows))]
    if not drawn_panels:
        return ""
    steps = [point.step for _, lines in drawn_panels for line in lines.values() for point in line]
    step_range = (min(steps), max(steps))
    height = HEIGHT * len(drawn_panels)
    body = "\n".join(
        f'<g transform="translate(0 {HEIGHT * index})">'
        f"{''.join(_draw(panel, lines, step_range))}</g>"
        for index, (panel, lines) in enumerate(drawn_panels)
    )
    title = escape(" and ".join(panel.title for panel, _ in drawn_panels))
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">\n'
        f"<title>{title}</title>\n<style>{STYLE}</style>\n{body}\n</svg>\n"
    )


def _collect_lines(panel: Panel, rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Point]]:
    """Return the points of each series by label, without empty series."""
    lines = {
        label: [
            Point(row["step"], row[name]) for row in rows if isinstance(row.get(name), int | float)
        ]
        for name, label in panel.series.items()
    }
    return {label: downsample(points) for label, points in lines.items() if points}


def downsample(points: Sequence[Point]) -> list[Point]:
    """Return at most MAX_POINTS points, each the mean of a bucket of neighbours."""
    size = math.ceil(len(points) / MAX_POINTS)
    buckets = [points[start : start + size] for start in range(0, len(points), size)]
    return [
        Point(sum(p.step for p in b) / len(b), sum(p.value / len(b) for p in b)) for b in buckets
    ]


def _draw(
    panel: Panel, lines: Mapping[str, Sequence[Point]], step_range: tuple[float, float]
) -> Iterator[str]:
    values = [point.value for line in lines.values() for point in line]
    low, high = min(values), max(values)
    if panel.span is not None and panel.span[0] <= low and high <= panel.span[1]:
        low, high = panel.span
    bottom = HEIGHT - BOTTOM
    yield f'<text class="title" x="{LEFT}" y="18">{escape(panel.title)}</text>'
    for share in (0.0, 0.5, 1.0):
        y, value = bottom - share * (bottom - TOP), low + share * (high - low)
        yield f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value:.3g}</text>'
    for step, anchor in zip(step_range, ("start", "end"), strict=True):
        x = _scale(step, step_range, LEFT, WIDTH - RIGHT)
        yield f'<text x="{x:.1f}" y="{HEIGHT - 12}" text-anchor="{anchor}">step {step:.0f}</text>'
    for index, (label, line) in enumerate(lines.items()):
        pixels = [
            (
                _scale(p.step, step_range, LEFT, WIDTH - RIGHT),
                _scale(p.value, (low, high), bottom, TOP),
            )
            for p in line
        ]
        yield (
            f'<polyline class="line s{index}" '
            f'points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in pixels)}"/>'
        )
        if panel.dots or len(pixels) == 1:
            yield from (
                f'<circle class="dot s{index}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in pixels
            )
        # Stack the labels at the right edge, so that labels of lines that end together don't
        # overlap.
        y = TOP + 4 + 18 * index
        yield (
            f'<text class="label s{index}" x="{WIDTH - RIGHT + 8}" y="{y}">{escape(label)} '
            f"{line[-1].value:.3g}</text>"
        )


def _scale(value: float, source: tuple[float, float], start: float, end: float) -> float:
    """Map a value from the source range to [start, end]; an empty range maps to the middle."""
    low, high = source
    return start + (value - low) / (high - low) * (end - start) if high > low else (start + end) / 2
