"""Measure how the cost of a GRPO step grows with batch, length, group size and model.

Each of the four is doubled three times while the others stay as in grpo_step.py: 8 prompts x 16
answers of 32 tokens.

    python benchmarks/scaling.py [--size S] [--doublings 3] [--threads 2] [--rounds 3]

Prints the time, the peak memory and each phase's share of a step, and for each number the exponent e
of the fit factor^e. A "!" marks host phases (packing, scheduling, rewards, recording) above 5 % of a
step, and times and memory that grow faster than the work's FLOPs.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from grpo_step import OURS
from side_by_side import Case, make, options, run, shared

HOST = ("pack", "scheduling", "rewards", "recording")
HOST_SHARE = 0.05
WARMUP = 6  # steps: the first of a process are slower
# Excess over the work's exponent from which a number is marked; less may be noise of short runs.
EXPONENT_TOLERANCE = 0.15
MIN_TIMED = 1e-4  # smaller numbers (seconds) are too short to be measured
# Option and initial value of each quantity that is doubled.
KNOBS = {
    "batch": ("--prompts", 8),
    "length": ("--new-tokens", 32),
    "group size": ("--group-size", 16),
    "model": ("--depth", 1),
}


def measure(knob: str, factor: int, chosen: Any) -> dict[str, Any]:
    """Return medians over the rounds: seconds of a step and of each phase, MiB and GFLOP."""
    workload = {
        option: str(start * (factor if name == knob else 1))
        for name, (option, start) in KNOBS.items()
    }
    case = Case(
        knob, (OURS,), maker=replace(Case.maker, arguments=("--depth", workload.pop("--depth")))
    )
    with tempfile.TemporaryDirectory() as model:
        make(case, chosen, model)
        arguments = [*itertools.chain(*workload.items()), "--warmup", str(WARMUP)]
        lines = [
            run(OURS, [*shared(chosen, model, seed, OURS), *arguments], chosen.python)
            for seed in range(chosen.rounds)
        ]
    phases = {
        name: statistics.median(line["phases_s"][name] for line in lines)
        for name in lines[0]["phases_s"]
    }
    seconds, memory = (
        statistics.median(line[key] for line in lines) for key in ("median_s", "peak_rss_mib")
    )
    return {"factor": factor, "step": seconds, "mib": memory, "gflop": lines[0]["gflop"], **phases}


def exponent(points: Sequence[dict[str, Any]], key: str) -> float:
    """Return the slope of the least-squares line through the logarithms.

    0 if a value is too short to be measured, or if there is only one point.
    """
    if len(points) < 2 or min(point[key] for point in points) < MIN_TIMED:
        return 0.0
    return statistics.linear_regression(
        *([math.log(point[name]) for point in points] for name in ("factor", key))
    ).slope


def marks(points: Sequence[dict[str, Any]]) -> list[str]:
    """Return a text for each number that costs too much or grows too fast."""
    work_exponent, texts = exponent(points, "gflop"), list[str]()
    for phase in HOST:
        share = max(point[phase] / point["step"] for point in points)
        if share > HOST_SHARE:
            texts.append(f"{phase} takes {share:.0%} of a step")
    for name in ("step", "mib", *HOST):
        if exponent(points, name) > work_exponent + EXPONENT_TOLERANCE:
            texts.append(
                f"{name} grows as factor^{exponent(points, name):.2f}, the work as "
                f"factor^{work_exponent:.2f}"
            )
    return texts


def table(knob: str, points: Sequence[dict[str, Any]]) -> str:
    phases = [key for key in points[0] if key not in ("factor", "step", "mib", "gflop")]
    lines = [
        f"{knob:12}{'ms':>9}{'MiB':>8}{'GFLOP':>9}" + "".join(f"{name:>12}" for name in phases)
    ]
    for p in points:
        shares = "".join(f"{p[name] / p['step']:12.1%}" for name in phases)
        lines.append(
            f"x{p['factor']:<11}{1000 * p['step']:9.0f}{p['mib']:8.0f}{p['gflop']:9.2f}{shares}"
        )
    fitted = [exponent(points, key) for key in ("step", "mib", "gflop", *phases)]
    widths = (9, 8, 9, *(12 for _ in phases))
    lines.append(
        f"{'exponent':12}" + "".join(f"{e:{w}.2f}" for e, w in zip(fitted, widths, strict=True))
    )
    return "\n".join([*lines, *(f"! {mark}" for mark in marks(points))])


if __name__ == "__main__":
    parser = options(__doc__ or "")
    parser.add_argument("--doublings", type=int, default=3)
    parser.add_argument("--knobs", nargs="+", choices=KNOBS, default=list(KNOBS))
    parser.set_defaults(rounds=3, ours=True)
    chosen = parser.parse_args()
    for knob in chosen.knobs:
        points = [measure(knob, 2**i, chosen) for i in range(chosen.doublings + 1)]
        print(
            json.dumps(
                {"scaling": knob, "size": chosen.size, "threads": chosen.threads, "points": points}
            )
        )
        print(f"\n{table(knob, points)}\n", flush=True)
