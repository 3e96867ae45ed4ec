"""Runs drivers in turn, round after round, each in a process of its own, and prints one JSON line
and a table of ratios.

In turn, because a shared machine is sometimes slow: what disturbs one side of a round disturbs the
other too. The machine's own rate of matrix products is measured in each round as well, for the
floor: the work's FLOPs at that rate.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE / "peers"))

from protocol import UNAVAILABLE


@dataclass(frozen=True)
class Driver:
    """peer: runs in the environment that holds the peers."""

    name: str
    script: str
    arguments: tuple[str, ...] = ()
    peer: bool = True


@dataclass(frozen=True)
class Measure:
    """What of a driver's line is compared. factor: to the unit that is shown. higher: more of it is
    better."""

    key: str
    unit: str
    factor: float = 1.0
    higher: bool = False

    def ratio(self, ours: float, theirs: float) -> float:
        """More than 1: we are better."""
        return ours / theirs if self.higher else theirs / ours


RATES = Driver("rates", "arithmetic.py", peer=False)
TIME = Measure("median_s", "ms", factor=1000.0)
SECONDS = Measure("median_s", "s")
MEMORY = Measure("peak_rss_mib", "MiB")


def rate(of: str) -> Measure:
    return Measure("rate_per_s", f"{of}/s", higher=True)


@dataclass(frozen=True)
class Case:
    """One comparison. The first driver is ours, the second the peer that `target` is about: the
    ratio to it that we want. workload: arguments of all drivers. maker: writes the model that they
    share; made_by_size: in the size that is asked for."""

    name: str
    drivers: Sequence[Driver]
    workload: Sequence[str] = ()
    measure: Measure = TIME
    maker: Driver = Driver("model", "peers/make_model.py")
    made_by_size: bool = True
    target: float | None = None


def options(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--python", default=sys.executable, help="python of the environment that holds the peers"
    )
    parser.add_argument("--size", default="S", help="of the random model, see peers/make_model.py")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", default="4", help="timed steps of a driver in a round")
    parser.add_argument("--threads", default="2")
    parser.add_argument(
        "--workers",
        default="0",
        help="our threads that each take parts of a batch; 0: as many as threads",
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--ours", action="store_true", help="without the peers")
    return parser


class Unavailable(Exception):
    """A driver that can't run here, and why."""


def compare(case: Case, chosen: argparse.Namespace) -> None:
    """Prints what was measured. A peer that can't run here is named, and left out."""
    drivers = [driver for driver in case.drivers if not (chosen.ours and driver.peer)]
    lines: dict[str, list[dict[str, Any] | None]] = {driver.name: [] for driver in drivers}
    missing: dict[str, str] = {}
    machine: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as model:
        make(case, chosen, model)
        for seed in range(chosen.rounds):
            machine.append(
                run(RATES, ["--threads", chosen.threads, "--device", chosen.device], chosen.python)
            )
            for driver in drivers:
                try:
                    line = run(
                        driver,
                        [*shared(chosen, model, seed, driver), *case.workload],
                        chosen.python,
                    )
                except Unavailable as reason:
                    line, missing[driver.name] = None, str(reason)
                lines[driver.name].append(line)
    ours = lines[drivers[0].name]
    record = {
        "case": case.name,
        "command": f"python {Path(sys.argv[0]).resolve().relative_to(HERE.parent)}",
        "size": chosen.size if case.made_by_size else None,
        **{key: getattr(chosen, key) for key in ("threads", "rounds")},
        "unit": case.measure.unit,
        "target": case.target,
        "floor": _floor(case.measure, ours, machine),
        "gflops": round(statistics.median(rates["gflops"] for rates in machine)),
        "rows": _rows(case.measure, ours, lines),
        "missing": missing,
    }
    print(json.dumps(record))
    print(f"\n{_table(record)}\n", flush=True)


def make(case: Case, chosen: argparse.Namespace, model: str) -> None:
    """Writes the model that the drivers of a case share."""
    maker = replace(case.maker, peer=case.maker.peer and not chosen.ours)
    run(maker, [model, *(["--size", chosen.size] if case.made_by_size else [])], chosen.python)


