"""Runs drivers in turn, round after round, each in a process of its own, and prints one JSON line and a table of ratios.

In turn, because a shared machine is sometimes slow: what disturbs one side of a round disturbs the other too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PEERS = "import importlib.util as u, sys; sys.exit(any(u.find_spec(m) is None for m in ('trl', 'datasets', 'accelerate')))"


@dataclass(frozen=True)
class Driver:
    """peer: runs in the environment that holds the peers."""

    name: str
    script: str
    arguments: tuple[str, ...] = ()
    peer: bool = True


def options(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--python", default=sys.executable, help="python of the environment that holds the peers")
    parser.add_argument("--size", default="S", help="of the random model, see peers/make_model.py")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", default="4", help="timed steps of a driver in a round")
    parser.add_argument("--threads", default="2")
    return parser


def compare(case: str, drivers: Sequence[Driver], chosen: argparse.Namespace, workload: Sequence[str]) -> int:
    """The first driver is ours. Ratio: the peer's median over ours, so that more than 1 is faster than the peer."""
    if subprocess.run([chosen.python, "-c", PEERS], check=False).returncode:
        print(f"The peers are not installed for {chosen.python}: `make peers` installs them, or name another --python.")
        return 0
    seconds: dict[str, list[float]] = {driver.name: [] for driver in drivers}
    with tempfile.TemporaryDirectory() as model:
        _run(chosen.python, "peers/make_model.py", model, "--size", chosen.size)
        shared = ["--model", model, "--steps", chosen.steps, "--threads", chosen.threads, *workload]
        for _ in range(chosen.rounds):
            for driver in drivers:
                line = _run(chosen.python if driver.peer else sys.executable, driver.script, *shared, *driver.arguments)
                seconds[driver.name].append(json.loads(line)["median_s"])
    ours = seconds[drivers[0].name]
    rows: dict[str, Any] = {}
    for name, values in seconds.items():
        ratios = [theirs / mine for theirs, mine in zip(values, ours, strict=True)]
        rows[name] = {
            "median_s": round(statistics.median(values), 4),
            "ratio": round(statistics.median(ratios), 2),
            "ratio_range": [round(min(ratios), 2), round(max(ratios), 2)],
        }
    print(
        json.dumps({"case": case, "size": chosen.size, "threads": int(chosen.threads), "rounds": chosen.rounds, "rows": rows})
    )
    print(f"\n{case}, size {chosen.size}, {chosen.threads} threads, {chosen.rounds} rounds{'':8}median   ratio to ours (range)")
    for name, row in rows.items():
        low, high = row["ratio_range"]
        print(f"{name:44}{row['median_s'] * 1000:10.0f} ms   {row['ratio']:5.2f}  ({low:.2f} to {high:.2f})")
    return 0


def _run(python: str, script: str, *arguments: str) -> str:
    """The last line that a driver printed; its stderr is shown only when it fails."""
    done = subprocess.run([python, str(HERE / script), *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{script} failed with status {done.returncode}:\n{done.stderr[-4000:]}")
    return done.stdout.strip().rpartition("\n")[2]
