"""The composition root: build a `StageRun` from the parts that a recipe or Python code created.

Only this module imports all layers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial, reduce
from typing import Any

from ratchet.algorithms.base import Algorithm
from ratchet.config.experience import RolloutsConfig
from ratchet.config.resolve import resolve
from ratchet.config.sections import LearnerSection
from ratchet.errors import ConfigError
from ratchet.evals.early_stopping import EarlyStopping
from ratchet.experience.async_rollouts.concurrency import ConcurrencyController
from ratchet.experience.async_rollouts.group_filter import build_group_filter
from ratchet.experience.async_rollouts.prefetch import (
    DuringUpdate,
    PrefetchingSource,
    has_learning_signal,
)
from ratchet.experience.async_rollouts.resumable_generator import ResumableGenerator
from ratchet.experience.async_rollouts.staleness_scheduler import (
    StalenessScheduler,
    get_max_in_flight,
)
from ratchet.experience.async_rollouts.tail_batching import AbortableGenerator, TailBatching
from ratchet.experience.checks.logprob_parity import ParityGate, ParityPair
from ratchet.experience.checks.reward_hacking import RewardHackingProbes
from ratchet.experience.rollout.environment_answers import guard_measure, guard_post_process
from ratchet.experience.rollout.manager import GroupPlayer
from ratchet.experience.rollout.remote_manager import RemoteRolloutManager
from ratchet.experience.seeds import derive_seed
from ratchet.experience.sources.batcher import Batcher
from ratchet.experience.sources.prompt_ledger import PromptLedger
from ratchet.experience.sources.replay_buffer import ReplayBuffer
from ratchet.experience.sources.rollouts import RolloutSource
from ratchet.generators.workers.pool import GeneratorPool
from ratchet.learners.device_memory import (
    count_stage_models,
    count_update_bytes,
    size_micro_batches,
)
from ratchet.models.flops import DecoderCost
from ratchet.models.lora.decoder import Adapter, count_adapter_parameters
from ratchet.models.memory import memory_bytes
from ratchet.models.policy import DecoderPolicy, PolicyModel
from ratchet.observe.metrics import MetricsManager
from ratchet.protocols import Learner, Source, WeightSync
from ratchet.runs.stage_progress import StagePosition
from ratchet.training.colocation import colocate
from ratchet.training.evaluators import list_held_out_tasks, make_stage_evaluator
from ratchet.training.roles import check_routers, get_max_row_length, make_roles
from ratchet.training.run import StageRun
from ratchet.training.sources import SOURCES, make_manager
from ratchet.training.stage import EnvSetup, Policy, StageSpec
from ratchet.training.workers.generators import make_recovering_weight_sync
from ratchet.types import Group
from ratchet.weight_sync.factory import SyncEndpoints

RolesWrapper = Callable[[Mapping[str, Learner]], dict[str, Learner]]


def make_run(
    policy: Policy,
    setup: EnvSetup,
    algorithm: Algorithm,
    spec: StageSpec,
    *,
    ledger: PromptLedger | None = None,
    position: StagePosition | None = None,
    wrap_roles: Sequence[RolesWrapper] = (),
    **run_fields: Any,
) -> StageRun:
    """Build the run of one stage in this process.

    Args:
        policy: The model to train, with its generator.
        setup: The environment and its rewards.
        algorithm: The algorithm that trains the policy.
        spec: The settings of the stage.
        ledger: Records the events of each group; None keeps the source's own ledger.
        position: The position of the checkpoint to resume from; None starts the stage.
        wrap_roles: Functions that wrap the learners, applied in this order.
        run_fields: Further fields of `StageRun`, such as observers.
    """
    _check_parts(policy, algorithm, spec)
    start_step = policy.generator.version if spec.start_step is None else spec.start_step
    end_step = start_step + spec.steps
    position = position or StagePosition(start_step)
    learner = _size_micro_batches(policy, algorithm, spec)
    spec = replace(spec, sampling=policy.with_stop_ids(spec.sampling), learner=learner)
    roles = make_roles(
        policy.model,
        policy.tokenizer,
        algorithm,
        section=spec.learner,
        optimizer=spec.optimizer,
        steps=spec.steps,
        ranks=policy.ranks,
        algorithm_section=spec.algorithm,
        adapter=spec.adapter,
    )
    _reserve_memory(policy, roles, spec)
    metrics = MetricsManager()
    weight_sync = _make_weight_sync(policy, roles["policy"], spec, metrics)
    max_context = get_max_row_length(policy.model, roles)
    if spec.takes_turns:
        roles, generator, weight_sync = colocate(roles, policy.generator, weight_sync)
        policy = replace(policy, generator=generator)
    rollout_policy = _wrap_generator(policy, spec.rollouts)
    manager = _make_group_player(policy, rollout_policy, setup, algorithm, spec, max_context)
    batcher = _make_batcher(
        policy, rollout_policy, setup, algorithm, spec, manager, ledger, end_step=end_step
    )
    pair = ParityPair.create(roles["policy"], policy.generator, weight_sync, policy.tokenizer)
    held_out_tasks = list_held_out_tasks(setup, spec)
    evaluator = make_stage_evaluator(policy, setup, algorithm, spec, roles, held_out_tasks)
    probes = _make_probes(policy, setup, spec)
    managers = [manager]
    managers += [*(evaluator.managers if evaluator else ()), *(probes.managers if probes else ())]
    return StageRun(
        name=spec.name,
        algorithm=algorithm,
        roles=reduce(lambda wrapped, wrap: wrap(wrapped), wrap_roles, roles),
        batcher=batcher,
        weight_sync=weight_sync,
        metrics=metrics,
        parity=ParityGate(pair, spec.parity),
        probes=probes,
        start_step=start_step,
        end_step=end_step,
        first_step=position.step,
        progress=position.progress,
        state=position.state,
        managers=managers,
        evaluator=evaluator,
        measure_environment=guard_measure(setup.environment),
        evaluate_every=spec.evaluation.every,
        early_stopping=EarlyStopping.from_config(spec.evaluation),
        trainable=_count_trainable(policy.model, spec.adapter),
        **run_fields,
    )


def _check_parts(policy: Any, algorithm: Any, spec: StageSpec) -> None:
    """Raise ConfigError if a part is something else, or does not fit the others."""
    if not isinstance(policy, Policy):
        name = type(policy).__name__
        raise ConfigError(f"{name} is not a Policy. Use Policy.create(model, tokenizer)")
    if not isinstance(algorithm, Algorithm):
        name = type(algorithm).__name__
        raise ConfigError(f"{name} is not an algorithm. Use ratchet.build(section)")
    check_routers(policy.model, policy.generator, algorithm, spec.learner)


def _make_weight_sync(
    policy: Policy, learner: Learner, spec: StageSpec, metrics: MetricsManager
) -> WeightSync:
    """Return the weight sync from the learner, or its ranks, to the generator."""
    endpoints = SyncEndpoints(
        policy.ranks or learner,
        policy.generator,
        directory=spec.directory,
        one_host=policy.one_host,
        # A colocated learner is in main memory during pushes; adapters are written to files there.
        on_accelerator=policy.is_on_accelerator and not spec.takes_turns and spec.adapter is None,
        adapter=spec.adapter,
    )
    return make_recovering_weight_sync(
        spec.weight_sync or resolve("weight_sync", {}), endpoints, metrics
    )


def _make_group_player(
    policy: Policy,
    rollout_policy: Policy,
    setup: EnvSetup,
    algorithm: Algorithm,
    spec: StageSpec,
    max_context: int,
) -> GroupPlayer:
    """Return the manager of the stage's rollouts, in this process or in the generator workers."""
    needs_reward = algorithm.reads_reward
    if spec.worker_rollouts is not None:
        assert isinstance(policy.generator, GeneratorPool), "only generator workers can play groups"
        return RemoteRolloutManager(
            policy.generator, (spec.worker_rollouts, max_context, needs_reward)
        )
    return make_manager(
        rollout_policy,
        setup,
        setup.reward,
        spec.rollouts,
        max_context=max_context,
        needs_reward=needs_reward,
    )


