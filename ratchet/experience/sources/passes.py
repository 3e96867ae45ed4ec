"""Convert passes over the data (epochs) to numbers of steps, by counting the tasks of the data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ratchet.config.checks.length import length_conflicts
from ratchet.config.schema import RunConfig, StageConfig
from ratchet.environments.build import build_environment
from ratchet.errors import ConfigError, DataError, MissingDependency
from ratchet.protocols import Environment

# A product such as 0.1 x 30 that exceeds a whole number by at most this counts as that number.
ROUNDING = 1e-9


@dataclass(frozen=True)
class ResolvedRecipe:
    """A recipe whose stages all have a number of steps, which replaces any `passes`."""

    config: RunConfig
    """The recipe."""
    notes: Mapping[int, str] = field(default_factory=dict)
    """A text that describes the length of each stage that had `passes`, by the stage's index."""
    environments: Mapping[int, Environment] = field(default_factory=dict)
    """The environments that were built to count tasks, by the stage's index, so that their data are
    not read twice."""

    @property
    def lines(self) -> Sequence[str]:
        """The notes, each with the name of its stage."""
        return [
            f"stage {self.config.stages[index].name}: {note}" for index, note in self.notes.items()
        ]


def resolve_passes(config: RunConfig) -> ResolvedRecipe:
    """Replace the `passes` of each stage by the number of steps that they take.

    Raises:
        ConfigError: The tasks of a stage are endless, or a key does not fit its number of steps.
        DataError: The data can't be read.
    """
    stages = list(config.stages)
    notes = {}
    environments = {}
    for index, stage in enumerate(config.stages):
        if stage.steps is not None or stage.passes is None:
            continue
        environment = build_environment(stage.environment)
        n_tasks = _count_tasks(stage, environment)
        steps = max(1, math.ceil(stage.passes * n_tasks / stage.batch_size - ROUNDING))
        stages[index] = stage.model_copy(update={"steps": steps, "passes": None})
        plural = "" if stage.passes == 1 else "es"
        notes[index] = (
            f"{stage.passes:g} pass{plural} over {n_tasks:,} tasks, {stage.batch_size:,} a step: "
            f"{steps:,} steps"
        )
        environments[index] = environment
    if not notes:
        return ResolvedRecipe(config)
    resolved = config.model_copy(update={"stages": tuple(stages)})
    if problems := list(length_conflicts(resolved)):
        raise ConfigError("\n".join(problems))
    return ResolvedRecipe(resolved, notes, environments)


def describe_passes(config: RunConfig) -> tuple[RunConfig, Mapping[int, str]]:
    """Return the recipe with its numbers of steps, and a text on each stage that had `passes`.

    The texts describe the stages' lengths, by the stage's index. If the data can't be read on this
    machine, the recipe is unchanged, and the texts say why.

    Raises:
        ConfigError: See `resolve_passes`.
    """
    try:
        resolved = resolve_passes(config)
    except (DataError, MissingDependency) as error:
        reason = f"the number of steps depends on the data, which can't be read here: {error}"
        return config, {
            index: f"{stage.passes:g} passes; {reason}"
            for index, stage in enumerate(config.stages)
            if stage.passes is not None
        }
    return resolved.config, resolved.notes


def _count_tasks(stage: StageConfig, environment: Environment) -> int:
    """Return the number of distinct training tasks of a stage."""
    count = environment.task_count()
    if count is None and stage.examples is None:
        raise ConfigError(
            f"stage {stage.name}: passes={stage.passes:g} counts the tasks of environment "
            f"{stage.environment.kind_name}, which are endless. Set steps, or set examples "
            "to the number of tasks to train on"
        )
    n_tasks = min(number for number in (count, stage.examples) if number is not None)
    if not n_tasks:
        raise ConfigError(
            f"stage {stage.name}: passes={stage.passes:g}, but the training split has no rows"
        )
    return n_tasks
