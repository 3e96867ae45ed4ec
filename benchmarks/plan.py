"""Compare the predictions of `ratchet plan` with runs: peak memory, and seconds of a step.

    python benchmarks/plan.py [--probe 30] [--rounds 3]

Six recipes with reduced numbers of steps are each planned with a probe, and then run in a separate
process, with their evaluations. A number is the median over the rounds. The duration of a step is
the median over a stage's steps without the first. Processor time is shown too, because other
programs on the machine change it less than wall time.

Prints a table with a row for each stage.
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


def run_ratchet(*arguments: str) -> str:
    """Run a command of ratchet, and return its standard output."""
    process = subprocess.run(
        [sys.executable, "-m", "ratchet", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    if process.returncode:
        raise SystemExit(f"ratchet {' '.join(arguments)}:\n{process.stdout}{process.stderr}")
    return process.stdout


def predict(
    recipe: Path, overrides: tuple[str, ...], probe_s: float
) -> tuple[Numbers, dict[str, Numbers], list[int]]:
    """Return the plan's numbers of the run, those of each stage, and each stage's steps."""
    plan: dict[str, Any] = json.loads(
        run_ratchet("plan", str(recipe), *overrides, "--probe", str(probe_s), "--json")
    )
    stages = plan["stages"]
    computed_peak_bytes = max(stage["computed_peak_bytes"] for stage in stages)
    keys = ("step_s", "processor_s", "probed_steps")
    return (
        {"peak": plan["peak_bytes"], "by shapes": computed_peak_bytes},
        {stage["stage"]: {key: stage[key] for key in keys} for stage in stages},
        [stage["steps"] for stage in stages],
    )


def measure(
    recipe: Path, overrides: tuple[str, ...], steps: list[int]
) -> tuple[float, list[Numbers]]:
    """Run the recipe. Return the peak bytes, and the median numbers of each stage's steps."""
    with tempfile.TemporaryDirectory() as directory:
        run = Path(directory) / "run"
        run_ratchet("train", str(recipe), *overrides, "logging.progress=off", "--run-dir", str(run))
        peak = json.loads((run / "summary.json").read_text())["peak_mib"] * 2**20
        rows = [row for row in read_jsonl(run / "metrics.jsonl") if "time/step_s" in row]
    medians = []
    for end, count in zip(accumulate(steps), steps, strict=True):
        # The stage's first step is left out, because it warms up.
        stage_rows = [row for row in rows if end - count + 1 < row["step"] <= end]
        medians.append(
            {
                key: median(row[f"time/{key}"] for row in stage_rows)
                for key in ("step_s", "processor_s")
            }
        )
    return peak, medians


def compare(name: str, probe_s: float, rounds: int) -> list[str]:
    """Return the table's rows of one case, one for each stage."""
    file, overrides = CASES[name]
    recipe = ROOT / "ratchet" / "recipes" / file
    values = defaultdict[tuple[str, str], list[float]](list)  # by (stage or "", name of the number)
    stages, steps = dict[str, Numbers](), list[int]()
    for _ in range(rounds):
        run, stages, steps = predict(recipe, overrides, probe_s)
        peak, step_medians = measure(recipe, overrides, steps)
        for key, value in {**run, "measured": peak}.items():
            values["", key].append(value)
        for (stage, predicted), measured in zip(stages.items(), step_medians, strict=True):
            for key, value in predicted.items():
                values[stage, key].append(value)
            for key, value in measured.items():
                values[stage, f"measured {key}"].append(value)
    medians = {key: median(numbers) for key, numbers in values.items()}
    by_shapes, predicted_mib, measured_mib = (
        medians["", key] / 2**20 for key in ("by shapes", "peak", "measured")
    )
    memory = (
        f"{by_shapes:,.0f} | {predicted_mib:,.0f} | {measured_mib:,.0f} | "
        f"{predicted_mib / measured_mib:.2f}"
    )
    rows = []
    for stage, count in zip(stages, steps, strict=True):
        probed_steps, wall_s, cpu_s = (
            medians[stage, key] for key in ("probed_steps", "step_s", "processor_s")
        )
        measured_wall_s, measured_cpu_s = (
            medians[stage, "measured step_s"],
            medians[stage, "measured processor_s"],
        )
        time = (
            f"{wall_s:.3f} | {measured_wall_s:.3f} | {wall_s / measured_wall_s:.2f} | "
            f"{cpu_s / measured_cpu_s:.2f}"
        )
        rows.append(f"| {name}: {stage} | {probed_steps:.0f} of {count} | {memory} | {time} |")
        memory = " | | | "  # memory is that of the run, shown in its first row
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--probe", type=float, default=30, help="seconds of a probe")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    options = parser.parse_args()
    print(
        "| recipe: stage | probed steps | peak MiB: by shapes | with a probe | measured | ratio ",
        end="",
    )
    print("| seconds per step: predicted | measured | ratio | ratio of processor time |")
    print("|" + "---|" * 10)
    for name in options.cases:
        print("\n".join(compare(name, options.probe, options.rounds)), flush=True)


if __name__ == "__main__":
    main()