def _make_batcher(
    policy: Policy,
    rollout_policy: Policy,
    setup: EnvSetup,
    algorithm: Algorithm,
    spec: StageSpec,
    manager: GroupPlayer,
    ledger: PromptLedger | None,
    *,
    end_step: int,
) -> Batcher:
    """Return the batcher of the stage's groups, with the wrappers that the recipe names."""
    source = SOURCES[algorithm.source](policy, setup, algorithm, spec, manager)
    source.ledger = ledger or source.ledger
    stage_source = source
    if isinstance(source, RolloutSource):
        is_informative = partial(
            has_learning_signal,
            by_parts=algorithm.reads_parts,
            mean_reward_range=algorithm.mean_reward_range,
        )
        stage_source = _wrap_source(
            source, rollout_policy, setup, spec, is_informative, end_step=end_step
        )
    # A replay buffer post-processes new groups itself, and must not do it again to replayed ones.
    does_post_process = not isinstance(stage_source, ReplayBuffer)
    return Batcher(
        stage_source,
        groups_per_step=spec.batch_size,
        max_failed_share=spec.rollouts.max_failed_share,
        post_process=guard_post_process(setup.environment) if does_post_process else list,
    )


def _wrap_source(
    rollouts: RolloutSource,
    rollout_policy: Policy,
    setup: EnvSetup,
    spec: StageSpec,
    is_informative: Callable[[Group], bool],
    *,
    end_step: int,
) -> Source:
    """Wrap the rollouts in tail batching, prefetching and a replay buffer, as the recipe says.

    Args:
        rollouts: The source of groups.
        rollout_policy: The policy whose generator is wrapped by `_wrap_generator`.
        setup: The environment.
        spec: The settings of the stage.
        is_informative: Returns True for groups with a learning signal.
        end_step: The first step after the stage.
    """
    settings = spec.rollouts
    source = rollouts
    if isinstance(rollout_policy.generator, AbortableGenerator):
        source = TailBatching(
            rollouts,
            rollout_policy.generator,
            extra_groups=settings.tail_batching,
            end_step=end_step,
        )
    if isinstance(rollout_policy.generator, ResumableGenerator):
        source = PrefetchingSource(
            rollouts,
            _make_scheduler(settings, spec.batch_size, end_step),
            rollout_policy.generator,
            during_update=_get_behaviour_during_update(rollout_policy, spec),
            replayable=setup.environment.replayable and setup.agent is None,
            has_signal=is_informative if settings.dynamic_sampling else None,
            group_filter=None
            if settings.group_filter is None
            else build_group_filter(settings.group_filter),
            max_replaced=settings.max_replaced,
        )
    if settings.replay is not None:
        source = ReplayBuffer(
            source,
            settings.replay,
            ledger=rollouts.ledger,
            seed=derive_seed(spec.seed, spec.name, "replay"),
            post_process=guard_post_process(setup.environment),
        )
    return source


