"""Compare a plan's predictions for a run with the measurements."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

MIB = 2**20


def compare_with_plan(
    plan: Mapping[str, Any],
    times: Mapping[str, NDArray[np.float64]],
    summary: Mapping[str, Any] | None,
) -> list[dict[str, Any]]:
    """Return a line for each prediction: `what`, its `unit`, `predicted` and `measured`.

    `measured` is None while unknown. The measured time of a step is the median over a stage's steps
    without the first, which is warm-up. Times are predicted only by a plan with a
    probe, a short measured run.

    Args:
        plan: The content of plan.json.
        times: The columns `step`, `time/step_s` and `time/processor_s` of metrics.jsonl; NaN if a
            step has no value.
        summary: The content of summary.json; None before the run's end.
    """
    lines = [
        make_line(
            "peak memory",
            "MiB",
            plan["peak_bytes"] / MIB,
            None if summary is None else summary.get("peak_mib"),
        )
    ]
    stages = plan["stages"]
    for stage, last_step in zip(
        stages, accumulate(stage["steps"] for stage in stages), strict=True
    ):
        in_stage = (times["step"] > last_step - stage["steps"] + 1) & (times["step"] <= last_step)
        for what, key in (("a step", "step_s"), ("processor time of a step", "processor_s")):
            seconds = times[f"time/{key}"][in_stage]
            seconds = seconds[~np.isnan(seconds)]
            if key in stage:
                measured = float(np.median(seconds)) if len(seconds) else None
                lines.append(make_line(f"{stage['stage']}: {what}", "s", stage[key], measured))
    return lines


def make_line(what: str, unit: str, predicted: float, measured: float | None) -> dict[str, Any]:
    return {"what": what, "unit": unit, "predicted": predicted, "measured": measured}
