"""Write small tasks in Harbor's format, as many as a test needs."""

from __future__ import annotations

from pathlib import Path

OFFLINE = """schema_version = "1.4"

[verifier]
timeout_sec = 20.0

[agent]
timeout_sec = 20.0

[environment]
network_mode = "no-network"
"""
INSTRUCTION = "Write the sum of the numbers in numbers.txt, times {factor}, into /app/sum.txt."
SOLUTION = """#!/bin/bash
total=0
while read -r number; do total=$((total + number)); done </app/numbers.txt
echo $((total * {factor})) >/app/sum.txt
"""
TESTS = """#!/bin/bash
if [ "$(cat /app/sum.txt)" = "$(cat /tests/expected.txt)" ]; then
  echo 1 >/logs/verifier/reward.txt
else
  echo 0 >/logs/verifier/reward.txt
fi
"""


def write_task(folder: Path, factor: int = 2, **files: str | None) -> Path:
    """Write a task directory. `files` replaces files by path ("tests/test.sh"), or drops them."""
    texts: dict[str, str | None] = {
        "task.toml": OFFLINE,
        "instruction.md": INSTRUCTION.format(factor=factor),
        "environment/numbers.txt": "1\n2\n",
        "solution/solve.sh": SOLUTION.format(factor=factor),
        "tests/test.sh": TESTS,
        "tests/expected.txt": f"{3 * factor}\n",
        **files,
    }
    for name, text in texts.items():
        if text is not None:
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    return folder


def write_tasks(folder: Path, count: int) -> Path:
    for factor in range(1, count + 1):
        write_task(folder / f"sum-{factor:02}", factor)
    return folder
