"""Runs every driver of this folder on one random model, and prints their JSON lines and a table.

    python benchmarks/peers/all.py [--python OTHER_ENVIRONMENT/bin/python] [--size S] [--steps 8] [--threads 2]

Without the peers it says how to get them and stops, successfully: they are an extra.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
CASES = (
    ("TRL GRPO step, tuned", "trl_grpo.py", ()),
    ("TRL GRPO step, tuned, bfloat16", "trl_grpo.py", ("--bf16",)),
    ("TRL GRPO step, its defaults", "trl_grpo.py", ("--defaults",)),
    ("transformers generate, even", "hf_generate.py", ()),
    ("transformers generate, ragged", "hf_generate.py", ("--ragged",)),
)
PROBE = "import importlib.util as u, sys; sys.exit(any(u.find_spec(m) is None for m in ('trl', 'datasets', 'accelerate')))"


def main() -> int:
    parser = argparse.ArgumentParser(description="Time the peers on this machine")
    parser.add_argument("--python", default=sys.executable, help="python of the environment that holds the peers")
    parser.add_argument("--size", default="S", help="see make_model.py")
    parser.add_argument("--steps", default="8")
    parser.add_argument("--threads", default="2")
    options = parser.parse_args()
    if subprocess.run([options.python, "-c", PROBE], check=False).returncode:
        print(f"The peers are not installed for {options.python}: `make peers` installs them, or name another --python.")
        return 0
    results: list[tuple[str, dict[str, Any]]] = []
    with tempfile.TemporaryDirectory() as model:
        run(options.python, "make_model.py", model, "--size", options.size)
        for name, script, extra in CASES:
            line = run(options.python, script, "--model", model, "--steps", options.steps, "--threads", options.threads, *extra)
            print(line, flush=True)
            results.append((name, json.loads(line)))
    print(f"\n{'':32}{'median':>10}{'fastest':>10}{'slowest':>10}")
    for name, result in results:
        shown = (result["median_s"], min(result["seconds"]), max(result["seconds"]))
        print(f"{name:32}" + "".join(f"{value * 1000:7.0f} ms" for value in shown))
    return 0


def run(python: str, script: str, *arguments: str) -> str:
    """The last line that a driver printed; its stderr is shown only when it fails."""
    done = subprocess.run([python, str(HERE / script), *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{script} failed with status {done.returncode}:\n{done.stderr[-4000:]}")
    return done.stdout.strip().rpartition("\n")[2]


if __name__ == "__main__":
    sys.exit(main())
