"""Compare Ratchet with other libraries (peers): run drivers in turn, and print a JSON line and a table
of ratios.

A driver is a script that measures one library in a separate process. The drivers take turns in each
round, so that other programs on a shared machine disturb all of them alike. Each round also measures
the machine's rate of matrix products. The floor is the time of the work's FLOPs at that rate.
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

from ratchet.kernels.build import has_bfloat16_instructions

# The JSON lines of a driver, one for each round; None for a round in which it could not run.
Lines = Sequence[Mapping[str, Any] | None]


@dataclass(frozen=True)
class Driver:
    """A script that measures one library.

    peer: True if it runs in the environment of the peers (`--python`).
    """

    name: str
    script: str
    arguments: tuple[str, ...] = ()
    peer: bool = True


@dataclass(frozen=True)
class Measure:
    """The number of a driver's JSON line that is compared.

    factor: converts the number to `unit`.
    higher: True if higher numbers are better.
    """

    key: str
    unit: str
    factor: float = 1.0
    higher: bool = False

    def ratio(self, ours: float, theirs: float) -> float:
        """Return the ratio of the two numbers, above 1 if Ratchet is better."""
        return ours / theirs if self.higher else theirs / ours


RATES = Driver("rates", "arithmetic.py", peer=False)
TIME = Measure("median_s", "ms", factor=1000.0)
SECONDS = Measure("median_s", "s")
MEMORY = Measure("peak_rss_mib", "MiB")


def rate(of: str) -> Measure:
    """Return the measure of a throughput. of: what is counted, such as "tokens"."""
    return Measure("rate_per_s", f"{of}/s", higher=True)


@dataclass(frozen=True)
class Case:
    """One comparison.

    drivers: Ratchet first, then the peers.
    workload: arguments of all drivers.
    maker: script that writes the model that all drivers use.
    made_by_size: True if `maker` takes `--size`.
    target: desired ratio to the second driver; None: none.
    """

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
    parser.add_argument(
        "--size", default="S", help="size of the random model, see peers/make_model.py"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", default="4", help="timed steps of a driver in a round")
    parser.add_argument("--threads", default="2")
    parser.add_argument(
        "--workers",
        default="0",
        help="Ratchet's workers, which each compute a part of a batch; 0: one per thread",
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--ours", action="store_true", help="measure Ratchet only")
    return parser


class Unavailable(Exception):
    """An error for a driver that can't run here, with the reason."""


def compare(
    case: Case,
    chosen: argparse.Namespace,
    rates: Driver = RATES,
    *,
    peers_may_fail: bool = False,
) -> None:
    """Run a case and print its results, as `compare_all` does."""
    compare_all([case], chosen, rates, peers_may_fail=peers_may_fail)


def compare_precisions(
    case: Case, chosen: argparse.Namespace, others: Sequence[Driver] = ()
) -> None:
    """Compare in float32 and, if the processor multiplies in bfloat16, in bfloat16 too.

    Args:
        case: Ratchet and the peers in float32.
        chosen: The options of the command line.
        others: The peers in bfloat16 and with their defaults. If the processor does not multiply in
            bfloat16, Ratchet's float32 is compared with them as well.
    """
    ours, *peers = case.drivers
    if not has_bfloat16_instructions():
        compare(replace(case, drivers=(*case.drivers, *others)), chosen)
        return
    rounded = replace(ours, name=f"{ours.name}, bfloat16", arguments=(*ours.arguments, "--bf16"))
    cases = (
        replace(case, name=f"{case.name}, float32", target=None),
        replace(case, name=f"{case.name}, bfloat16", drivers=(rounded, *others, *peers)),
    )
    compare_all(cases, chosen)


def compare_all(
    cases: Sequence[Case],
    chosen: argparse.Namespace,
    rates: Driver = RATES,
    *,
    peers_may_fail: bool = False,
) -> None:
    """Run the drivers of all cases in turn, each once a round, and print the results of each case.

    The cases differ only in their names, drivers and targets. A peer that can't run here is named
    with the reason.

    Args:
        cases: The comparisons.
        chosen: The options of the command line.
        rates: The script that measures the machine's rates in each round.
        peers_may_fail: True to name a peer that fails in the same way. Otherwise it ends the
            comparison.
    """
    case = cases[0]
    drivers = [
        driver
        for driver in dict.fromkeys(driver for case in cases for driver in case.drivers)
        if not (chosen.ours and driver.peer)
    ]
    lines: dict[str, list[dict[str, Any] | None]] = {driver.name: [] for driver in drivers}
    missing: dict[str, str] = {}
    machine_rates: list[dict[str, float]] = []  # one for each round
    with tempfile.TemporaryDirectory() as model:
        make(case, chosen, model)
        for seed in range(chosen.rounds):
            machine_rates.append(
                run(rates, ["--threads", chosen.threads, "--device", chosen.device], chosen.python)
            )
            for driver in drivers:
                if driver.name in missing:  # it would fail again
                    lines[driver.name].append(None)
                    continue
                try:
                    line = run(
                        driver,
                        [*shared(chosen, model, seed, driver), *case.workload],
                        chosen.python,
                    )
                except Unavailable as reason:
                    line, missing[driver.name] = None, str(reason)
                except SystemExit as failure:
                    if not (peers_may_fail and driver.peer):
                        raise
                    line, missing[driver.name] = None, str(failure)
                lines[driver.name].append(line)
    for case in cases:
        names = [driver.name for driver in case.drivers if driver in drivers]
        _report(
            case,
            chosen,
            {name: lines[name] for name in names},
            {name: missing[name] for name in names if name in missing},
            machine_rates,
        )