def shared(chosen: argparse.Namespace, model: str, seed: int, driver: Driver) -> list[str]:
    """Another seed in each round, the same for all its drivers."""
    keys = (
        ("steps", "threads", "device") if driver.peer else ("steps", "threads", "device", "workers")
    )
    return [
        "--model",
        model,
        "--seed",
        str(seed),
        *(text for key in keys for text in (f"--{key}", getattr(chosen, key))),
    ]


def run(driver: Driver, arguments: Sequence[str], python: str) -> dict[str, Any]:
    """What a driver printed last, read as JSON; {} for nothing. Its stderr is shown only when it
    fails."""
    command = [
        python if driver.peer else sys.executable,
        str(HERE / driver.script),
        *arguments,
        *driver.arguments,
    ]
    spawned = {**os.environ, "BENCHMARK_SPAWNED": str(time.time())}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=spawned)
    if done.returncode == UNAVAILABLE:
        raise Unavailable(done.stderr.strip().rpartition("\n")[2])
    if done.returncode:
        raise SystemExit(
            f"{driver.script} failed with status {done.returncode}:\n{done.stderr[-4000:]}"
        )
    return json.loads(done.stdout.strip().rpartition("\n")[2] or "{}")


Lines = Sequence[Mapping[str, Any] | None]  # of a driver, one a round; None where it couldn't run


def _rows(measure: Measure, ours: Lines, lines: Mapping[str, Lines]) -> dict[str, dict[str, Any]]:
    """Of the drivers that ran. A ratio is of the two lines of one round."""
    rows = {}
    for name, theirs in lines.items():
        ran = [line for line in theirs if line]
        ratios = [
            measure.ratio(a[measure.key], b[measure.key])
            for a, b in zip(ours, theirs, strict=True)
            if a and b
        ]
        if ran:
            rows[name] = {
                "median": round(
                    statistics.median(line[measure.key] for line in ran) * measure.factor, 2
                ),
                "ratio": round(statistics.median(ratios), 2) if ratios else None,
                "ratio_range": [round(min(ratios), 2), round(max(ratios), 2)] if ratios else None,
                "peak_mib": round(
                    statistics.median(
                        line.get("peak_device_mib", line["peak_rss_mib"]) for line in ran
                    )
                ),
            }
    return rows


def _floor(measure: Measure, ours: Lines, machine: Sequence[Mapping[str, float]]) -> float | None:
    """In the measure's unit: the work's FLOPs, or what it must read where that takes longer, at the
    machine's rate. None where the work isn't arithmetic."""
    floors = []
    for line, rates in zip(ours, machine, strict=True):
        if line and measure is not MEMORY and "gflop" in line:
            seconds = max(
                line["gflop"] / rates["gflops"],
                line.get("gbytes", 0) / rates.get("gbytes_per_s", math.inf),
            )
            floors.append(line["work"] / seconds if measure.higher else seconds)
    return round(statistics.median(floors) * measure.factor, 2) if floors else None


def _table(record: Mapping[str, Any]) -> str:
    unit, floor = record["unit"], record["floor"]
    size = f"size {record['size']}, " if record["size"] else ""
    heading = f"{size}{record['threads']} threads, {record['rounds']} rounds"
    lines = [record["case"], f"{heading:56}{unit:>12}    ours is better by (range)  peak MiB"]
    for name, row in record["rows"].items():
        lines.append(f"{name:56}{row['median']:12,.1f}    {ratio_text(row):25}{row['peak_mib']:9,}")
    if floor is not None:
        arithmetic = f"the arithmetic alone, at {record['gflops']} GFLOP/s"
        share = next(iter(record["rows"].values()))["median"] / floor
        lines.append(
            f"{arithmetic:56}{floor:12,.1f}    ({min(share, 1 / share):.0%} of it reached)"
        )
    return "\n".join([*lines, *(f"{name}: {reason}" for name, reason in record["missing"].items())])


def ratio_text(row: Mapping[str, Any]) -> str:
    if row["ratio"] is None:
        return "-"
    return f"{row['ratio']:.2f} ({row['ratio_range'][0]:.2f} to {row['ratio_range'][1]:.2f})"
