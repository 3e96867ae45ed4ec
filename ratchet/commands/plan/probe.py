"""Measure the time of each phase of a step, and the memory, with a short run in its own process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

from ratchet.config.loader import dump_plain
from ratchet.config.outputs import CheckpointConfig
from ratchet.config.schema import EvaluationConfig, RunConfig, StageConfig
from ratchet.config.yaml_tree import write_text
from ratchet.errors import RatchetError
from ratchet.observe.progress_bar import show_bar
from ratchet.observe.records.reader import Record
from ratchet.observe.records.schema import SCHEMA
from ratchet.observe.sinks import read_jsonl
from ratchet.runs.run_dir import RunDirectory
from ratchet.utils.temp_dirs import TemporaryFolder

TIMED_PHASES = ("sample", "score", "update", "sync")
MIB = 2**20


@dataclass(frozen=True)
class StageProbe:
    """The measurement of a stage.

    Times are medians over the steps without the first, which is warm-up.
    """

    steps: int
    """The number of steps that ran."""
    seconds_by_phase: Mapping[str, float]
    """The time of a step; "rest" is the time outside TIMED_PHASES."""
    processor_s: float
    """The processor time of a step over all threads."""
    record_bytes_per_step: float
    """The bytes that the record kept in memory for each step."""
    max_buffered_steps: int
    """The maximum number of steps that the record kept in memory."""


@dataclass(frozen=True)
class Probe:
    """The measurement of a run."""

    stages: tuple[StageProbe, ...]
    """The measurement of each stage."""
    peak_bytes: int
    """The peak memory of the process in bytes."""


def probe(config: RunConfig, *, limit_s: float) -> Probe:
    """Run all stages of a recipe for a short time and return the measurement.

    As in the real run, all stages run in one process and their steps are recorded. Each stage is
    evaluated and saved once.

    Args:
        config: The recipe.
        limit_s: Seconds of training after which a stage begins no further step. Each stage runs a
            few steps even if they take longer.

    Raises:
        RatchetError: The run failed.
    """
    with TemporaryFolder("plan") as directory:
        with show_bar("seconds of the probe", round(limit_s * len(config.stages))) as advance:
            recipe = write_text(_shorten(config))
            run, output = _train(directory, recipe, "--try", str(limit_s), advance=advance)
        if not run.summary.exists():
            raise RatchetError(
                f"a probe of {config.name} failed. Its output ends with: {output.strip()[-800:]}"
            )
        step_metrics = [row for row in read_jsonl(run.metrics) if "time/step_s" in row]
        record = Record(run.steps)
        stages = []
        last_steps = accumulate(stage.n_steps for stage in config.stages)
        for stage, last_step in zip(config.stages, last_steps, strict=True):
            stage_metrics = [
                metrics
                for metrics in step_metrics
                if last_step - stage.n_steps < metrics["step"] <= last_step
            ]
            stages.append(_measure_stage(stage_metrics, record, stage.name))
        return Probe(tuple(stages), _read_peak(run))


def _measure_stage(step_metrics: list[dict[str, Any]], record: Record, stage: str) -> StageProbe:
    """Return the measurement of a stage from the metrics of its steps and from the record."""
    measured_steps = step_metrics[1:] or step_metrics
    seconds_by_phase = {
        phase: median(metrics.get(f"time/{phase}_s", 0.0) for metrics in measured_steps)
        for phase in TIMED_PHASES
    }
    rest_s = median(metrics["time/step_s"] for metrics in measured_steps) - sum(
        seconds_by_phase.values()
    )
    processor_s = median(metrics["time/processor_s"] for metrics in measured_steps)
    # A file holds steps of one stage only, because the checkpoint at a stage's end closes the file.
    steps_by_file = [
        [recorded_step.step for recorded_step in file.steps]
        for file in record.files
        if file.steps[0].stage == stage
    ]
    longest_file = max(steps_by_file, key=len, default=[])
    record_bytes = (
        record.table(SCHEMA.names, steps=longest_file).nbytes / len(longest_file)
        if longest_file
        else 0.0
    )
    return StageProbe(
        len(step_metrics),
        {**seconds_by_phase, "rest": max(0.0, rest_s)},
        processor_s,
        record_bytes,
        len(longest_file),
    )


def _shorten(config: RunConfig) -> dict[str, Any]:
    logging = config.logging.model_copy(update={"sinks": (), "progress": "off"})
    stages = tuple(_shorten_stage(stage) for stage in config.stages)
    return dump_plain(
        config.model_copy(update={"stages": stages, "logging": logging, "run_dir": None})
    )


def _shorten_stage(stage: StageConfig) -> StageConfig:
    """Return the stage with an evaluation and a checkpoint only at its end.

    The evaluation has at most as many tasks as the generator runs at a time.
    """
    tasks = stage.evaluation.tasks
    if stage.generator.request_limit is not None:
        tasks = min(tasks, stage.generator.request_limit)
    evaluation = {
        "tasks": tasks,
        **_get_defaults(EvaluationConfig, "every", "patience", "metric", "min_gain", "stop_at"),
    }
    checkpoint = {
        "every": 0,
        **_get_defaults(CheckpointConfig, "limit_s", "keep_best", "metric", "end_with"),
    }
    return stage.model_copy(
        update={
            "evaluation": stage.evaluation.model_copy(update=evaluation),
            "checkpoint": stage.checkpoint.model_copy(update=checkpoint),
        }
    )


def _get_defaults(
    section: type[EvaluationConfig | CheckpointConfig], *names: str
) -> dict[str, Any]:
    return {name: section.model_fields[name].default for name in names}


def _train(
    directory: Path,
    recipe: str,
    *options: str,
    advance: Callable[[int], None] = lambda seconds: None,
) -> tuple[RunDirectory, str]:
    """Run `ratchet train` and return (its run directory, its output).

    `advance` is called with each second that it takes.
    """
    path, run = directory / "recipe.yaml", RunDirectory(directory / "run")
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
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
    ) as process:
        try:
            while True:
                try:
                    output, _ = process.communicate(timeout=1)
                    return run, output.decode(errors="replace")
                except subprocess.TimeoutExpired:
                    advance(1)
        except BaseException:  # Ctrl-C ends the training too
            process.kill()
            raise


def _read_peak(run: RunDirectory) -> int:
    return int(json.loads(run.summary.read_text())["peak_mib"] * MIB)


EMPTY_RECIPE = """
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


def measure_empty_process(config: RunConfig) -> int:
    """Return the peak bytes of an almost empty run: Python, PyTorch, and their libraries."""
    with TemporaryFolder("plan") as directory:
        run, output = _train(
            directory, f"{EMPTY_RECIPE}threads: {config.threads}\ndevice: {config.device}\n"
        )
        if not run.summary.exists():
            raise RatchetError(
                "an almost empty run failed on this machine. Its output ends with: "
                f"{output.strip()[-800:]}"
            )
        return _read_peak(run)
