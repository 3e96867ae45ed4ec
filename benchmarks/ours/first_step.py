"""Measure the seconds until `ratchet train quickstart` has made its first step.

The end is when the step's line is in metrics.jsonl. With --evaluated, the recipe's evaluation before
the first step is included; the peer's script has none. Of the other arguments, only --threads is
used.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import common
import protocol

from ratchet.observe.sinks import read_jsonl

POLL_S = 0.005
parser = protocol.arguments("the first step of `ratchet train`")
parser.add_argument("--evaluated", action="store_true", help="evaluate before the first step")
options = parser.parse_known_args()[0]


def main() -> None:
    cli = "from ratchet.cli.main import main; main()"
    with tempfile.TemporaryDirectory() as directory:
        lines = Path(directory) / "run" / "metrics.jsonl"
        arguments = [
            "train",
            str(common.QUICKSTART),
            "--run-dir",
            str(lines.parent),
            f"threads={options.threads}",
        ]
        arguments += [] if options.evaluated else ["evaluation.tasks=0", "evaluation.every=0"]
        start = time.perf_counter()
        training = subprocess.Popen(
            [sys.executable, "-c", cli, *arguments], stdout=subprocess.DEVNULL, cwd=common.ROOT
        )
        try:
            while not (lines.exists() and any(line["step"] for line in read_jsonl(lines))):
                assert training.poll() is None, "training ended before its first step"
                time.sleep(POLL_S)
            seconds = time.perf_counter() - start
        finally:
            training.kill()
            training.wait()
    common.emit(options, [seconds], case="startup")


main()
