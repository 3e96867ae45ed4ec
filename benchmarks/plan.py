"""What `ratchet plan` predicts against what runs take: peak memory, and seconds of a step.

python benchmarks/plan.py [--probe 30] [--rounds 3]

Each stage of six recipes, of fewer steps: planned with a probe, then run in a process of its own,
evaluations and all, in turn. Of each number the median over rounds, and of a run's steps but the
first of a stage. Others may use the machine: processor time is there too, which they change less.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

from ratchet.observe.sinks import read_jsonl

ROOT = Path(__file__).resolve().parents[1]
LARGER = (
    "model={preset: tiny, overrides: {hidden_size: 384, n_layers: 6, n_heads: 6, n_kv_heads: "
    "6, intermediate_size: 1024}}"
)
CASES = {
    "quick-start": ("quickstart.yaml", ("stages.grpo.steps=40",)),
    "dpo": ("dpo.yaml", ("stages.dpo.steps=50",)),
    "ppo": (
        "ppo.yaml",
        (
            "stages.ppo.batch_size=128",
            "stages.ppo.steps=16",
        ),
    ),
    "lora": ("lora.yaml", ("stages.grpo.steps=32",)),
    "reward model": ("reward_model.yaml", ("stages.reward_model.steps=60",)),
    "quick-start, 9 M parameters": (
        "quickstart.yaml",
        (
            LARGER,
            "stages.sft.batch_size=32",
            "stages.sft.steps=24",
            "stages.grpo.batch_size=8",
            "stages.grpo.steps=16",
        ),
    ),
}
Numbers = dict[str, float]


def ratchet(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "ratchet", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"ratchet {' '.join(arguments)}:\n{done.stdout}{done.stderr}")
    return done.stdout


def predicted(
    recipe: Path, overrides: tuple[str, ...], probe_s: float
) -> tuple[Numbers, dict[str, Numbers], list[int]]:
    """(of the run, of each stage, their steps)"""
    plan: dict[str, Any] = json.loads(
        ratchet("plan", str(recipe), *overrides, "--probe", str(probe_s), "--json")
    )
    stages = plan["stages"]
    shapes = max(stage["shape_bytes"] for stage in stages)
    kept = ("step_s", "processor_s", "probed_steps")
    of_stages = {stage["stage"]: {key: stage[key] for key in kept} for stage in stages}
    return (
        {"peak": plan["peak_bytes"], "by shapes": shapes},
        of_stages,
        [stage["steps"] for stage in stages],
    )


def measured(
    recipe: Path, overrides: tuple[str, ...], steps: list[int]
) -> tuple[float, list[Numbers]]:
    """(bytes of the run at its largest, the median step of each stage)"""
    with tempfile.TemporaryDirectory() as place:
        run = Path(place) / "run"
        ratchet("train", str(recipe), *overrides, "logging.progress=off", "--run-dir", str(run))
        peak = json.loads((run / "summary.json").read_text())["peak_mib"] * 2**20
        rows = [row for row in read_jsonl(run / "metrics.jsonl") if "time/step_s" in row]
    middles = []
    for end, count in zip(accumulate(steps), steps, strict=True):
        own = [row for row in rows if end - count + 1 < row["step"] <= end]  # the first warms up
        middles.append(
            {key: median(row[f"time/{key}"] for row in own) for key in ("step_s", "processor_s")}
        )
    return peak, middles


def compare(name: str, probe_s: float, rounds: int) -> list[str]:
    """Rows of the table."""
    file, overrides = CASES[name]
    recipe, found = ROOT / "recipes" / file, defaultdict[tuple[str, str], list[float]](list)
    stages, steps = dict[str, Numbers](), list[int]()
    for _ in range(rounds):
        run, stages, steps = predicted(recipe, overrides, probe_s)
        peak, middles = measured(recipe, overrides, steps)
        for key, value in {**run, "measured": peak}.items():
            found["", key].append(value)
        for (stage, numbers), took in zip(stages.items(), middles, strict=True):
            for key, value in numbers.items():
                found[stage, key].append(value)
            for key, value in took.items():
                found[stage, f"measured {key}"].append(value)
    middle = {key: median(values) for key, values in found.items()}
    shapes, guess, real = (middle["", key] / 2**20 for key in ("by shapes", "peak", "measured"))
    memory = f"{shapes:,.0f} | {guess:,.0f} | {real:,.0f} | {guess / real:.2f}"
    rows = []
    for stage, count in zip(stages, steps, strict=True):
        tried, wall, own = (middle[stage, key] for key in ("probed_steps", "step_s", "processor_s"))
        wall_took, own_took = (
            middle[stage, "measured step_s"],
            middle[stage, "measured processor_s"],
        )
        time = f"{wall:.3f} | {wall_took:.3f} | {wall / wall_took:.2f} | {own / own_took:.2f}"
        rows.append(f"| {name}: {stage} | {tried:.0f} of {count} | {memory} | {time} |")
        memory = " | | | "
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--probe", type=float, default=30)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    chosen = parser.parse_args()
    print(
        "| recipe: stage | steps probed | peak MiB: by shapes | with a probe | measured | ratio ",
        end="",
    )
    print("| s a step: predicted | measured | ratio | of processor time |")
    print("|" + "---|" * 10)
    for name in chosen.cases:
        print("\n".join(compare(name, chosen.probe, chosen.rounds)), flush=True)


if __name__ == "__main__":
    main()
