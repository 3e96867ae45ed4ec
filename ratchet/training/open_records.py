"""Open the metric sinks and the recorder of a run, without the steps after its checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ratchet.config.schema import RunConfig
from ratchet.executors.signals import shield_programs
from ratchet.observe.records.writer import Recorder
from ratchet.observe.sinks import JsonlSink, Sink, Sinks, open_tensorboard
from ratchet.observe.trackers import TrackedRun, build_trackers, get_run_id
from ratchet.runs.run_dir import RunDirectory


def open_sinks(
    config: RunConfig,
    plain_config: Mapping[str, Any],
    directory: RunDirectory,
    *,
    keep_through: int,
) -> Sinks:
    """Return the metric sinks of a run.

    Args:
        config: The frozen recipe.
        plain_config: The recipe as plain values, which trackers show.
        directory: The run directory.
        keep_through: The last step whose metrics are kept; -1 for a new run.
    """
    sinks: list[Sink] = [JsonlSink(directory.metrics, keep_through=keep_through)]
    board = open_tensorboard(
        config.logging.tensorboard, directory.tensorboard, keep_through=keep_through
    )
    if board is not None:
        sinks.append(board)
    if config.logging.sinks:
        tracked = TrackedRun(
            config.name,
            get_run_id(directory.path),
            directory.path,
            plain_config,
            is_resumed=keep_through >= 0,
        )
        with shield_programs():
            sinks += build_trackers(config.logging.sinks, tracked)
    return Sinks(sinks)


def open_recorder(config: RunConfig, directory: RunDirectory, *, keep_through: int) -> Recorder:
    """Return the recorder of a run's steps, which drops the steps after `keep_through`."""
    is_background = config.device != "cpu" or any(
        stage.learner.is_distributed for stage in config.stages
    )
    return Recorder(
        config.record,
        directory.steps,
        seed=config.seed,
        keep_through=keep_through,
        in_background=is_background,
    )
