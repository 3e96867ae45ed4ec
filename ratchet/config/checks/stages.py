"""Check combinations of keys that no section can check alone.

Each conflict names the keys that clash, and the smallest fix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ratchet.config.base import Section
from ratchet.config.checks.async_rollouts import AHEAD_CHECKS
from ratchet.config.checks.clash import Conflict, clash
from ratchet.config.checks.curriculum import CHOICE_CHECKS
from ratchet.config.checks.lora import LORA_CHECKS
from ratchet.config.checks.model import address_conflicts, known_context, model_conflicts
from ratchet.config.checks.placement import PLACE_CHECKS
from ratchet.config.checks.precision import PRECISION_CHECKS
from ratchet.config.checks.sizes import SIZE_CHECKS
from ratchet.config.model_shape.presets import PRESETS
from ratchet.config.registry import KINDS
from ratchet.config.resolve import section_class
from ratchet.config.schema import RunConfig, StageConfig, own_rewards


def conflicts(config: RunConfig) -> Iterator[Conflict]:
    yield from model_conflicts(config)
    yield from address_conflicts(config)
    yield from _one_generator(config)
    for index, stage in enumerate(config.stages):
        for check in STAGE_CHECKS:
            for conflict in check(stage, config):
                yield Conflict(
                    tuple(("stages", index, *key) for key in conflict.keys), conflict.message
                )


def _one_generator(config: RunConfig) -> Iterator[Conflict]:
    first = config.stages[0]
    for index, stage in enumerate(config.stages):
        if stage.generator != first.generator:
            yield Conflict(
                (("stages", index, "generator"),),
                f"stages {first.name} and {stage.name} differ in generator, and one serves the "
                "whole run: set it at the top",
            )


# --- checks of one stage


def _batch(stage: StageConfig, config: RunConfig) -> Iterator[Conflict]:
    maximum, what = stage.batch_size, "groups"
    if getattr(stage.algorithm, "minibatches_of", "groups") == "attempts":
        maximum, what = stage.batch_size * stage.attempts, f"groups of {stage.attempts} attempts"
    if maximum < stage.minibatches:
        yield clash(
            f"batch_size={stage.batch_size} {what} can't be split into "
            f"algorithm.minibatches={stage.minibatches}: "
            f"set algorithm.minibatches to {maximum} or less",
            "algorithm.minibatches",
            "batch_size",
        )


def _schedule(stage: StageConfig, config: RunConfig) -> Iterator[Conflict]:
    optimizer = stage.optimizer
    if optimizer.warmup_steps > stage.optimizer_steps:
        yield clash(
            f"optimizer.warmup_steps={optimizer.warmup_steps} is more than the stage's "
            f"{stage.optimizer_steps} optimizer steps "
            f"(steps={stage.steps} x minibatches={stage.minibatches} x epochs={stage.epochs}): "
            "lower it",
            "optimizer.warmup_steps",
            "steps",
        )
    if optimizer.min_lr_ratio > 0 and optimizer.schedule == "constant":
        yield clash(
            f"optimizer.min_lr_ratio={optimizer.min_lr_ratio:g} is not read with "
            "optimizer.schedule=constant: "
            "set optimizer.schedule=linear, cosine or wsd, or remove it",
            "optimizer.min_lr_ratio",
        )


def _decay(stage: StageConfig, config: RunConfig) -> Iterator[Conflict]:
    optimizer, steps = stage.optimizer, stage.optimizer_steps
    warmup, decay = optimizer.warmup_steps, optimizer.decay_steps
    if optimizer.schedule != "wsd":
        if decay:
            yield clash(
                f"optimizer.decay_steps={decay} is not read with "
                f"optimizer.schedule={optimizer.schedule}: "
                "set optimizer.schedule=wsd, or remove it",
                "optimizer.decay_steps",
            )
    elif not decay:
        yield clash(
            "optimizer.schedule=wsd without optimizer.decay_steps never decays: set "
            f"optimizer.decay_steps={max(1, steps // 5)} (a fifth of the stage's {steps} optimizer "
            "steps), or "
            "optimizer.schedule=constant",
            "optimizer.schedule",
        )
    elif warmup <= steps < warmup + decay:
        yield clash(
            f"optimizer.warmup_steps={warmup} and decay_steps={decay} together are more than the "
            f"stage's {steps} optimizer "
            "steps: lower one of them, or raise steps",
            "optimizer.decay_steps",
            "steps",
        )


def _critic(stage: StageConfig, config: RunConfig) -> Iterator[Conflict]:
    warmup = getattr(getattr(stage.algorithm, "critic", None), "warmup_steps", 0)
    if warmup >= stage.steps:
        yield clash(
            f"algorithm.critic.warmup_steps={warmup} leaves the policy none of the stage's "
            f"{stage.steps} steps: lower it, or "
            "raise steps",
            "algorithm.critic.warmup_steps",
            "steps",
        )


def _sampling(stage: StageConfig, config: RunConfig) -> Iterator[Conflict]:
    if stage.source != "rollouts":
        return
    sampling = stage.sampling
    if sampling.temperature == 0:
        yield clash(
            f"sampling.temperature=0 makes the {stage.attempts} attempts of a group alike, so that "
            "algorithm "
            f"{_kind(stage)} learns nothing: set it above 0 (evaluation has a greedy attempt "
            "anyway)",
            "sampling.temperature",
        )
    for key, off in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)):
        value = getattr(sampling, key)
        if value != off and getattr(stage.algorithm, "correction", None) is None:
            yield clash(
                f"sampling.{key}={value:g} cuts tokens from the distribution that algorithm "
                f"{_kind(stage)} trains on, which "
                f"needs a rollout correction: set sampling.{key}={off:g}, or algorithm.correction "
                "where it has one",
                f"sampling.{key}",
            )


def _context(stage: StageConfig, config: RunConfig) -> Iterator[Conflict]:
    context = known_context(config.model)
    asked = {
        "sampling.max_new_tokens": stage.sampling.max_new_tokens,
        "evaluation.max_new_tokens": stage.evaluation.max_new_tokens or 0,
    }
    for key, tokens in asked.items():
        if context is not None and tokens >= context:
            yield clash(
                f"{key}={tokens} leaves no room for a prompt in the model's context of {context} "
                "tokens: "
                "lower it, or raise model.overrides.max_positions",
                key,
            )


def _named(value: object) -> object:
    return getattr(value, "kind", value)


def _evaluation(stage: StageConfig, config: RunConfig) -> Iterator[Conflict]:
    evaluation = stage.evaluation
    for key in ("every", "samples", "environment"):
        value = getattr(evaluation, key)
        if value and not evaluation.tasks:
            yield clash(
                f"evaluation.{key}={_named(value)} with evaluation.tasks=0 evaluates nothing: "
                f"set evaluation.tasks, or remove evaluation.{key}",
                f"evaluation.{key}",
                "evaluation.tasks",
            )
    if evaluation.samples and evaluation.temperature is None and stage.sampling.temperature == 0:
        yield clash(
            f"evaluation.samples={evaluation.samples} at sampling.temperature=0 are all alike: set "
            "evaluation.temperature",
            "evaluation.samples",
            "sampling.temperature",
        )


def _end_with_best(stage: StageConfig, config: RunConfig) -> Iterator[Conflict]:
    """Check end_with=best: only a checkpoint of an evaluated step has a score."""
    checkpoint, every = stage.checkpoint, stage.evaluation.every
    if checkpoint.end_with != "best" or not checkpoint.metric.removeprefix("-").startswith("eval/"):
        return
    if not every or not checkpoint.every or every % checkpoint.every:
        yield clash(
            "checkpoint.end_with=best needs a checkpoint after each evaluation, and "
            f"checkpoint.every={checkpoint.every} with "
            f"evaluation.every={every} does not give that: set both to the same",
            "checkpoint.end_with",
            "checkpoint.every",
        )


def _rewards(stage: StageConfig, config: RunConfig) -> Iterator[Conflict]:
    """Check rewards if the algorithm makes no attempts. Those that another stage's rollouts share,
    as a default, are fine."""
    expected = stage.rewards == own_rewards(stage.environment)
    shared = any(
        other.source == "rollouts" and other.rewards == stage.rewards for other in config.stages
    )
    evaluated = stage.evaluation.tasks > 0 and stage.eval_rewards == stage.rewards
    if (
        stage.source not in ("rollouts", None)
        and stage.rewards
        and not (expected or shared or evaluated)
    ):
        yield clash(
            f"rewards judge attempts, and algorithm {_kind(stage)} makes none: remove rewards, "
            "or set eval_rewards if they are meant for evaluation",
            "rewards",
        )


def _eval_rewards(stage: StageConfig, config: RunConfig) -> Iterator[Conflict]:
    """Check that evaluation reads its rewards. A default that another stage reads is fine."""
    elsewhere = stage.evaluation.environment
    readers = [
        one for one in config.stages if one.evaluation.tasks and one.evaluation.environment is None
    ]
    expected = stage.eval_rewards == (own_rewards(stage.environment) or stage.rewards)
    if expected or any(one.eval_rewards == stage.eval_rewards for one in readers):
        return
    key, why = "evaluation.tasks", "evaluation.tasks=0 evaluates nothing"
    if elsewhere is not None:
        key, why = (
            "evaluation.environment",
            f"evaluation.environment={_named(elsewhere)} is judged by its own reward",
        )
    yield clash(
        f"eval_rewards judges in evaluation, and {why}: remove eval_rewards, or {key}",
        "eval_rewards",
        key,
    )


def _reward_names(stage: StageConfig, config: RunConfig) -> Iterator[Conflict]:
    for key in ("rewards", "eval_rewards"):
        names = [getattr(reward, "kind", "").rpartition(":")[2] for reward in getattr(stage, key)]
        for name in dict.fromkeys(name for name in names if names.count(name) > 1):
            yield clash(
                f"{key} has {name} twice, and their parts would share that name: give it once, "
                "with one weight",
                key,
            )


def _filters(stage: StageConfig, config: RunConfig) -> Iterator[Conflict]:
    """Check sampling filters, which do not act on greedy sampling."""
    cutting = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
    for key, off in cutting.items():
        value = getattr(stage.sampling, key)
        if (
            value != off
            and stage.sampling.temperature > 0
            and not getattr(stage.generator, "filters", True)
        ):
            yield clash(
                f"sampling.{key}={value:g} cuts the distribution, and generator "
                f"{getattr(stage.generator, 'kind', '')} doesn't "
                f"say how much it kept, which training needs: set sampling.{key}={off:g}, or "
                "generator.kind=engine",
                f"sampling.{key}",
                "generator.kind",
            )


def _shape(stage: StageConfig, config: RunConfig) -> Iterator[Conflict]:
    """Check that the generator can run the preset; a model directory is checked when read."""
    misfit, shape = (
        getattr(stage.generator, "misfit", None),
        PRESETS.get(config.model.preset or ""),
    )
    if misfit is None or shape is None:
        return
    shape = {**shape, **config.model.overrides}
    sizes = {name: shape[name] for name in ("n_heads", "n_kv_heads", "head_dim", "n_layers")}
    if reason := misfit(**sizes, on_cpu=config.device == "cpu"):
        kind = getattr(stage.sampling_generator, "kind", "")
        yield clash(
            f"generator {kind} can't run this model: {reason}",
            "generator",
            "model",
        )


def _given(stage: StageConfig, config: RunConfig) -> Iterator[Conflict]:
    """Check that the environment has the rows that the algorithm needs. A custom environment is
    checked when the stage starts."""
    gives = getattr(stage.environment, "gives", None)
    if gives is not None and stage.source is not None and stage.source not in gives:
        # An environment composed of others has what its parts have.
        able = [
            kind
            for kind in KINDS["played"]
            if _may_give(section_class("played", kind), stage.source)
        ]
        yield clash(
            f"algorithm {_kind(stage)} learns from {stage.source}, which environment "
            f"{getattr(stage.environment, 'kind', '')} "
            f"doesn't have: set environment.kind to {' or '.join(able)}",
            "environment.kind",
            "algorithm.kind",
        )
    if getattr(stage.algorithm, "reference_rows", False) and stage.batch_size == 1:
        yield clash(
            f"batch_size={stage.batch_size} leaves algorithm {_kind(stage)} no other prompt to "
            "compare an answer with: "
            "set batch_size=2 or more",
            "batch_size",
        )


def _may_give(environment: type[Section], source: str) -> bool:
    """Return True if the environment has this source, under some of its keys at least."""
    gives = getattr(environment, "gives", ())
    return isinstance(gives, property) or source in gives


def _judged(stage: StageConfig, config: RunConfig) -> Iterator[Conflict]:
    needed = stage.source == "rollouts" and getattr(stage.algorithm, "reads_reward", True)
    if needed and not stage.rewards and not getattr(stage.environment, "judges", True):
        yield clash(
            f"nothing judges the attempts at environment {getattr(stage.environment, 'kind', '')}: "
            "set rewards",
            "rewards",
            "environment.kind",
        )


def _agent(stage: StageConfig, config: RunConfig) -> Iterator[Conflict]:
    """Check that an agent is used and judged. A default that another stage reads is fine."""
    if stage.agent is None:
        return
    kind = getattr(stage.agent, "kind", "")
    shared = any(
        other.source in ("rollouts", None) and other.agent == stage.agent for other in config.stages
    )
    if not shared and not stage.evaluation.tasks:
        yield clash(
            f"agent {kind} plays attempts, and algorithm {_kind(stage)} makes none: remove agent",
            "agent.kind",
        )
    if (
        stage.source == "rollouts"
        and getattr(stage.algorithm, "reads_reward", True)
        and not stage.rewards
    ):
        yield clash(
            f"nothing judges the attempts of agent {kind}, which the steps of environment "
            f"{getattr(stage.environment, 'kind', '')} don't see: set rewards",
            "agent.kind",
            "rewards",
        )


def _played(stage: StageConfig, config: RunConfig) -> Iterator[Conflict]:
    """Check the keys that groups played by the generator's workers do not support."""
    if not stage.played_by_workers:
        return
    rollouts = stage.rollouts
    keys = {
        "rollouts.max_staleness": rollouts.max_staleness > 0,
        "rollouts.dynamic_sampling": rollouts.dynamic_sampling,
        "rollouts.tail_batching": rollouts.tail_batching > 0,
        "rollouts.redundant_attempts": rollouts.redundant_attempts > 0,
        "rollouts.redundant_groups": rollouts.redundant_groups > 0,
        "agent.kind": stage.agent is not None,
        "cluster.colocated": bool(getattr(config.cluster, "colocated", False)),
    }
    for key in (key for key, given in keys.items() if given):
        yield clash(
            "generator.worker_runs=groups plays whole groups in worker processes, where "
            f"{key.removesuffix('.kind')} can't be had: remove it, or set "
            "generator.worker_runs=completions",
            key,
            "generator.worker_runs",
        )


