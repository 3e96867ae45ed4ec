"""The length of a stage: warm-up steps, and a recipe cut short to try it."""

from __future__ import annotations

import math
from typing import Any

from ratchet.config.base import Section
from ratchet.config.schema import OptimizerConfig, RunConfig, StageConfig


def count_warmup_steps(steps: int, share: float, total: int) -> int:
    """Return the number of optimizer steps of a warm-up.

    Args:
        steps: `optimizer.warmup_steps`; if it is 0, `share` applies.
        share: `optimizer.warmup_share`. A fraction of a step counts as a whole step.
        total: Optimizer steps of the stage.
    """
    return steps or math.ceil(share * total)


def shorten(config: RunConfig, steps: int) -> tuple[RunConfig, list[str]]:
    """Return the recipe with at most `steps` steps a stage, and a note for each stage.

    Other numbers of steps that no longer fit (a warm-up, an interval) are clipped, and the notes
    name them.
    """
    shortened = [_shorten_stage(stage, steps) for stage in config.stages]
    stages, notes = zip(*shortened, strict=True)
    return config.model_copy(update={"stages": stages}), list(notes)


def _shorten_stage(stage: StageConfig, max_steps: int) -> tuple[StageConfig, str]:
    """Return the stage with at most `max_steps` steps, and the note about its changes."""
    steps = max_steps if stage.steps is None else min(max_steps, stage.steps)
    shortened_stage = stage.model_copy(update={"steps": steps, "passes": None})
    updates = {
        "optimizer": _clip_optimizer(stage.optimizer, shortened_stage.optimizer_steps),
        # At least one step trains the policy.
        "algorithm": stage.algorithm.limit_critic_warmup(steps - 1),
        "evaluation": _clip(stage.evaluation, "every", steps),
        "checkpoint": _clip(stage.checkpoint, "every", steps),
        "curriculum": _clip(stage.curriculum, "full_by_step", steps),
    }
    evaluation, checkpoint = updates["evaluation"], updates["checkpoint"]
    if checkpoint.every and evaluation.every % checkpoint.every:
        # keep_best needs a checkpoint after each evaluation.
        updates["checkpoint"] = checkpoint.model_copy(update={"every": evaluation.every})
    shortened_stage = shortened_stage.model_copy(update=updates)
    length = (
        f"of the {stage.steps}" if stage.steps is not None else f"of the {stage.passes:g} passes"
    )
    note = f"stage {stage.name} is only tried: {steps} steps {length} in the recipe"
    clipped = [change for key in updates for change in _list_changes(stage, shortened_stage, key)]
    return shortened_stage, note + (f"; clipped: {', '.join(clipped)}" if clipped else "")


def _clip(section: Any, key: str, maximum: int) -> Any:
    if section is None or getattr(section, key) <= maximum:
        return section
    return section.model_copy(update={key: maximum})


def _clip_optimizer(optimizer: OptimizerConfig, total: int) -> OptimizerConfig:
    """Return the section with a warm-up and a decay that fit into `total` optimizer steps."""
    decay = optimizer.decay_steps
    warmup = count_warmup_steps(optimizer.warmup_steps, optimizer.warmup_share, total)
    if warmup + decay <= total:
        return optimizer
    decay = min(decay, max(1, total // 2))
    updates: dict[str, Any] = {"decay_steps": decay}
    if warmup + decay > total:
        updates |= {"warmup_steps": total - decay, "warmup_share": 0.0}
    return optimizer.model_copy(update=updates)


def _list_changes(before: Section, after: Section, key: str) -> list[str]:
    """Return the numbers below `key` in which two sections differ, as "key=before to after"."""
    old, new = getattr(before, key), getattr(after, key)
    if isinstance(old, Section) and isinstance(new, Section):
        return [
            f"{key}.{change}"
            for name in type(new).model_fields
            for change in _list_changes(old, new, name)
        ]
    return [] if old == new else [f"{key}={old:g} to {new:g}"]
