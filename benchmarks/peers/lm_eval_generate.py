"""Measure the seconds of lm-evaluation-harness on a file of tasks, from the start of its process."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import protocol

parser = protocol.evaluation_arguments("lm-evaluation-harness")
parser.add_argument("--batch-size", default="256")
options = parser.parse_args()
protocol.quiet_offline(options.threads)
if importlib.util.find_spec("lm_eval") is None:
    protocol.unavailable("lm-evaluation-harness is not installed: pip install lm-eval")

TASK = "copied"


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        tasks = directory / "tasks.jsonl"
        protocol.write_tasks(options, tasks)
        settings = {
            "task": TASK,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(tasks)}},
            "test_split": "test",
            "output_type": "generate_until",
            "doc_to_text": "{{prompt}}",
            "doc_to_target": "{{answer}}",
            # The harness adds the model's end of sequence to these.
            "generation_kwargs": {
                "until": ["<eos>"],
                "max_gen_toks": options.new_tokens,
                "do_sample": False,
            },
            "metric_list": [{"metric": "exact_match"}],
        }
        (directory / "copied.yaml").write_text(json.dumps(settings), encoding="utf-8")
        command = [sys.executable, "-m", "lm_eval", "--model", "hf", "--tasks", TASK]
        command += ["--model_args", f"pretrained={options.model},dtype=float32", "--device", "cpu"]
        command += ["--include_path", name, "--batch_size", options.batch_size]
        command += ["--apply_chat_template", "--output_path", str(directory / "out")]
        environment = {**os.environ, "HF_HOME": str(directory / "cache")}
        start = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
        seconds = time.perf_counter() - start
        (written,) = (directory / "out").rglob("results_*.json")
        results = json.loads(written.read_text(encoding="utf-8"))
        assert results["n-samples"][TASK]["effective"] == options.rows
    protocol.emit(options, [seconds], case="evaluation", peer="lm-evaluation-harness")


main()
