"""Time a small model's training steps with one, two and `auto` threads, alone and beside programs
that use every core.

    python benchmarks/threads.py [--rounds 5] [--competing 2]

The settings take turns in each round. Prints the ratios of their times to that of one thread.
"2 threads, spinning" uses OpenMP's default of waiting in a busy loop, which Ratchet replaces.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

RECIPE = """
name: threads
model: {preset: tiny}
tokenizer: {kind: characters, alphabet: "0123456789="}
environment: {kind: sorting, digits: 3}
sampling: {temperature: 0.7, max_new_tokens: 4}
evaluation: {tasks: 0}
logging: {tensorboard: false, trace: false, system: false}
record: {every: 0}
checkpoint: {every: 0}
stages:
  - {name: sft, algorithm: {kind: sft}, steps: 40, batch_size: 64, optimizer: {lr: 2e-3}}
  - {name: grpo, algorithm: {kind: grpo, group_size: 8}, steps: 15, batch_size: 32}
"""
SPINS = "300000"  # libgomp's default
SETTINGS = {
    "1 thread": ("threads=1", {}),
    "2 threads": ("threads=2", {}),
    "auto": ("threads=auto", {}),
    "2 threads, spinning": ("threads=2", {"GOMP_SPINCOUNT": SPINS}),
}
BUSY = "while True: pass"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--competing", type=int, default=os.cpu_count() or 1, help="number of competing programs"
    )
    options = parser.parse_args()
    for competing in (0, options.competing):
        # Seconds of a step by stage, of each round of each setting.
        seconds: dict[str, list[dict[str, float]]] = {name: [] for name in SETTINGS}
        with busy_programs(competing):
            for _ in range(options.rounds):
                for name, (override, environ) in SETTINGS.items():
                    seconds[name].append(measure_steps(override, environ))
        print(f"\n{competing} competing programs: a step's time divided by that with 1 thread")
        for name, rounds in seconds.items():
            ratios = {
                stage: median(
                    step_s[stage] / one_thread_s[stage]
                    for step_s, one_thread_s in zip(rounds, seconds["1 thread"], strict=True)
                )
                for stage in ("sft", "grpo")
            }
            print(f"  {name:<22}sft {ratios['sft']:.2f}, grpo {ratios['grpo']:.2f}")


@contextmanager
def busy_programs(count: int) -> Iterator[None]:
    programs = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(count)]
    try:
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


def measure_steps(override: str, environ: dict[str, str]) -> dict[str, float]:
    """Return the median seconds of a step of each stage."""
    with tempfile.TemporaryDirectory() as folder:
        recipe, run = Path(folder) / "recipe.yaml", Path(folder) / "run"
        recipe.write_text(RECIPE)
        subprocess.run(
            [sys.executable, "-m", "ratchet", "train", recipe, override, "--run-dir", run],
            env={**os.environ, **environ},
            stdout=subprocess.DEVNULL,
            check=True,
        )
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [row["time/step_s"] for row in rows if "time/step_s" in row]
    # The first three steps of each stage are warm-up.
    return {"sft": median(steps[3:40]), "grpo": median(steps[43:])}


if __name__ == "__main__":
    main()
