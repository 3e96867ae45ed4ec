"""Check the settings that depend on the number of steps of a stage.

If a stage has `passes`, its number of steps is known only after its data are read. These checks run
again then.
"""

from __future__ import annotations

from collections.abc import Iterator

from ratchet.config.checks.clash import Conflict, clash
from ratchet.config.length import count_warmup_steps
from ratchet.config.schema import RunConfig, StageConfig


def _check_length(stage: StageConfig, config: RunConfig) -> Iterator[Conflict]:
    if stage.steps is None and stage.passes is None:
        yield clash("steps and passes are both null: set one of them", "steps", "passes")
    if stage.steps is not None and stage.passes is not None:
        yield clash(
            f"steps={stage.steps} and passes={stage.passes:g} are two lengths of one stage: remove "
            "one of them",
            "passes",
            "steps",
        )


def _check_warmup(stage: StageConfig, config: RunConfig) -> Iterator[Conflict]:
    optimizer = stage.optimizer
    if optimizer.warmup_steps and optimizer.warmup_share:
        yield clash(
            f"optimizer.warmup_steps={optimizer.warmup_steps} and "
            f"warmup_share={optimizer.warmup_share:g} are two lengths of one warm-up: remove one "
            "of them",
            "optimizer.warmup_share",
            "optimizer.warmup_steps",
        )


def _check_schedule(stage: StageConfig, config: RunConfig) -> Iterator[Conflict]:
    optimizer = stage.optimizer
    if stage.steps is not None and optimizer.warmup_steps > stage.optimizer_steps:
        yield clash(
            f"optimizer.warmup_steps={optimizer.warmup_steps} is more than the stage's "
            f"{stage.optimizer_steps} optimizer steps (steps={stage.n_steps} x "
            f"minibatches={stage.algorithm.n_minibatches} x epochs={stage.algorithm.n_epochs}): "
            "lower optimizer.warmup_steps",
            "optimizer.warmup_steps",
            "steps",
        )
    if optimizer.min_lr_ratio > 0 and optimizer.schedule == "constant":
        yield clash(
            f"optimizer.min_lr_ratio={optimizer.min_lr_ratio:g} is not read with "
            "optimizer.schedule=constant: set optimizer.schedule=linear, cosine or wsd, or remove "
            "optimizer.min_lr_ratio",
            "optimizer.min_lr_ratio",
        )


def _check_decay(stage: StageConfig, config: RunConfig) -> Iterator[Conflict]:
    optimizer, decay = stage.optimizer, stage.optimizer.decay_steps
    steps = None if stage.steps is None else stage.optimizer_steps
    if optimizer.schedule != "wsd":
        if decay:
            yield clash(
                f"optimizer.decay_steps={decay} is not read with "
                f"optimizer.schedule={optimizer.schedule}: "
                "set optimizer.schedule=wsd, or remove optimizer.decay_steps",
                "optimizer.decay_steps",
            )
        return
    if not decay:
        suggested_value = (
            ""
            if steps is None
            else f"={max(1, steps // 5)} (a fifth of the stage's {steps} optimizer steps)"
        )
        yield clash(
            "optimizer.schedule=wsd without optimizer.decay_steps never decays: set "
            f"optimizer.decay_steps{suggested_value}, or optimizer.schedule=constant",
            "optimizer.schedule",
        )
    if steps is None:
        return
    warmup = count_warmup_steps(optimizer.warmup_steps, optimizer.warmup_share, steps)
    if warmup <= steps < warmup + decay:
        warmup_setting = (
            f"warmup_share={optimizer.warmup_share:g}"
            if optimizer.warmup_share
            else f"warmup_steps={warmup}"
        )
        yield clash(
            f"optimizer.{warmup_setting} and decay_steps={decay} together are more than the "
            f"stage's {steps} optimizer "
            "steps: lower one of them, or raise steps",
            "optimizer.decay_steps",
            "steps",
        )


def _check_critic_warmup(stage: StageConfig, config: RunConfig) -> Iterator[Conflict]:
    warmup = stage.algorithm.critic_warmup_steps
    if stage.steps is not None and warmup >= stage.n_steps:
        yield clash(
            f"algorithm.critic.warmup_steps={warmup} leaves the policy none of the stage's "
            f"{stage.n_steps} steps: lower algorithm.critic.warmup_steps, or raise steps",
            "algorithm.critic.warmup_steps",
            "steps",
        )


def _check_curriculum(stage: StageConfig, config: RunConfig) -> Iterator[Conflict]:
    curriculum = stage.curriculum
    if curriculum is None or curriculum.difficulty is None or stage.steps is None:
        return
    if curriculum.full_by_step > stage.n_steps:
        yield clash(
            f"curriculum.full_by_step={curriculum.full_by_step} is more than the stage's "
            f"steps={stage.n_steps}, so the hardest tasks would never "
            "be drawn: lower curriculum.full_by_step",
            "curriculum.full_by_step",
            "steps",
        )


LENGTH_CHECKS = (
    _check_length,
    _check_warmup,
    _check_schedule,
    _check_decay,
    _check_critic_warmup,
    _check_curriculum,
)


def length_conflicts(config: RunConfig) -> Iterator[str]:
    """Yield a message, with its smallest fix, for each conflict with a stage's number of steps."""
    for stage in config.stages:
        for check in LENGTH_CHECKS:
            for conflict in check(stage, config):
                yield f"stage {stage.name}: {conflict.message}"