def _report(
    case: Case,
    chosen: argparse.Namespace,
    lines: Mapping[str, Lines],
    missing: Mapping[str, str],
    machine_rates: Sequence[Mapping[str, float]],
) -> None:
    """Print a case's results, as a JSON line and as a table."""
    ours = lines[case.drivers[0].name]
    record = {
        "case": case.name,
        "command": f"python {Path(sys.argv[0]).resolve().relative_to(HERE.parent)}",
        "size": chosen.size if case.made_by_size else None,
        **{key: getattr(chosen, key) for key in ("threads", "rounds")},
        "unit": case.measure.unit,
        "target": case.target,
        "floor": _floor(case.measure, ours, machine_rates),
        "gflops": round(
            statistics.median(
                _get_gflops(line or {}, rates)
                for line, rates in zip(ours, machine_rates, strict=True)
            )
        ),
        "rows": _rows(case.measure, ours, lines),
        "missing": missing,
    }
    print(json.dumps(record))
    print(f"\n{_table(record)}\n", flush=True)


def make(case: Case, chosen: argparse.Namespace, model: str) -> None:
    """Write the model that the drivers of a case share."""
    maker = replace(case.maker, peer=case.maker.peer and not chosen.ours)
    run(maker, [model, *(["--size", chosen.size] if case.made_by_size else [])], chosen.python)


def shared(chosen: argparse.Namespace, model: str, seed: int, driver: Driver) -> list[str]:
    """Return the arguments that all cases share. All drivers of a round have the same seed."""
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
    """Run a driver and return its last line, parsed as JSON; {} if it printed none.

    Raises Unavailable if the driver can't run here. Exits with its stderr if it fails.
    """
    command = [
        python if driver.peer else sys.executable,
        str(HERE / driver.script),
        *arguments,
        *driver.arguments,
    ]
    environment = {**os.environ, "BENCHMARK_SPAWNED": str(time.time())}
    process = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if process.returncode == UNAVAILABLE:
        raise Unavailable(process.stderr.strip().rpartition("\n")[2])
    if process.returncode:
        raise SystemExit(
            f"{driver.script} failed with status {process.returncode}:\n{process.stderr[-4000:]}"
        )
    return json.loads(process.stdout.strip().rpartition("\n")[2] or "{}")


def _rows(measure: Measure, ours: Lines, lines: Mapping[str, Lines]) -> dict[str, dict[str, Any]]:
    """Return the results of the drivers that ran; each ratio compares two lines of one round."""
    rows = {}
    for name, theirs in lines.items():
        results = [line for line in theirs if line]
        ratios = [
            measure.ratio(a[measure.key], b[measure.key])
            for a, b in zip(ours, theirs, strict=True)
            if a and b
        ]
        if results:
            rows[name] = {
                "median": round(
                    statistics.median(line[measure.key] for line in results) * measure.factor, 2
                ),
                "ratio": round(statistics.median(ratios), 2) if ratios else None,
                "ratio_range": [round(min(ratios), 2), round(max(ratios), 2)] if ratios else None,
                "peak_mib": round(
                    statistics.median(
                        line.get("peak_device_mib", line["peak_rss_mib"]) for line in results
                    )
                ),
            }
    return rows


def _floor(
    measure: Measure, ours: Lines, machine_rates: Sequence[Mapping[str, float]]
) -> float | None:
    """Return the floor in the measure's unit; None if it is not known.

    It is the time of the work's FLOPs, or of its reads from memory if that is longer, at the
    machine's rates.
    """
    floors = []
    for line, rates in zip(ours, machine_rates, strict=True):
        if line and measure is not MEMORY and "gflop" in line:
            seconds = max(
                line["gflop"] / _get_gflops(line, rates),
                line.get("gbytes", 0) / rates.get("gbytes_per_s", math.inf),
            )
            floors.append(line["work"] / seconds if measure.higher else seconds)
    return round(statistics.median(floors) * measure.factor, 2) if floors else None


def _get_gflops(line: Mapping[str, Any], rates: Mapping[str, float]) -> float:
    """Return the rate of a large matrix product in the precision of a driver's products."""
    return rates["bfloat16_gflops" if line.get("bf16") else "gflops"]


def _table(record: Mapping[str, Any]) -> str:
    unit, floor = record["unit"], record["floor"]
    size = f"size {record['size']}, " if record["size"] else ""
    heading = f"{size}{record['threads']} threads, {record['rounds']} rounds"
    lines = [record["case"], f"{heading:56}{unit:>12}    Ratchet is better by (range)  peak MiB"]
    for name, row in record["rows"].items():
        lines.append(f"{name:56}{row['median']:12,.1f}    {ratio_text(row):28}{row['peak_mib']:9,}")
    if floor is not None:
        arithmetic = f"floor: the arithmetic alone, at {record['gflops']} GFLOP/s"
        share = next(iter(record["rows"].values()))["median"] / floor
        lines.append(
            f"{arithmetic:56}{floor:12,.1f}    (Ratchet reaches {min(share, 1 / share):.0%} of it)"
        )
    return "\n".join([*lines, *(f"{name}: {reason}" for name, reason in record["missing"].items())])


def ratio_text(row: Mapping[str, Any]) -> str:
    if row["ratio"] is None:
        return "-"
    return f"{row['ratio']:.2f} ({row['ratio_range'][0]:.2f} to {row['ratio_range'][1]:.2f})"
