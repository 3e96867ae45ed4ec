"""Try and measure everything on one accelerator: the one command for a real GPU.

    python benchmarks/gpu/run.py [--results gpu.json] [--limit-s 1500] [--python PEERS/bin/python]

Parts run in turn, each in a process of its own: correctness against the CPU; decoding (with vLLM),
training (MFU) and a GRPO step (with TRL) at 0.6 B and 1.7 B; weight pushes; runs in one process, with a
generator on a second device, and colocated with vLLM; memory over many steps. After each part the results
are written. A part that would pass the limit is stopped; the same command then goes on where it stopped,
and passes over what has a result. At the end it prints the tables. `--toy` tries all parts at toy size,
also on the pretended accelerator (tests/rehearsal/cuda_benchmarks.py).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
GRACE_S = 10.0  # from SIGTERM to SIGKILL
CASES = ("decoding", "training", "grpo")
PLACEMENTS = {
    "one process": [],
    "split": ["generator={kind: workers, workers: 1, worker: {kind: engine}}"],
    "colocated with vLLM": [
        "generator={kind: vllm, kv_cache_gib: 1, max_context: 1024}",
        "cluster={kind: local, colocated: true}",
    ],
}


def list_parts(arguments: argparse.Namespace) -> dict[str, list[str]]:
    """Return the command of each part, by name."""
    checks, toy = [sys.executable, str(HERE / "device_checks.py")], arguments.toy
    sizes = {"tiny": "T"} if toy else {"qwen3-0.6b": "qwen3-0.6b", "qwen3-1.7b": "qwen3-1.7b"}
    preset = next(iter(sizes))
    parts = {"correctness": [*checks, "correctness"]}
    for case in CASES:
        for size in sizes.values():
            command = [sys.executable, str(HERE / "qwen3.py"), "--case", case, "--size", size]
            command += ["--python", arguments.python]
            small = ["--shrink", "64", "--rounds", "1", "--steps", "1", "--threads", "1", "--ours"]
            parts[f"{case} {size}"] = command + (small if toy else ["--rounds", "2"])
    parts |= {f"push {size}": [*checks, "push", "--size", size] for size in sizes}
    # vLLM has kernels of its own, which the pretended accelerator lacks.
    for name in [name for name in PLACEMENTS if not (toy and "vLLM" in name)]:
        parts[f"run: {name}"] = [sys.executable, __file__, "--placement", name, "--size", preset]
    steps = ["--steps", "4"] if toy else []
    parts["memory"] = [*checks, "memory", "--size", preset, *steps]
    return parts


def run_part(command: Sequence[str], limit_s: float) -> dict[str, Any]:
    """Run a part, and return its result; {"stopped": ...} at the limit, {"error": ...} if it fails.

    The last line of its output that is a JSON object is the result.
    """
    start = time.monotonic()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        output, errors = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        # Its session has only processes that it started.
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.communicate(timeout=GRACE_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        return {"stopped": f"at the limit, after {time.monotonic() - start:.0f} s"}
    lines = [line for line in output.splitlines() if line.startswith("{")]
    if process.returncode or not lines:
        return {"error": errors[-2000:] or output[-2000:], "status": process.returncode}
    return {**json.loads(lines[-1]), "seconds": round(time.monotonic() - start, 1)}


def make_recipe(size: str) -> dict[str, Any]:
    """Return the recipe that is trained in every placement."""
    return {
        "device": "cuda",
        "threads": 1,
        "model": {"preset": size},
        "tokenizer": {"kind": "characters"},
        "environment": {"kind": "arithmetic"},
        "sampling": {"max_new_tokens": 8 if size == "tiny" else 128},
        "evaluation": {"tasks": 4, "every": 0},
        "algorithm": {"kind": "grpo", "group_size": 8, "equal_rewards": "keep"},
        "batch_size": 8,
        "steps": 4,
        "optimizer": {"lr": 1e-6},
    }


def run_placement(name: str, size: str) -> dict[str, Any]:
    """Train a few steps by a recipe in a placement; return the median seconds of a step."""
    import torch

    if name == "split" and torch.cuda.device_count() < 2:
        return {"skipped": "needs two devices"}
    if "vLLM" in name and find_spec("vllm") is None:
        return {"skipped": "needs vLLM"}
    with tempfile.TemporaryDirectory() as directory:
        file, run = Path(directory) / "recipe.yaml", Path(directory) / "run"
        file.write_text(json.dumps(make_recipe(size)), encoding="utf-8")
        words = ["train", str(file), "--run-dir", str(run), *PLACEMENTS[name]]
        process = subprocess.run(
            [sys.executable, "-m", "ratchet", *words],
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
        )
        if process.returncode:
            sys.exit(process.stdout[-1000:] + process.stderr[-1000:])
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    seconds = [row["time/step_s"] for row in rows if "time/step_s" in row]
    return {"median_step_s": statistics.median(seconds[1:]), "steps": len(seconds)}


def is_finished(result: dict[str, Any]) -> bool:
    return not ("stopped" in result or "error" in result)


def make_table(results: dict[str, dict[str, Any]]) -> str:
    """Return a Markdown table with one row for each part."""
    lines = ["| Part | Seconds | Result |", "|---|---|---|"]
    for name, result in results.items():
        shown = {key: value for key, value in result.items() if key not in ("seconds", "command")}
        if "rows" in result:
            shown = {
                row: f"{numbers['median']:g} {result['unit']}"
                for row, numbers in result["rows"].items()
            }
            ours, floor = result["rows"]["Ratchet"]["median"], result["floor"]
            # Of the measured product rate (training: MFU) or of the memory's bandwidth (decoding).
            shown["share of the floor"] = f"{min(ours / floor, floor / ours):.0%}"
            shown |= result["missing"]
        text = ", ".join(f"{key} {value}" for key, value in shown.items()).replace("\n", " ")
        lines.append(f"| {name} | {result.get('seconds', '')} | {text[:400]} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, default=Path("gpu.json"))
    parser.add_argument("--limit-s", type=float, default=1500.0, help="of the whole command")
    parser.add_argument("--python", default=sys.executable, help="python with vLLM and TRL")
    parser.add_argument("--toy", action="store_true", help="try all parts at toy size")
    parser.add_argument("--placement", choices=PLACEMENTS, help=argparse.SUPPRESS)
    parser.add_argument("--size", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.placement:
        print(json.dumps(run_placement(arguments.placement, arguments.size)))
        return
    end = time.monotonic() + arguments.limit_s
    results = json.loads(arguments.results.read_text()) if arguments.results.exists() else {}
    for name, command in list_parts(arguments).items():
        if name in results and is_finished(results[name]):
            continue
        left_s = end - time.monotonic()
        if left_s <= 0:
            break
        results[name] = run_part(command, left_s)
        draft = arguments.results.with_suffix(".part")
        draft.write_text(json.dumps(results, indent=1), encoding="utf-8")
        draft.replace(arguments.results)
        print(f"{name}: {json.dumps(results[name])[:300]}", flush=True)
    print(f"\n{make_table(results)}")
    missing = [
        name for name in list_parts(arguments) if not is_finished(results.get(name, {"stopped": 1}))
    ]
    if missing:
        sys.exit(f"not finished: {', '.join(missing)}. The same command goes on there.")


if __name__ == "__main__":
    main()
