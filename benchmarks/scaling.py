"""How a GRPO step of Ratchet grows: batch, length, group size and model are doubled in turn, three
times each.

    python benchmarks/scaling.py [--size S] [--doublings 3] [--threads 2] [--rounds 3]

It begins with the GRPO step of grpo_step.py: 8 prompts x 16 answers of 32 tokens. Prints time, peak
memory and the share of each phase, and the exponent e of what is fitted as factor^e. Host phases
(packing, scheduling, rewards, recording) are marked where they take more than 5 % of the step;
whatever grows faster than the work's FLOPs is marked too.
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
FASTER = 0.15  # above the work's exponent; less is within what such short runs tell
TIMED_S = 1e-4
KNOBS = {
    "batch": ("--prompts", 8),
    "length": ("--new-tokens", 32),
    "group size": ("--group-size", 16),
    "model": ("--depth", 1),
}


def measure(knob: str, factor: int, chosen: Any) -> dict[str, Any]:
    """Medians over the rounds: seconds, MiB, GFLOP, seconds of each phase."""
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
    """Of the least squares line through the logarithms; 0 for what is too quick to be timed."""
    if len(points) < 2 or min(point[key] for point in points) < TIMED_S:
        return 0.0
    return statistics.linear_regression(
        *([math.log(point[name]) for point in points] for name in ("factor", key))
    ).slope


def marks(points: Sequence[dict[str, Any]]) -> list[str]:
    """What costs more than it should."""
    work, found = exponent(points, "gflop"), []
    for phase in HOST:
        share = max(point[phase] / point["step"] for point in points)
        if share > HOST_SHARE:
            found.append(f"{phase} takes {share:.0%} of a step")
    for name in ("step", "mib", *HOST):
        if exponent(points, name) > work + FASTER:
            found.append(
                f"{name} grows as factor^{exponent(points, name):.2f}, the work as "
                f"factor^{work:.2f}"
            )
    return found


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
