"""Checks of batch sizes too large for memory, and of temperatures too low for a generator."""

from __future__ import annotations

from collections.abc import Iterator

from ratchet.config.checks.clash import Conflict, clash
from ratchet.config.schema import RunConfig, StageConfig

MAX_TRAJECTORIES = 10**7  # in memory at once; each takes at least about 1 KiB


def _check_batch_size(stage: StageConfig, config: RunConfig) -> Iterator[Conflict]:
    group_size, evaluation = stage.algorithm.n_attempts, stage.evaluation
    trajectories = stage.batch_size * group_size
    attempts = evaluation.tasks * (evaluation.greedy + evaluation.samples)
    if trajectories > MAX_TRAJECTORIES:
        yield clash(
            f"batch_size={stage.batch_size:,} of {group_size:,} attempts each is more than the "
            f"{MAX_TRAJECTORIES:,} trajectories that a step can hold. Set "
            f"batch_size={max(1, MAX_TRAJECTORIES // group_size)} or less.",
            "batch_size",
        )
    if attempts > MAX_TRAJECTORIES:
        yield clash(
            f"evaluation.tasks={evaluation.tasks:,} makes {attempts:,} attempts, more than the "
            f"{MAX_TRAJECTORIES:,} that one evaluation can hold. Set "
            f"evaluation.tasks={max(1, MAX_TRAJECTORIES * evaluation.tasks // attempts)} or less.",
            "evaluation.tasks",
            "evaluation.samples",
        )


def _check_temperature(stage: StageConfig, config: RunConfig) -> Iterator[Conflict]:
    lowest = stage.generator.min_temperature
    for key in ("sampling", "evaluation"):
        temperature = getattr(stage, key).temperature or 0.0
        if 0 < temperature < lowest:
            yield clash(
                f"{key}.temperature={temperature:g} is too low: generator "
                f"{stage.generator.kind_name} would use {lowest:g} "
                f"instead. Set {key}.temperature={lowest:g}.",
                f"{key}.temperature",
                "generator.kind",
            )


SIZE_CHECKS = (_check_batch_size, _check_temperature)
