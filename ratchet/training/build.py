"""The composition root: build a `Run` from a configuration or from parts made in Python.

Only this module imports all layers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from ratchet.algorithms.base import Algorithm
from ratchet.config.experience import RolloutsConfig
from ratchet.config.resolve import resolve
from ratchet.evals.early_stopping import Patience
from ratchet.experience.async_rollouts.concurrency import Concurrency
from ratchet.experience.async_rollouts.prefetch import Prefetch, teaches
from ratchet.experience.async_rollouts.resumable_generator import Interruptible
from ratchet.experience.async_rollouts.staleness_scheduler import GenerateScheduler, at_once
from ratchet.experience.async_rollouts.tail_batching import Cuttable, TailBatching
from ratchet.experience.checks.logprob_parity import Ends, ParityGate
from ratchet.experience.checks.reward_hacking import Probes
from ratchet.experience.rollout.manager import PlaysGroups
from ratchet.experience.rollout.remote_manager import Elsewhere
from ratchet.experience.seeds import seed_for
from ratchet.experience.sources.batcher import Batcher
from ratchet.experience.sources.prompt_ledger import Ledger
from ratchet.experience.sources.replay_buffer import Replay
from ratchet.experience.sources.rollouts import Rollouts
from ratchet.generators.workers.pool import Router
from ratchet.models.lora.decoder import Adapter, size_of
from ratchet.models.policy import PolicyModel
from ratchet.observe.metrics import MetricsManager
from ratchet.protocols import Learner, Link, Measures, Source
from ratchet.training.colocation import take_turns
from ratchet.training.evaluators import make_stage_evaluator
from ratchet.training.generator_workers import link_of
from ratchet.training.managers import make_manager
from ratchet.training.roles import check_routers, longest_row, make_roles
from ratchet.training.run import Run
from ratchet.training.sources import SOURCES
from ratchet.training.stage import Arena, Plan, Policy
from ratchet.types import Group
from ratchet.weight_sync.factory import Between


def make_run(
    policy: Policy,
    arena: Arena,
    algorithm: Algorithm,
    plan: Plan,
    *,
    ledger: Ledger | None = None,
    **run_fields: Any,
) -> Run:
    """Build the run of one stage in this process.

    Args:
        policy: The model to train, with its generator.
        arena: The environment and its rewards.
        algorithm: The algorithm.
        plan: What the stage does.
        ledger: Records what became of each group; None keeps the source's own.
        run_fields: Further fields of `Run`, such as observers.
    """
    first = policy.generator.version if plan.first_step is None else plan.first_step
    last_step = first + plan.steps
    plan = replace(plan, sampling=policy.with_stop_ids(plan.sampling))
    check_routers(policy.model, policy.generator, algorithm, plan.learner)
    roles = make_roles(
        policy.model,
        policy.tokenizer,
        algorithm,
        section=plan.learner,
        optimizer=plan.optimizer,
        steps=plan.steps,
        ranks=policy.ranks,
        spec=plan.algorithm,
        adapter=plan.adapter,
    )
    metrics = MetricsManager()
    link = _make_link(policy, roles["policy"], plan, metrics)
    max_context = longest_row(policy.model, roles)
    if plan.colocated:
        roles, generator, link = take_turns(roles, policy.generator, link)
        policy = replace(policy, generator=generator)
    wrapped = _wrap_generator(policy, plan.rollouts)
    manager = _make_group_player(policy, wrapped, arena, algorithm, plan, max_context)
    source = SOURCES[algorithm.source](policy, arena, algorithm, plan, manager)
    source.ledger = ledger or source.ledger
    scheduled = source
    if isinstance(source, Rollouts):
        is_informative = partial(teaches, by_parts=algorithm.reads_parts)
        scheduled = _schedule(source, wrapped, arena, plan, is_informative, last_step=last_step)
    ends = Ends.create(roles["policy"], policy.generator, link, policy.tokenizer)
    environment = arena.environment
    evaluator = make_stage_evaluator(policy, arena, algorithm, plan, roles["policy"])
    probes = _make_probes(policy, arena, plan)
    return Run(
        name=plan.name,
        algorithm=algorithm,
        roles=roles,
        batcher=Batcher(
            scheduled,
            groups_per_step=plan.batch_size,
            max_failed_share=plan.rollouts.max_failed_share,
        ),
        link=link,
        metrics=metrics,
        parity=ParityGate(ends, plan.parity),
        probes=probes,
        first_step=first,
        last_step=last_step,
        managers=(
            manager,
            *(evaluator.managers if evaluator else ()),
            *(probes.managers if probes else ()),
        ),
        evaluator=evaluator,
        environment_numbers=environment.measure if isinstance(environment, Measures) else None,
        evaluate_every=plan.evaluation.every,
        patience=Patience.from_config(plan.evaluation),
        trainable=_count_trainable(policy.model, plan.adapter),
        **run_fields,
    )


def _make_link(policy: Policy, learner: Learner, plan: Plan, metrics: MetricsManager) -> Link:
    """Return the weight sync from the processes that train to the generator."""
    endpoints = Between(
        policy.ranks or learner,
        policy.generator,
        directory=plan.directory,
        one_host=policy.one_host,
        adapter=plan.adapter,
    )
    return link_of(plan.link or resolve("link", {}), endpoints, metrics)


def _make_group_player(
    policy: Policy,
    wrapped: Policy,
    arena: Arena,
    algorithm: Algorithm,
    plan: Plan,
    max_context: int,
) -> PlaysGroups:
    """Return what plays the stage's groups: a manager in this process, or the generator workers."""
    needs_reward = algorithm.reads_reward
    if plan.played is not None:
        assert isinstance(policy.generator, Router), "only generator workers can play groups"
        return Elsewhere(policy.generator, (plan.played, max_context, needs_reward))
    return make_manager(
        wrapped,
        arena,
        arena.reward,
        plan.rollouts,
        max_context=max_context,
        needs_reward=needs_reward,
    )


