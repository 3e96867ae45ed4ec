"""Seconds until `ratchet train recipes/quickstart.yaml` has made its first optimizer step, as a
user calls it: until the step's line is in metrics.jsonl. Other arguments than --threads play no
part in it, but for --evaluated: with the evaluation before it that the recipe asks for, and the
peer's script does not make."""

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
parser.add_argument("--evaluated", action="store_true")
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
