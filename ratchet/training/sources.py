"""Create the source of a stage's groups: rows, pairs, labelled answers or steps, or rollouts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ratchet.algorithms.base import Algorithm
from ratchet.errors import RowTooLong
from ratchet.experience.rollout.manager import GroupPlayer
from ratchet.experience.seeds import derive_seed
from ratchet.experience.sources.curriculum import Curriculum
from ratchet.experience.sources.offline import (
    LabelledSource,
    PairSource,
    SteppedSource,
    SupervisedSource,
    TextRenderer,
)
from ratchet.experience.sources.rollouts import RolloutSource, StreamSource
from ratchet.experience.sources.tasks import TaskStream
from ratchet.training.stage import EnvSetup, Policy, StageSpec
from ratchet.types import Task


def _make_stream(setup: EnvSetup, spec: StageSpec) -> TaskStream:
    """Return the tasks of a stage, in the stage's own order.

    `spec.examples` selects tasks by the run's seed alone, so every stage gets the same ones.
    """
    order = derive_seed(spec.seed, spec.name, "tasks")
    limits: dict[str, Any] = {"seed": order, "examples": spec.examples, "pool_seed": spec.seed}
    if spec.curriculum is None:
        return TaskStream(setup.environment, **limits)
    return Curriculum(setup.environment, spec.curriculum, tasks_per_step=spec.batch_size, **limits)


def _make_text_renderer(policy: Policy, algorithm: Algorithm) -> TextRenderer:
    return TextRenderer(
        policy.renderer, max_context=policy.model.max_positions, temperature=algorithm.temperature
    )


def _make_supervised(
    policy: Policy, setup: EnvSetup, algorithm: Algorithm, spec: StageSpec, manager: GroupPlayer
) -> StreamSource:
    return SupervisedSource(
        _make_stream(setup, spec),
        spec.name,
        _make_text_renderer(policy, algorithm),
        train=algorithm.turns,
    )


def make_pairs(
    policy: Policy,
    setup: EnvSetup,
    algorithm: Algorithm,
    spec: StageSpec,
    manager: GroupPlayer | None = None,
) -> PairSource:
    """Return the source of preference pairs. `manager` is unused: pairs need no rollouts."""
    return PairSource(_make_stream(setup, spec), spec.name, _make_text_renderer(policy, algorithm))


def _make_labelled(
    policy: Policy, setup: EnvSetup, algorithm: Algorithm, spec: StageSpec, manager: GroupPlayer
) -> StreamSource:
    return LabelledSource(
        _make_stream(setup, spec),
        spec.name,
        _make_text_renderer(policy, algorithm),
        uses_mismatched_pairs=algorithm.uses_mismatched_pairs,
    )


def _make_stepped(
    policy: Policy, setup: EnvSetup, algorithm: Algorithm, spec: StageSpec, manager: GroupPlayer
) -> StreamSource:
    return SteppedSource(
        _make_stream(setup, spec), spec.name, _make_text_renderer(policy, algorithm)
    )


def _make_rollouts(
    policy: Policy, setup: EnvSetup, algorithm: Algorithm, spec: StageSpec, manager: GroupPlayer
) -> StreamSource:
    max_context = policy.model.max_positions

    def check_prompt(task: Task) -> None:
        tools = setup.environment.tools(task) or None
        length = len(policy.renderer.prompt(task.messages, tools))
        if length >= max_context:
            raise RowTooLong(
                f"{task.where}: the prompt has {length} tokens, but the model holds {max_context}: "
                "shorten or drop the prompt"
            )

    return RolloutSource(
        _make_stream(setup, spec),
        spec.name,
        manager,
        sampling=replace(spec.sampling, routes=algorithm.replays_routes),
        seed=derive_seed(spec.seed, spec.name, "rollouts"),
        group_size=algorithm.group_size,
        greedy_baseline=algorithm.greedy_baseline,
        redundant_attempts=spec.rollouts.redundant_attempts,
        redundant_groups=spec.rollouts.redundant_groups,
        check_prompt=check_prompt,
    )


SOURCES: dict[
    str, Callable[[Policy, EnvSetup, Algorithm, StageSpec, GroupPlayer], StreamSource]
] = {
    "rows": _make_supervised,
    "pairs": make_pairs,
    "labelled": _make_labelled,
    "steps": _make_stepped,
    "rollouts": _make_rollouts,
}
