"""What a plan predicted of a run, beside what became of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from statistics import median
from typing import Any

MIB = 2**20


def predicted(
    plan: Mapping[str, Any] | None, rows: Sequence[Mapping[str, Any]], summary: Mapping[str, Any] | None
) -> list[dict[str, Any]]:
    """plan: as in plan.json; None: nobody made one. rows: of metrics.jsonl. summary: as in summary.json, None before the run's
    end. A line each: `what`, its `unit`, `predicted` and `measured`, which is None where it is not known yet. A step is the
    median of a stage's but the first, which warms up, as in a probe; only a plan with a probe says something of it."""
    if plan is None:
        return []
    lines = [line("peak memory", "MiB", plan["peak_bytes"] / MIB, None if summary is None else summary.get("peak_mib"))]
    stages = plan["stages"]
    for stage, end in zip(stages, accumulate(stage["steps"] for stage in stages), strict=True):
        own = [row for row in rows if end - stage["steps"] + 1 < row["step"] <= end]
        for what, key in (("", "step_s"), (", on processors", "processor_s")):
            taken = [row[f"time/{key}"] for row in own if row.get(f"time/{key}") is not None]
            if key in stage:
                lines.append(line(f"{stage['stage']}: a step{what}", "s", stage[key], median(taken) if taken else None))
    return lines


def line(what: str, unit: str, guess: float, measured: float | None) -> dict[str, Any]:
    return {"what": what, "unit": unit, "predicted": guess, "measured": measured}
