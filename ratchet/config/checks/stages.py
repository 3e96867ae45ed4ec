"""Check for conflicts between the keys of a stage, and between stages.

A section checks its own keys (`ratchet.config.base`). Each conflict found here names the keys that
clash, and the smallest fix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ratchet.config.base import Section
from ratchet.config.checks.async_rollouts import ASYNC_CHECKS
from ratchet.config.checks.clash import Conflict, Key, clash
from ratchet.config.checks.curriculum import SELECTION_CHECKS
from ratchet.config.checks.devices import DEVICE_CHECKS
from ratchet.config.checks.judges import JUDGE_CHECKS, judge_conflicts
from ratchet.config.checks.length import LENGTH_CHECKS
from ratchet.config.checks.lora import LORA_CHECKS
from ratchet.config.checks.model import address_conflicts, known_context, model_conflicts
from ratchet.config.checks.placement import PLACEMENT_CHECKS
from ratchet.config.checks.precision import PRECISION_CHECKS
from ratchet.config.checks.sizes import SIZE_CHECKS
from ratchet.config.model_shape.presets import PRESETS
from ratchet.config.registry import KINDS
from ratchet.config.resolve import section_class
from ratchet.config.schema import RunConfig, StageConfig, get_default_rewards
from ratchet.config.sections import EnvironmentConfig, ModelSizes
from ratchet.errors import RatchetError
from ratchet.structured_output import StructuredOutput


def conflicts(config: RunConfig) -> Iterator[Conflict]:
    """Yield all conflicts between the keys of a recipe."""
    yield from model_conflicts(config)
    yield from address_conflicts(config)
    yield from _check_same_generator(config)
    yield from judge_conflicts(config)
    # Several stages may have the same conflict with a key of the run.
    yield from dict.fromkeys(
        Conflict(tuple(_locate_key(key, index) for key in conflict.keys), conflict.message)
        for index, stage in enumerate(config.stages)
        for check in STAGE_CHECKS
        for conflict in check(stage, config)
    )


def _locate_key(key: Key, index: int) -> Key:
    """Return the place in the recipe of a key of the run or of its stage with this index."""
    return ("stages", index, *key) if key[0] in StageConfig.model_fields else key


def _check_same_generator(config: RunConfig) -> Iterator[Conflict]:
    first = config.stages[0]
    for index, stage in enumerate(config.stages):
        if stage.generator != first.generator:
            yield Conflict(
                (("stages", index, "generator"),),
                f"stages {first.name} and {stage.name} differ in generator, and one generator "
                "serves the whole run: set generator at the top",
            )


# --- checks of one stage


def _check_minibatches(stage: StageConfig, config: RunConfig) -> Iterator[Conflict]:
    maximum, noun = stage.batch_size, "groups"
    attempts, minibatches = stage.algorithm.n_attempts, stage.algorithm.n_minibatches
    if stage.algorithm.splits_groups:
        maximum = stage.batch_size * attempts
        noun = f"groups of {attempts} attempts"
    if maximum < minibatches:
        yield clash(
            f"batch_size={stage.batch_size} {noun} can't be split into "
            f"algorithm.minibatches={minibatches}: "
            f"set algorithm.minibatches to {maximum} or less",
            "algorithm.minibatches",
            "batch_size",
        )


def _check_sampling(stage: StageConfig, config: RunConfig) -> Iterator[Conflict]:
    if stage.source != "rollouts":
        return
    sampling = stage.sampling
    if sampling.temperature == 0:
        yield clash(
            f"sampling.temperature=0 makes the {stage.algorithm.n_attempts} attempts of a group "
            f"equal, so that algorithm {_get_kind(stage)} learns nothing: set "
            "sampling.temperature above 0 (evaluation has a greedy attempt anyway)",
            "sampling.temperature",
        )
    for key, off_value in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)):
        value = getattr(sampling, key)
        if value != off_value and not stage.algorithm.corrects_rollouts:
            yield clash(
                f"sampling.{key}={value:g} truncates the distribution, which needs a rollout "
                f"correction in algorithm {_get_kind(stage)}: set sampling.{key}={off_value:g}, or "
                "algorithm.correction if the algorithm has that key",
                f"sampling.{key}",
            )


def _check_context(stage: StageConfig, config: RunConfig) -> Iterator[Conflict]:
    context = known_context(config.model)
    settings = {
        "sampling.max_new_tokens": stage.sampling.max_new_tokens,
        "evaluation.max_new_tokens": stage.evaluation.max_new_tokens or 0,
    }
    for key, tokens in settings.items():
        if context is not None and tokens >= context:
            yield clash(
                f"{key}={tokens} leaves no room for a prompt in the model's context of {context} "
                f"tokens: lower {key}, or raise model.overrides.max_positions",
                key,
            )


def _get_kind_or_value(value: object) -> object:
    return value.kind_name if isinstance(value, Section) else value


def _check_evaluation(stage: StageConfig, config: RunConfig) -> Iterator[Conflict]:
    evaluation = stage.evaluation
    for key in ("every", "samples", "environment"):
        value = getattr(evaluation, key)
        if value and not evaluation.tasks:
            yield clash(
                f"evaluation.{key}={_get_kind_or_value(value)} with evaluation.tasks=0 evaluates "
                f"nothing: set evaluation.tasks, or remove evaluation.{key}",
                f"evaluation.{key}",
                "evaluation.tasks",
            )
    if evaluation.samples and evaluation.temperature is None and stage.sampling.temperature == 0:
        yield clash(
            f"evaluation.samples={evaluation.samples} at sampling.temperature=0 are all equal: set "
            "evaluation.temperature",
            "evaluation.samples",
            "sampling.temperature",
        )


def _check_end_with_best(stage: StageConfig, config: RunConfig) -> Iterator[Conflict]:
    """Check end_with=best: only a checkpoint of an evaluated step has a score."""
    checkpoint, every = stage.checkpoint, stage.evaluation.every
    metric = (checkpoint.metric or "eval/").removeprefix("-")
    if checkpoint.end_with != "best" or not metric.startswith("eval/"):
        return
    if not every or not checkpoint.every or every % checkpoint.every:
        yield clash(
            "checkpoint.end_with=best needs a checkpoint after each evaluation, and "
            f"checkpoint.every={checkpoint.every} with evaluation.every={every} does not give "
            "that: set both to the same number",
            "checkpoint.end_with",
            "checkpoint.every",
        )


def _check_rewards(stage: StageConfig, config: RunConfig) -> Iterator[Conflict]:
    """Refuse rewards that judge nothing, because the algorithm generates no attempts.

    They are allowed if a stage with rollouts has the same rewards, or if evaluation uses them.
    """
    is_default = stage.rewards == get_default_rewards(stage.environment)
    is_shared = any(
        other.source == "rollouts" and other.rewards == stage.rewards for other in config.stages
    )
    is_evaluated = stage.evaluation.tasks > 0 and stage.eval_rewards == stage.rewards
    if (
        stage.source not in ("rollouts", None)
        and stage.rewards
        and not (is_default or is_shared or is_evaluated)
    ):
        yield clash(
            f"rewards judge attempts, and algorithm {_get_kind(stage)} generates none: remove "
            "rewards, or set eval_rewards if they are meant for evaluation",
            "rewards",
        )


def _check_eval_rewards(stage: StageConfig, config: RunConfig) -> Iterator[Conflict]:
    """Check that an evaluation uses `eval_rewards`.

    The evaluation of another stage with the same `eval_rewards` counts too.
    """
    eval_environment = stage.evaluation.environment
    evaluating_stages = [
        other
        for other in config.stages
        if other.evaluation.tasks
        and (
            other.evaluation.environment is None or not _judges_itself(other.evaluation.environment)
        )
    ]
    is_default = stage.eval_rewards == (get_default_rewards(stage.environment) or stage.rewards)
    if is_default or any(other.eval_rewards == stage.eval_rewards for other in evaluating_stages):
        return
    key = "evaluation.tasks"
    reason = "evaluation.tasks=0 evaluates nothing"
    fix = "set evaluation.tasks above 0"
    if eval_environment is not None:
        key = "evaluation.environment"
        reason = (
            f"evaluation.environment={_get_kind_or_value(eval_environment)} is judged by its own "
            "reward"
        )
        fix = "remove evaluation.environment"
    yield clash(
        f"eval_rewards judge in evaluation, and {reason}: remove eval_rewards, or {fix}",
        "eval_rewards",
        key,
    )


def _judges_itself(environment: EnvironmentConfig) -> bool:
    return bool(get_default_rewards(environment)) or environment.returns_rewards


def _check_reward_names(stage: StageConfig, config: RunConfig) -> Iterator[Conflict]:
    for key in ("rewards", "eval_rewards"):
        names = [reward.metric_name for reward in getattr(stage, key)]
        for name in dict.fromkeys(name for name in names if names.count(name) > 1):
            yield clash(
                f"{key} has {name} twice, and both would write metrics of that name: keep one, "
                "with one weight",
                key,
            )


def _check_sampling_filters(stage: StageConfig, config: RunConfig) -> Iterator[Conflict]:
    """Check that the generator supports top_p, top_k and min_p. Greedy sampling ignores them."""
    off_values = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
    for key, off_value in off_values.items():
        value = getattr(stage.sampling, key)
        if (
            value != off_value
            and stage.sampling.temperature > 0
            and not stage.generator.reports_kept_mass
        ):
            yield clash(
                f"sampling.{key}={value:g} truncates the distribution, and generator "
                f"{stage.generator.kind_name} doesn't return the kept probability mass, which "
                f"training needs (vLLM returns it if speculative decoding is off): set "
                f"sampling.{key}={off_value:g}, or generator.kind=engine",
                f"sampling.{key}",
                "generator.kind",
            )


def _check_structured(stage: StageConfig, config: RunConfig) -> Iterator[Conflict]:
    """Check that sampling.structured can be followed, and that its masks reach the learner."""
    if stage.sampling.structured is None:
        return
    try:
        StructuredOutput.from_mapping(stage.sampling.structured).compile()
    except RatchetError as error:
        yield clash(f"sampling.structured: {error}", "sampling.structured")
    if stage.source == "rollouts" and not stage.generator.records_masks:
        yield clash(
            f"sampling.structured is set, but generator {stage.generator.sampler.kind_name} does "
            "not return the tokens that the grammar allows, which training needs: set "
            "generator.kind=engine",
            "sampling.structured",
            "generator.kind",
        )


def _check_model_fits_generator(stage: StageConfig, config: RunConfig) -> Iterator[Conflict]:
    """Check that the generator can run the preset. A model directory is checked when it is read."""
    shape = PRESETS.get(config.model.preset or "")
    if shape is None:
        return
    shape = {"n_experts": 0, **shape, **config.model.overrides}
    sizes = ModelSizes(**{name: shape[name] for name in ModelSizes._fields})
    if reason := stage.generator.explain_misfit(sizes, on_cpu=config.device == "cpu"):
        yield clash(
            f"generator {stage.generator.sampler.kind_name} can't run this model: {reason}",
            "generator",
            "model",
        )


def _check_rows(stage: StageConfig, config: RunConfig) -> Iterator[Conflict]:
    """Check that the environment has the rows that the algorithm needs.

    A custom environment is checked when the stage starts.
    """
    if stage.source is not None and stage.source not in stage.environment.data_kinds:
        # The registry slot "worker_environment" leaves out mixtures and environment workers, whose
        # rows are those of other environments.
        suitable_kinds = [
            kind
            for kind in KINDS["worker_environment"]
            if _may_have_rows(section_class("worker_environment", kind), stage.source)
        ]
        yield clash(
            f"algorithm {_get_kind(stage)} learns from {stage.source}, which environment "
            f"{stage.environment.kind_name} doesn't have: set environment.kind to "
            f"{' or '.join(suitable_kinds)}",
            "environment.kind",
            "algorithm.kind",
        )
    if stage.algorithm.uses_mismatched_pairs and stage.batch_size == 1:
        yield clash(
            f"batch_size={stage.batch_size} leaves algorithm {_get_kind(stage)} no other prompt to "
            "compare an answer with: set batch_size=2 or more",
            "batch_size",
        )


def _may_have_rows(environment: type[Section], source: str) -> bool:
    """True if the environment can have rows for this source.

    A property `data_kinds` depends on the keys of the section, so any source is possible.
    """
    assert issubclass(environment, EnvironmentConfig), "built-in environments derive from it"
    data_kinds: object = environment.data_kinds
    return isinstance(data_kinds, property) or source in environment.data_kinds


def _check_is_judged(stage: StageConfig, config: RunConfig) -> Iterator[Conflict]:
    """Check that something rewards the attempts."""
    needs_reward = stage.source == "rollouts" and stage.algorithm.reads_reward
    if needs_reward and not stage.rewards and not stage.environment.returns_rewards:
        yield clash(
            f"nothing judges the attempts in environment {stage.environment.kind_name}: "
            "set rewards",
            "rewards",
            "environment.kind",
        )


def _check_agent(stage: StageConfig, config: RunConfig) -> Iterator[Conflict]:
    """Check that an agent is used and judged.

    An agent that is set for all stages need not be used by this stage if another one uses it.
    """
    if stage.agent is None:
        return
    agent: Any = stage.agent  # `Any`: the schema adds the server's keys to the agent's section
    if agent.host in ("0.0.0.0", "::") and agent.public_host is None:
        yield clash(
            f"agent.host={agent.host} is not an address that an agent can call: set "
            "agent.public_host to the name under which agents reach this machine, such as "
            "host.docker.internal",
            "agent.host",
        )
    kind = stage.agent.kind_name
    if stage.rollouts.history_window is not None:
        yield clash(
            f"agent {kind} writes the prompts itself, so rollouts.history_window has no effect: "
            "remove rollouts.history_window",
            "rollouts.history_window",
            "agent.kind",
        )
    is_shared = any(
        other.source in ("rollouts", None) and other.agent == stage.agent for other in config.stages
    )
    if not is_shared and not stage.evaluation.tasks:
        yield clash(
            f"agent {kind} plays attempts, and algorithm {_get_kind(stage)} generates none: remove "
            "agent",
            "agent.kind",
        )
    if stage.source == "rollouts" and stage.algorithm.reads_reward and not stage.rewards:
        yield clash(
            f"nothing judges the attempts of agent {kind}, which environment "
            f"{stage.environment.kind_name} does not see: set rewards",
            "agent.kind",
            "rewards",
        )


def _check_worker_runs(stage: StageConfig, config: RunConfig) -> Iterator[Conflict]:
    """Refuse the keys that groups played in rollout workers do not support."""
    if not stage.is_played_by_workers:
        return
    rollouts = stage.rollouts
    keys = {
        "rollouts.max_staleness": rollouts.max_staleness > 0,
        "rollouts.dynamic_sampling": rollouts.dynamic_sampling,
        "rollouts.group_filter": rollouts.group_filter is not None,
        "rollouts.tail_batching": rollouts.tail_batching > 0,
        "rollouts.redundant_attempts": rollouts.redundant_attempts > 0,
        "rollouts.redundant_groups": rollouts.redundant_groups > 0,
        "agent.kind": stage.agent is not None,
        "cluster.colocated": config.cluster.takes_turns,
    }
    for key in (key for key, is_set in keys.items() if is_set):
        yield clash(
            "generator.worker_runs=groups plays whole groups in worker processes, where "
            f"{key.removesuffix('.kind')} is not supported: remove it, or set "
            "generator.worker_runs=completions",
            key,
            "generator.worker_runs",
        )


def _check_overlong_penalty(stage: StageConfig, config: RunConfig) -> Iterator[Conflict]:
    longest = stage.sampling.max_new_tokens
    for index, start in stage.algorithm.penalty_starts.items():
        if start >= longest:
            yield clash(
                f"overlong_penalty begins after {start} tokens, and "
                f"sampling.max_new_tokens={longest} ends every answer before that: set max_length "
                f"to {longest}",
                f"algorithm.shaping.{index}.max_length",
                "sampling.max_new_tokens",
            )


def _check_sentinels(stage: StageConfig, config: RunConfig) -> Iterator[Conflict]:
    """Check that there are attempts to probe.

    Sentinels that are set for all stages need none in this stage if another one has attempts.
    """
    if any(
        other.source in ("rollouts", None) and other.sentinels == stage.sentinels
        for other in config.stages
    ):
        return
    for key in ("second_opinion", "canaries"):
        if getattr(stage.sentinels, key):
            yield clash(
                f"sentinels.{key} probes rewarded attempts, and algorithm {_get_kind(stage)} "
                f"generates none: remove sentinels.{key}",
                f"sentinels.{key}",
            )


def _get_kind(stage: StageConfig) -> str:
    return stage.algorithm.kind_name


STAGE_CHECKS: tuple[Callable[[StageConfig, RunConfig], Iterator[Conflict]], ...] = (
    _check_minibatches,
    _check_sampling,
    _check_sampling_filters,
    _check_structured,
    _check_model_fits_generator,
    _check_context,
    _check_evaluation,
    _check_end_with_best,
    _check_rewards,
    _check_eval_rewards,
    _check_reward_names,
    _check_rows,
    _check_is_judged,
    _check_agent,
    _check_worker_runs,
    _check_overlong_penalty,
    _check_sentinels,
    *JUDGE_CHECKS,
    *LENGTH_CHECKS,
    *ASYNC_CHECKS,
    *SELECTION_CHECKS,
    *PLACEMENT_CHECKS,
    *LORA_CHECKS,
    *PRECISION_CHECKS,
    *DEVICE_CHECKS,
    *SIZE_CHECKS,
)
