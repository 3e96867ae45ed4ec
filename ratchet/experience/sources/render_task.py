"""Render one task of a data set as an algorithm would learn from it."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ratchet.data.chat.renderer import Renderer
from ratchet.executors.event_loop import run_event_loop
from ratchet.experience.sources.offline import (
    LabelledSource,
    PairSource,
    SteppedSource,
    SupervisedSource,
    TextRenderer,
)
from ratchet.experience.sources.rollouts import StreamSource
from ratchet.experience.sources.tasks import TaskStream
from ratchet.protocols import Environment
from ratchet.types import Task, Trajectory

# The kinds of data (see `StageConfig.source`) that exist before training.
OFFLINE_SOURCES = ("rows", "pairs", "labelled", "steps")


def render_task(
    environment: Environment,
    task: Task,
    renderer: Renderer,
    source: str,
    *,
    turns: str = "all",
    history_window: int | None = None,
) -> Sequence[Trajectory]:
    """Return the trajectories of a task: one for each of its answers.

    Args:
        environment: The environment of the task, which supplies its answers.
        task: The task.
        renderer: The renderer of the policy's tokenizer.
        source: One of OFFLINE_SOURCES.
        turns: The turns of a demonstration that train: "last" or "all".
        history_window: Number of past turns in a turn's prompt; None: a demonstration is one row.

    Raises:
        ConfigError: The environment has no such answers.
        DataError: The row has no such answer, or can't be rendered.
    """
    (group,) = run_event_loop(
        _make_source(environment, renderer, source, turns, history_window).make(
            [(task.id, task)], version=0
        )
    )
    return group.trajectories


def _make_source(
    environment: Environment,
    renderer: Renderer,
    source: str,
    turns: str,
    history_window: int | None,
) -> StreamSource:
    stream = TaskStream(environment, seed=0)
    text_renderer = TextRenderer(renderer, max_context=sys.maxsize)
    if source == "rows":
        return SupervisedSource(
            stream,
            "render",
            text_renderer,
            train="last" if turns == "last" else "all",
            history_window=history_window,
        )
    if source == "labelled":
        return LabelledSource(stream, "render", text_renderer, uses_mismatched_pairs=False)
    return (PairSource if source == "pairs" else SteppedSource)(stream, "render", text_renderer)