def _get_behaviour_during_update(policy: Policy, spec: StageSpec) -> DuringUpdate:
    """Return what attempts do while the learner works."""
    if spec.takes_turns:
        return "interrupt"
    return "pause" if policy.ranks is None and policy.generator.shares_weights else "continue"


def _wrap_generator(policy: Policy, settings: RolloutsConfig) -> Policy:
    """Return the policy with its generator wrapped for prefetching or tail batching."""
    if settings.prefetches:
        return replace(policy, generator=ResumableGenerator(policy.generator))
    return (
        replace(policy, generator=AbortableGenerator(policy.generator))
        if settings.tail_batching
        else policy
    )


def _make_scheduler(
    settings: RolloutsConfig, groups_per_step: int, end_step: int
) -> StalenessScheduler:
    """Return the scheduler of prefetched groups."""
    adaptive = settings.adaptive
    concurrency = None
    if adaptive is not None:
        concurrency = ConcurrencyController(
            groups_per_step=groups_per_step,
            max_groups=get_max_in_flight(groups_per_step, settings.max_staleness),
            staleness=adaptive.staleness,
            mismatch=adaptive.mismatch,
        )
    return StalenessScheduler(
        groups_per_step=groups_per_step,
        max_staleness=settings.max_staleness,
        end_step=end_step,
        order=settings.order,
        concurrency=concurrency,
    )


def _size_micro_batches(policy: Policy, algorithm: Algorithm, spec: StageSpec) -> LearnerSection:
    """Return the learner's section, whose automatic micro-batches fit its accelerator."""
    model = policy.model
    device = next(model.parameters()).device
    if policy.ranks is not None:
        device_bytes = min(policy.ranks.call_now("count_device_bytes"))
    else:
        device_bytes = 0 if device.type == "cpu" else memory_bytes(device)
    if not device_bytes or not isinstance(model, DecoderPolicy):
        return spec.learner
    lora = None if spec.adapter is None else spec.adapter.lora
    models = count_stage_models(algorithm, DecoderCost(model.shape), lora)
    return size_micro_batches(spec.learner, models, device_bytes)


def _reserve_memory(policy: Policy, roles: Mapping[str, Learner], spec: StageSpec) -> None:
    """Leave the generator's device memory to the learners: for their state and a micro-batch."""
    model = policy.model
    n_bytes = sum(role.count_later_bytes() for role in roles.values())
    if isinstance(model, DecoderPolicy):
        kind = next(model.parameters()).device.type
        longest = spec.sampling.max_new_tokens  # prompts are not known yet
        n_bytes += count_update_bytes(spec.learner, DecoderCost(model.shape), kind, longest)
    policy.generator.reserve_memory(n_bytes)


def _count_trainable(model: PolicyModel, adapter: Adapter | None) -> dict[str, float]:
    """Return the number and share of trainable parameters; {} without an adapter."""
    if adapter is None:
        return {}
    weights = dict(model.canonical_weights())
    lora = adapter.lora
    trainable = count_adapter_parameters(
        weights,
        model.resolve_adapter_layers(lora),
        lora.rank,
        model.resolve_expert_factors(lora),
    )
    return {
        "trainable_parameters": trainable,
        "trainable_share": trainable / (trainable + sum(w.numel() for w in weights.values())),
    }


def _make_probes(policy: Policy, setup: EnvSetup, spec: StageSpec) -> RewardHackingProbes | None:
    """Return the checks for reward hacking; None if the stage has none."""
    if setup.second_opinion is None and setup.canaries is None:
        return None
    probes = RewardHackingProbes(
        spec.sentinels.every, spec.sentinels.sample, setup.second_opinion, sampling=spec.sampling
    )
    if setup.canaries is not None:
        canary_setup = EnvSetup(setup.canaries, reward=setup.reward)
        probes.manager = make_manager(policy, canary_setup, setup.reward, spec.rollouts)
        probes.canaries = tuple(
            itertools.islice(setup.canaries.tasks("test", seed=spec.seed), probes.sample)
        )
    return probes
