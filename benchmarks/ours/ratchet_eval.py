"""Measure the seconds of `ratchet eval` on a file of tasks, from the start of its process."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import common
import protocol

options = protocol.evaluation_arguments("ratchet eval").parse_known_args()[0]


def main() -> None:
    cli = "from ratchet.cli.main import main; main()"
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        tasks, recipe = directory / "tasks.jsonl", directory / "recipe.yaml"
        protocol.write_tasks(options, tasks)
        recipe.write_text(
            json.dumps(
                {
                    "name": "evaluation",
                    "model": {"path": options.model},
                    "environment": {"kind": "dataset", "test": str(tasks)},
                    "rewards": [{"kind": "exact_match"}],
                    "algorithm": {"kind": "grpo"},
                    "threads": options.threads,
                }
            ),
            encoding="utf-8",
        )
        command = [sys.executable, "-c", cli, "eval", options.model, "--recipe", str(recipe)]
        command += ["--samples", "0", "--tasks", str(options.rows), "--out", str(directory / "out")]
        command += ["--max-new-tokens", str(options.new_tokens)]
        start = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=common.ROOT)
        seconds = time.perf_counter() - start
        results = json.loads((directory / "out" / "results.json").read_text(encoding="utf-8"))
    answers = [prompt["greedy"] for prompt in results["prompts"]]
    assert len(answers) == options.rows
    assert not results["failures"]
    n_new_tokens = sum(answer["tokens"] for answer in answers)
    common.emit(options, [seconds], case="evaluation", new_tokens_drawn=n_new_tokens)


main()