def _schedule(
    rollouts: Rollouts,
    wrapped: Policy,
    arena: Arena,
    plan: Plan,
    is_informative: Callable[[Group], bool],
    *,
    last_step: int,
) -> Source:
    """Wrap the rollouts in tail batching, prefetching and replay, as the recipe sets.

    Args:
        rollouts: The source of groups.
        wrapped: The policy with the generator that attempts call. It must be idle while the learner
            changes tensors that both read.
        arena: The environment.
        plan: What the stage does.
        is_informative: True for groups that teach something.
        last_step: The end of the stage.
    """
    settings = plan.rollouts
    source = rollouts
    if isinstance(wrapped.generator, Cuttable):
        source = TailBatching(
            rollouts, wrapped.generator, more=settings.tail_batching, last_step=last_step
        )
    if isinstance(wrapped.generator, Interruptible):
        source = Prefetch(
            rollouts,
            _make_scheduler(settings, plan.batch_size, last_step),
            wrapped.generator,
            rests=wrapped.ranks is None and getattr(wrapped.generator, "shares_weights", False),
            replayable=arena.environment.replayable and arena.agent is None,
            teaches=is_informative if settings.dynamic_sampling else None,
            tries=settings.max_replaced,
        )
    if settings.replay is not None:
        source = Replay(
            source,
            settings.replay,
            ledger=rollouts.ledger,
            seed=seed_for(plan.seed, plan.name, "replay"),
        )
    return source


def _wrap_generator(policy: Policy, settings: RolloutsConfig) -> Policy:
    """Return the policy with its generator wrapped for prefetching or tail batching."""
    if settings.prefetches:
        return replace(policy, generator=Interruptible(policy.generator))
    return (
        replace(policy, generator=Cuttable(policy.generator)) if settings.tail_batching else policy
    )


def _make_scheduler(settings: RolloutsConfig, per_step: int, last_step: int) -> GenerateScheduler:
    adaptive = settings.adaptive
    concurrency = None
    if adaptive is not None:
        concurrency = Concurrency(
            per_step=per_step,
            most=at_once(per_step, settings.max_staleness),
            staleness=adaptive.staleness,
            mismatch=adaptive.mismatch,
        )
    return GenerateScheduler(
        per_step=per_step,
        max_staleness=settings.max_staleness,
        last_step=last_step,
        order=settings.order,
        concurrency=concurrency,
    )


def _count_trainable(model: PolicyModel, adapter: Adapter | None) -> dict[str, float]:
    """Return the number of parameters that train and their share; {} without an adapter."""
    if adapter is None:
        return {}
    weights = dict(model.canonical_weights())
    trains = size_of(weights, model.check_adapter(adapter.lora), adapter.lora.rank)
    return {
        "trainable_parameters": trains,
        "trainable_share": trains / (trains + sum(w.numel() for w in weights.values())),
    }


def _make_probes(policy: Policy, arena: Arena, plan: Plan) -> Probes | None:
    if arena.second is None and arena.canaries is None:
        return None
    probes = Probes(
        plan.sentinels.every, plan.sentinels.sample, arena.second, sampling=plan.sampling
    )
    if arena.canaries is not None:
        setup = Arena(arena.canaries, reward=arena.reward)
        probes.manager = make_manager(policy, setup, arena.reward, plan.rollouts)
        probes.canaries = tuple(
            itertools.islice(arena.canaries.tasks("test", seed=plan.seed), probes.sample)
        )
    return probes
