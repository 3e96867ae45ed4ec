"""Measure the time of each part of a step, and the memory, by a short run in its own process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

from ratchet.config.loader import plain
from ratchet.config.schema import CheckpointConfig, EvaluationConfig, RunConfig, StageConfig
from ratchet.config.yaml_tree import write_text
from ratchet.errors import RatchetError
from ratchet.observe.records.reader import Record
from ratchet.observe.records.schema import SCHEMA
from ratchet.observe.sinks import read_jsonl
from ratchet.runs.run_dir import RunDirectory
from ratchet.utils.temp_dirs import TemporaryFolder

PARTS = ("sample", "score", "update", "sync")
MIB = 2**20


@dataclass(frozen=True)
class Probed:
    """The measurement of a stage.

    Times are medians over the steps without the first, which is warm-up.

    Attributes:
        steps: The number of steps that ran.
        seconds: The time of a step by part; "rest" is the remaining time.
        processor_s: The processor time of a step over all threads.
        tables: The bytes that the record kept for each step.
        recorded: The maximum number of steps that the record kept in memory.
    """

    steps: int
    seconds: Mapping[str, float]
    processor_s: float
    tables: float
    recorded: int


@dataclass(frozen=True)
class Probe:
    """The measurement of a run.

    Attributes:
        stages: The measurement of each stage.
        peak: The peak memory of the process in bytes.
    """

    stages: tuple[Probed, ...]
    peak: int


def probe(config: RunConfig, *, limit_s: float) -> Probe:
    """Run all stages of a recipe for a short time and return the measurement.

    As in the real run, the stages follow each other in one process, with the record. Each stage is
    evaluated and saved once.

    Args:
        config: The recipe.
        limit_s: Seconds of training after which a stage begins no further step, except for its
            first few.

    Raises:
        RatchetError: If the run fails.
    """
    with TemporaryFolder("plan") as place:
        run, output = _train(place, write_text(_shortened(config)), "--try", str(limit_s))
        if not run.summary.exists():
            raise RatchetError(
                f"a probe of {config.name} failed. The run said: {output.strip()[-800:]}"
            )
        rows, record = (
            [row for row in read_jsonl(run.metrics) if "time/step_s" in row],
            Record(run.steps),
        )
        stages, ends = [], accumulate(stage.steps for stage in config.stages)
        for stage, end in zip(config.stages, ends, strict=True):
            stage_rows = [row for row in rows if end - stage.steps < row["step"] <= end]
            stages.append(_probed(stage_rows, record, stage.name))
        return Probe(tuple(stages), _peak(run))


def _probed(rows: list[dict[str, Any]], record: Record, stage: str) -> Probed:
    steps = rows[1:] or rows
    seconds = {part: median(step.get(f"time/{part}_s", 0.0) for step in steps) for part in PARTS}
    rest = median(step["time/step_s"] for step in steps) - sum(seconds.values())
    processor_s = median(step["time/processor_s"] for step in steps)
    # A file holds steps of only one stage, because a save at the end of a stage closes the file.
    files = [
        [facts.step for facts in file.steps]
        for file in record.files
        if file.steps[0].stage == stage
    ]
    longest = max(files, key=len, default=[])
    tables = record.table(SCHEMA.names, steps=longest).nbytes / len(longest) if longest else 0.0
    return Probed(len(rows), {**seconds, "rest": max(0.0, rest)}, processor_s, tables, len(longest))


def _shortened(config: RunConfig) -> dict[str, Any]:
    logging = config.logging.model_copy(update={"sinks": (), "progress": "off"})
    stages = tuple(_short(stage) for stage in config.stages)
    return plain(config.model_copy(update={"stages": stages, "logging": logging, "run_dir": None}))


def _short(stage: StageConfig) -> StageConfig:
    """Return the stage with evaluation and save only at its end.

    It evaluates at most as many tasks as the generator runs at a time.
    """
    tasks = min(
        stage.evaluation.tasks, getattr(stage.generator, "max_running", stage.evaluation.tasks)
    )
    evaluation = {
        "tasks": tasks,
        **_defaults(EvaluationConfig, "every", "patience", "metric", "min_gain"),
    }
    checkpoint = {
        "every": 0,
        **_defaults(CheckpointConfig, "limit_s", "keep_best", "metric", "end_with"),
    }
    return stage.model_copy(
        update={
            "evaluation": stage.evaluation.model_copy(update=evaluation),
            "checkpoint": stage.checkpoint.model_copy(update=checkpoint),
        }
    )


def _defaults(section: type[EvaluationConfig | CheckpointConfig], *names: str) -> dict[str, Any]:
    return {name: section.model_fields[name].default for name in names}


def _train(place: Path, recipe: str, *options: str) -> tuple[RunDirectory, str]:
    """Run `ratchet train` and return (its run directory, its output)."""
    path, run = place / "recipe.yaml", RunDirectory(place / "run")
    path.write_text(recipe)
    command = [
        sys.executable,
        "-m",
        "ratchet",
        "train",
        str(path),
        "--run-dir",
        str(run.path),
        *options,
    ]
    process = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    return run, process.stdout.decode(errors="replace")


def _peak(run: RunDirectory) -> int:
    return int(json.loads(run.summary.read_text())["peak_mib"] * MIB)


EMPTY = """
name: empty
model: {preset: tiny, overrides: {hidden_size: 32, n_layers: 1}}
tokenizer: {kind: characters, alphabet: "0123456789="}
environment: {kind: sorting, digits: 2}
evaluation: {tasks: 1}
algorithm: {kind: grpo, group_size: 2}
sampling: {max_new_tokens: 2}
steps: 2
batch_size: 1
logging: {progress: "off"}
"""


def empty_process(config: RunConfig) -> int:
    """Return the peak bytes of an almost empty run: Python, PyTorch, and what they load."""
    with TemporaryFolder("plan") as place:
        run, output = _train(place, f"{EMPTY}threads: {config.threads}\ndevice: {config.device}\n")
        if not run.summary.exists():
            raise RatchetError(f"an empty run failed on this machine: {output.strip()[-800:]}")
        return _peak(run)