def _overlong(stage: StageConfig, config: RunConfig) -> Iterator[Conflict]:
    longest = stage.sampling.max_new_tokens
    for index, part in enumerate(getattr(stage.algorithm, "shaping", ())):
        start = getattr(part, "max_length", longest) - getattr(part, "buffer", 1)
        if start >= longest:
            yield clash(
                f"overlong_penalty begins after {start} tokens, and "
                f"sampling.max_new_tokens={longest} ends every answer "
                f"before: set max_length to {longest}",
                f"algorithm.shaping.{index}.max_length",
                "sampling.max_new_tokens",
            )


def _probed(stage: StageConfig, config: RunConfig) -> Iterator[Conflict]:
    """Check that probes have attempts to look at. A default that another stage reads is fine."""
    if any(
        other.source in ("rollouts", None) and other.sentinels == stage.sentinels
        for other in config.stages
    ):
        return
    for key in ("second_opinion", "canaries"):
        if getattr(stage.sentinels, key):
            yield clash(
                f"sentinels.{key} looks at what earns rewards, and algorithm {_kind(stage)} draws "
                "no attempts: remove it",
                f"sentinels.{key}",
            )


def _kind(stage: StageConfig) -> str:
    return getattr(stage.algorithm, "kind", "")


STAGE_CHECKS: tuple[Callable[[StageConfig, RunConfig], Iterator[Conflict]], ...] = (
    _batch,
    _schedule,
    _decay,
    _critic,
    _sampling,
    _filters,
    _shape,
    _context,
    _evaluation,
    _end_with_best,
    _rewards,
    _eval_rewards,
    _reward_names,
    _given,
    _judged,
    _agent,
    _played,
    _overlong,
    _probed,
    *AHEAD_CHECKS,
    *CHOICE_CHECKS,
    *PLACE_CHECKS,
    *LORA_CHECKS,
    *PRECISION_CHECKS,
    *SIZE_CHECKS,
)
