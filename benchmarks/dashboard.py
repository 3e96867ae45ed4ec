"""Measure how long `ratchet ui` takes to show a run of 1,000 steps of 1,024 trajectories.

    python benchmarks/dashboard.py [--rounds 5] [--run DIRECTORY]

First writes the run (a minute, 0.8 GB; kept in --run for the next time). Then starts `ratchet ui`
and opens each view in Chromium on this machine, in a new browser context without a cache. A view
counts as open when all of it is drawn: the curves; the table of all rollouts and the first of them;
the waterfall of tokens.

Prints a table of medians over the rounds, and one JSON line.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ratchet.experience.sources.prompt_ledger import PromptLedger
from ratchet.observe.records.reader import INDEX, RecordFile, StepFacts
from ratchet.observe.records.schema import MESSAGE, SCHEMA
from ratchet.observe.records.writer import MAX_STEPS
from ratchet.observe.sinks import JsonlSink
from ratchet.runs.run_dir import RunDirectory

STEPS, GROUPS, ATTEMPTS = 1000, 128, 8
PROMPT, WRITTEN = 16, 32  # tokens of a trajectory's prompt and answer
ROWS, LENGTH = GROUPS * ATTEMPTS, PROMPT + WRITTEN
METRICS = 60  # number of metrics in each step
GOAL_S = 2.0  # maximum time to open a view


def make_run(path: Path) -> None:
    directory = RunDirectory(path)
    path.mkdir(parents=True)
    directory.write_or_check_config(
        {"name": "long", "tokenizer": {"kind": "bytes"}, "stages": [{"name": "rl", "steps": STEPS}]}
    )
    generator = np.random.default_rng(0)
    sink = JsonlSink(directory.metrics)
    for step in range(1, STEPS + 1):
        noise = generator.random(METRICS)
        names = {f"policy/part_{i}": float(value) for i, value in enumerate(noise)}
        times = {
            "time/step_s": 1.0,
            "time/sample_s": float(noise[0]),
            "rollout/trained_tokens": float(ROWS * WRITTEN),
        }
        sink.write(step, {"rollout/reward": float(step / STEPS + noise[1]), **names, **times})
    sink.close()
    ledger = PromptLedger(directory.ledger)
    for step in range(STEPS):
        names = [f"rl/{step * GROUPS + group}" for group in range(GROUPS)]
        ledger.note("issued", names, version=step)
        ledger.note("trained", names, step=step)
    ledger.close()
    directory.steps.mkdir()
    for first in range(1, STEPS + 1, MAX_STEPS):
        steps = range(first, min(first + MAX_STEPS, STEPS + 1))
        file = directory.steps / f"{steps[0]:08d}-{steps[-1]:08d}.parquet"
        table = make_table(steps, generator)
        pq.write_table(
            table, file, compression="zstd", compression_level=1, row_group_size=table.num_rows
        )
        facts = tuple(
            StepFacts(step, "rl", ROWS, GROUPS, GROUPS, {"policy": str(step)}) for step in steps
        )
        with file.open("rb") as written, (directory.steps / INDEX).open("a") as index:
            digest = hashlib.file_digest(written, "sha256").hexdigest()
            index.write(RecordFile(file.name, file.stat().st_size, digest, facts).line())


def make_table(steps: range, generator: np.random.Generator) -> pa.Table:
    """Return the rows of some steps, as a recorder would have written them.

    Each task returns every eight steps.
    """
    n = len(steps) * ROWS
    step = np.repeat(np.asarray(steps, np.int32), ROWS)
    group = np.tile(np.repeat(np.arange(GROUPS, dtype=np.int32), ATTEMPTS), len(steps))
    attempt = np.tile(np.arange(ATTEMPTS, dtype=np.int32), n // ATTEMPTS)
    reward = (generator.random(n) < 0.5).astype(np.float64)
    task = [f"made/train/{(s % 8) * GROUPS + g}" for s, g in zip(step, group, strict=True)]
    is_written = np.tile(np.arange(LENGTH) >= PROMPT, n)  # for each token: the policy wrote it
    n_tokens = n * LENGTH
    columns: dict[str, Any] = {
        "step": step, "group_index": group, "row": attempt, "attempt": attempt, "reward": reward, "advantage": reward - 0.5,
        "group": [f"rl/{s * GROUPS + g}" for s, g in zip(step, group, strict=True)], "task": task,
        "length": np.full(n, LENGTH, np.int32), "newest_version": step - 1, "oldest_version": step - 1,
        "messages": make_messages(task, reward),
        "tokens": make_lists(generator.integers(10, 200, n_tokens, dtype=np.int32)), "owner": make_lists(is_written.astype(np.int8)),
        "trainable": make_lists(is_written), "trained": make_lists(is_written),
        "versions": make_lists(np.where(is_written, np.repeat(step - 1, LENGTH), -1).astype(np.int32)),
    }  # fmt: skip
    for name in ("rollout_logprobs", "old_logprobs", "advantages", "weights"):
        columns[name] = make_lists(generator.random(n_tokens, dtype=np.float32))
    for name, value in {
        "generated_tokens": WRITTEN,
        "trained_tokens": WRITTEN,
        "policy_turns": 1,
    }.items():
        columns[name] = np.full(n, value, np.int32)
    for name, value in {
        "stage": "rl",
        "environment": "made",
        "tag": "made",
        "use": "train",
        "outcome": "scored",
    }.items():
        columns[name] = [value] * n
    columns["truncated"] = np.zeros(n, np.bool_)
    kinds = {name: SCHEMA.field(name).type for name in SCHEMA.names}
    filled = {
        name: columns[name] if name in columns else pa.nulls(n, kind)
        for name, kind in kinds.items()
    }
    return pa.Table.from_arrays(
        [
            column if isinstance(column, pa.Array) else pa.array(column, kinds[name])
            for name, column in filled.items()
        ],
        schema=SCHEMA,
    )


def make_lists(values: np.ndarray) -> pa.Array:
    """Return one list of LENGTH values for each trajectory."""
    offsets = np.arange(0, len(values) + 1, LENGTH, dtype=np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))


def make_messages(task: list[str], reward: np.ndarray) -> pa.Array:
    """Return a question and an answer for each trajectory."""
    texts = [
        text
        for name, value in zip(task, reward, strict=True)
        for text in (f"Solve {name}.", f"The answer is {value}.")
    ]
    kinds = {field.name: field.type for field in MESSAGE}
    parts = {name: pa.nulls(len(texts), kind) for name, kind in kinds.items()}
    parts |= {"role": pa.array(["user", "assistant"] * len(task)), "content": pa.array(texts)}
    flat = pa.StructArray.from_arrays(list(parts.values()), fields=list(MESSAGE))
    return pa.ListArray.from_arrays(pa.array(np.arange(0, len(texts) + 1, 2, dtype=np.int32)), flat)


@contextmanager
def start_dashboard(run: Path) -> Iterator[str]:
    """Start `ratchet ui` in a separate process, and yield its address."""
    command = [sys.executable, "-u", "-m", "ratchet", "ui", str(run), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().split()[0]
        finally:
            process.terminate()


def measure_view(browser: Any, address: str, view: str, last_element: str) -> float:
    """Return the seconds until a view has drawn its last element, a CSS selector."""
    page = browser.new_context(viewport={"width": 1366, "height": 820}).new_page()
    start = time.perf_counter()
    page.goto(f"{address}#{view}")
    page.wait_for_selector(f"body[data-ready={view}]")
    page.wait_for_selector(last_element)
    seconds = time.perf_counter() - start
    page.context.close()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--run",
        type=Path,
        help="directory of the run, written if it is absent; default: a temporary one",
    )
    options = parser.parse_args()
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as temporary:
        run = options.run or Path(temporary) / "long"
        if not run.exists():
            make_run(run)
        seconds_by_view: dict[str, list[float]] = {}
        with start_dashboard(run) as address, sync_playwright() as playwright:
            arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
            browser = playwright.chromium.launch(
                executable_path=shutil.which("chromium"), args=arguments
            )
            # Not counted: the first page also starts the browser's processes.
            measure_view(browser, address, "curves", "canvas")
            for _ in range(options.rounds):
                for view, last_element in {
                    "curves": "canvas",
                    "rollouts": "article.rollout",
                    "tokens": ".waterfall",
                }.items():
                    seconds = measure_view(browser, address, view, last_element)
                    seconds_by_view.setdefault(view, []).append(seconds)
            browser.close()
    medians = {view: statistics.median(times) for view, times in seconds_by_view.items()}
    print(f"{STEPS} steps x {ROWS} trajectories, {options.rounds} rounds")
    for view, times in seconds_by_view.items():
        print(f"{view:10} {medians[view]:5.2f} s   (from {min(times):.2f} to {max(times):.2f})")
    print(
        json.dumps(
            {
                "seconds": medians,
                "goal_s": GOAL_S,
                "met": all(value < GOAL_S for value in medians.values()),
            }
        )
    )


if __name__ == "__main__":
    main()
