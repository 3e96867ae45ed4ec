"""Run the benchmarks one after another, and print the table of docs/performance.md.

    python benchmarks/table.py [--python PEERS/bin/python] [--rounds 5] [--threads 2]
    python benchmarks/table.py --lines FILE

With --lines nothing runs: the table is made from the saved output of an earlier run. Other arguments
are passed to each benchmark.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from side_by_side import ratio_text

HERE = Path(__file__).resolve().parent
RUNS = (
    ("grpo_step.py",),
    ("grpo_step.py", "--size", "M"),
    ("prefix.py",),
    ("quickstart_vs_trl.py",),
    ("generate.py",),
    ("sft.py",),
    ("dpo.py",),
    ("evaluation.py",),
    ("startup.py",),
    ("memory.py",),
    ("scaling.py",),
)
HEADING = (
    "Work",
    "Target",
    "Ratchet",
    "Peer",
    "Ratio (range)",
    "Floor",
    "Peak MiB, ours / peer's",
    "Command",
)


def rows(record: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return a row for each peer; only the first one has the cells that all share."""
    (_, ours), *peers = record["rows"].items()
    size = record["size"]
    floor = "" if record["floor"] is None else amount(record["floor"], record["unit"])
    work, target = record["case"] + (f", size {size}" if size else ""), record["target"]
    common = (work, f"{target:g}x" if target else "", amount(ours["median"], record["unit"]))
    command = f"`{record['command']}" + (f" --size {size}`" if size else "`")
    table_rows = []
    for name, row in peers or [("-", ours)]:
        is_first = not table_rows
        table_rows.append(
            (
                *(common if is_first else ("same", "", "")),
                f"{name}: {amount(row['median'], record['unit'])}",
                ratio_text(row),
                floor if is_first else "",
                f"{ours['peak_mib']:,} / {row['peak_mib']:,}",
                command if is_first else "",
            )
        )
    return table_rows + [
        ("same", "", "", f"{name}: {reason}", "", "", "", "")
        for name, reason in record["missing"].items()
    ]


def amount(value: float, unit: str) -> str:
    return f"{value:,.{0 if value >= 100 else 1}f} {unit}"


def markdown(records: Iterable[dict[str, Any]]) -> str:
    lines = [
        HEADING,
        tuple("---" for _ in HEADING),
        *(row for record in records for row in rows(record)),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def read(lines: Iterable[str]) -> list[dict[str, Any]]:
    """Return the comparisons in the printed lines of benchmarks; other lines are left out."""
    records = [json.loads(line) for line in lines if line.startswith("{")]
    return [record for record in records if "case" in record]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lines", type=Path, help="file with the output of an earlier run")
    options, arguments = parser.parse_known_args()
    printed: list[str] = []
    if options.lines:
        printed = options.lines.read_text(encoding="utf-8").splitlines()
    else:
        for script, *script_arguments in RUNS:
            command = [sys.executable, str(HERE / script), *arguments, *script_arguments]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
                assert running.stdout is not None
                for line in running.stdout:
                    print(line, end="", flush=True)
                    printed.append(line)
            if running.returncode:
                return running.returncode
    print(markdown(read(printed)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
