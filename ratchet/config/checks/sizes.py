"""Checks of batch sizes that exceed memory, and of temperatures that a generator would raise."""

from __future__ import annotations

from collections.abc import Iterator

from ratchet.config.checks.clash import Conflict, clash
from ratchet.config.schema import RunConfig, StageConfig

MOST_AT_ONCE = 10**7  # trajectories in memory; each takes at least about 1 KiB


def _size(stage: StageConfig, config: RunConfig) -> Iterator[Conflict]:
    trajectories, evaluation = stage.batch_size * stage.attempts, stage.evaluation
    attempts = evaluation.tasks * (evaluation.greedy + evaluation.samples)
    if trajectories > MOST_AT_ONCE:
        yield clash(
            f"batch_size={stage.batch_size:,} of {stage.attempts:,} attempts each is more than the "
            f"{MOST_AT_ONCE:,} "
            "trajectories that a step can hold. Set "
            f"batch_size={max(1, MOST_AT_ONCE // stage.attempts)} or less.",
            "batch_size",
        )
    if attempts > MOST_AT_ONCE:
        yield clash(
            f"evaluation.tasks={evaluation.tasks:,} makes {attempts:,} attempts, of at most "
            f"{MOST_AT_ONCE:,} that one "
            "evaluation can hold. Set "
            f"evaluation.tasks={max(1, MOST_AT_ONCE * evaluation.tasks // attempts)} or less.",
            "evaluation.tasks",
            "evaluation.samples",
        )


def _least_temperature(stage: StageConfig, config: RunConfig) -> Iterator[Conflict]:
    least = getattr(stage.generator, "least_temperature", 0.0)
    for key in ("sampling", "evaluation"):
        temperature = getattr(stage, key).temperature or 0.0
        if 0 < temperature < least:
            yield clash(
                f"{key}.temperature={temperature:g}, and generator "
                f"{getattr(stage.generator, 'kind', '')} would take {least:g} "
                f"instead. Set {key}.temperature={least:g}.",
                f"{key}.temperature",
                "generator.kind",
            )


SIZE_CHECKS = (_size, _least_temperature)
