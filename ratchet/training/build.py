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
from ratchet.data.chat.renderer import Renderer
from ratchet.errors import ConfigError, DataError, MissingDependency
from ratchet.evals.early_stopping import Patience
from ratchet.evals.evaluator import Evaluator
from ratchet.evals.pair_evaluator import PairEvaluator
from ratchet.evals.score_evaluator import ScoreEvaluator
from ratchet.experience.async_rollouts.concurrency import Concurrency
from ratchet.experience.async_rollouts.prefetch import Prefetch, teaches
from ratchet.experience.async_rollouts.resumable_generator import Interruptible
from ratchet.experience.async_rollouts.staleness_scheduler import GenerateScheduler, at_once
from ratchet.experience.async_rollouts.tail_batching import Cuttable, TailBatching
from ratchet.experience.checks.logprob_parity import Ends, ParityGate
from ratchet.experience.checks.reward_hacking import Probes
from ratchet.experience.openai_proxy.agents import Agent
from ratchet.experience.rollout.episode import Player
from ratchet.experience.rollout.manager import Plays, PlaysGroups, RolloutManager
from ratchet.experience.rollout.remote_manager import Elsewhere
from ratchet.experience.seeds import seed_for
from ratchet.experience.sources.batcher import Batcher
from ratchet.experience.sources.curriculum import Curriculum
from ratchet.experience.sources.offline import Labelled, Pairs, Rows, Stepped, Writer
from ratchet.experience.sources.prompt_ledger import Ledger
from ratchet.experience.sources.replay_buffer import Replay
from ratchet.experience.sources.rollouts import Rollouts, StreamSource
from ratchet.experience.sources.tasks import TaskStream
from ratchet.generators.workers.pool import Router
from ratchet.learners.compute.token_outputs import SCALARS
from ratchet.models.lora.decoder import Adapter, size_of
from ratchet.models.policy import PolicyModel
from ratchet.observe.metrics import MetricsManager
from ratchet.protocols import Generator, Learner, Link, Measures, OffersTools, Reward, Source
from ratchet.training.colocation import take_turns
from ratchet.training.generator_workers import link_of
from ratchet.training.roles import check_routers, longest_row, make_roles
from ratchet.training.run import Run
from ratchet.training.stage import Arena, Plan, Policy
from ratchet.types import Group, Sampling, Task
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
    evaluator = _make_evaluator(policy, arena, algorithm, plan, roles["policy"])
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


def make_manager(
    policy: Policy,
    arena: Arena,
    reward: Reward | None,
    rollouts: RolloutsConfig,
    *,
    max_context: int | None = None,
    needs_reward: bool = True,
) -> RolloutManager:
    """Return the manager of the stage's attempts.

    Args:
        policy: Generates.
        arena: The environment.
        reward: Judges attempts; None leaves that to the environment.
        rollouts: Limits and retries.
        max_context: Maximum tokens of an attempt; None takes what the policy can read.
        needs_reward: The algorithm reads rewards.

    Raises:
        ConfigError: The environment offers tools, and the policy's tool-call format is unknown.
    """
    player = player_of(
        policy.generator,
        policy.renderer,
        arena.agent,
        rollouts,
        max_context or policy.model.max_positions,
    )
    return manager_of(player, policy.renderer, arena, reward, rollouts, needs_reward=needs_reward)


def manager_of(
    player: Plays,
    renderer: Renderer,
    arena: Arena,
    reward: Reward | None,
    rollouts: RolloutsConfig,
    *,
    needs_reward: bool,
) -> RolloutManager:
    """Like `make_manager`, for an existing player."""
    if isinstance(arena.environment, OffersTools):
        _ = renderer.tool_format
    return RolloutManager(
        player,
        arena.copies(),
        reward,
        needs_reward=needs_reward,
        judge_timeout_s=rollouts.attempt_timeout_s,
        retries=rollouts.retries,
    )


def player_of(
    generator: Generator,
    renderer: Renderer,
    agent: Agent | None,
    rollouts: RolloutsConfig,
    max_context: int,
) -> Plays:
    """Return the player of attempts: the policy itself, or an agent that calls it.

    Raises:
        MissingDependency: An agent needs a web server that is not installed.
    """
    limits: dict[str, Any] = {
        "max_context": max_context,
        "max_turns": rollouts.max_turns,
        "timeout_s": rollouts.attempt_timeout_s,
    }
    if agent is None:
        return Player(generator, renderer, **limits)
    try:
        # It is imported here because it needs a web server.
        from ratchet.experience.openai_proxy.player import AgentPlayer
    except ModuleNotFoundError as missing:
        raise MissingDependency(
            str(missing.name), extra="proxy", needed_for="a stage with an agent"
        ) from missing
    return AgentPlayer(agent, generator, renderer, **limits)


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


def held_out(arena: Arena, plan: Plan) -> list[Task]:
    """Return the tasks that the stage is evaluated on."""
    count = plan.evaluation.tasks
    return (
        list(itertools.islice(arena.environment.tasks("test", seed=plan.seed), count))
        if count
        else []
    )


def make_evaluator(policy: Policy, arena: Arena, plan: Plan) -> Evaluator | None:
    """Return the evaluator of the policy's answers, or None without held-out tasks."""
    settings = plan.evaluation
    tasks = held_out(arena, plan)
    if not tasks:
        return None
    manager = make_manager(policy, arena, arena.yardstick or arena.reward, plan.rollouts)
    return Evaluator(
        manager,
        tasks,
        evaluation_sampling(plan),
        samples=settings.samples,
        greedy=settings.greedy,
        passing=settings.passing,
    )


def evaluation_sampling(plan: Plan) -> Sampling:
    """Return the sampling parameters of the sampled evaluation attempts."""
    settings = plan.evaluation
    return replace(
        plan.sampling,
        temperature=plan.sampling.temperature
        if settings.temperature is None
        else settings.temperature,
        max_new_tokens=settings.max_new_tokens or plan.sampling.max_new_tokens,
        seed=seed_for(plan.seed, "evaluation"),
    )


def make_pair_evaluator(
    policy: Policy, arena: Arena, algorithm: Algorithm, plan: Plan, learner: Learner
) -> PairEvaluator | None:
    """Return the evaluator for answers without rewards, which compares the two answers of each
    pair.

    Raises:
        ConfigError: The environment has no pairs.
    """
    tasks = held_out(arena, plan)
    if not tasks:
        return None
    pairs = _pairs(policy, arena, algorithm, plan)
    try:
        pairs.pair(tasks[0])
    except DataError as error:
        raise ConfigError(
            f"evaluation compares pairs of held-out answers, and there are none ({error}). Set "
            "evaluation.tasks=0"
        ) from error
    return PairEvaluator(learner, pairs, tasks)


def make_score_evaluator(
    policy: Policy, arena: Arena, algorithm: Algorithm, plan: Plan, learner: Learner
) -> ScoreEvaluator | None:
    """Return the evaluator of a model that is trained to score: its loss on held-out rows."""
    tasks = held_out(arena, plan)
    if not tasks:
        return None
    source = SOURCES[algorithm.source](
        policy, arena, algorithm, plan, make_manager(policy, arena, None, plan.rollouts)
    )
    return ScoreEvaluator(learner, source, tasks, algorithm)


def _make_evaluator(
    policy: Policy, arena: Arena, algorithm: Algorithm, plan: Plan, learner: Learner
) -> Evaluator | PairEvaluator | ScoreEvaluator | None:
    arena = arena.evaluation or arena
    if SCALARS & algorithm.required_outputs("policy"):
        return make_score_evaluator(policy, arena, algorithm, plan, learner)
    if not arena.judges:
        return make_pair_evaluator(policy, arena, algorithm, plan, learner)
    return make_evaluator(policy, arena, plan)


def _make_stream(arena: Arena, plan: Plan) -> TaskStream:
    """Return the tasks of a stage, in the stage's own order.

    Which examples `examples` selects depends on the run's seed alone, so it is the same in every
    stage.
    """
    order = seed_for(plan.seed, plan.name, "tasks")
    limits: dict[str, Any] = {"seed": order, "examples": plan.examples, "pool_seed": plan.seed}
    if plan.curriculum is None:
        return TaskStream(arena.environment, **limits)
    return Curriculum(arena.environment, plan.curriculum, per_step=plan.batch_size, **limits)


def _make_writer(policy: Policy, algorithm: Algorithm) -> Writer:
    return Writer(
        policy.renderer, max_context=policy.model.max_positions, temperature=algorithm.temperature
    )


def _rows(
    policy: Policy, arena: Arena, algorithm: Algorithm, plan: Plan, manager: PlaysGroups
) -> StreamSource:
    return Rows(
        _make_stream(arena, plan), plan.name, _make_writer(policy, algorithm), train=algorithm.turns
    )


def _pairs(
    policy: Policy,
    arena: Arena,
    algorithm: Algorithm,
    plan: Plan,
    manager: PlaysGroups | None = None,
) -> Pairs:
    return Pairs(_make_stream(arena, plan), plan.name, _make_writer(policy, algorithm))


def _labelled(
    policy: Policy, arena: Arena, algorithm: Algorithm, plan: Plan, manager: PlaysGroups
) -> StreamSource:
    return Labelled(
        _make_stream(arena, plan),
        plan.name,
        _make_writer(policy, algorithm),
        reference_rows=algorithm.reference_rows,
    )


def _steps(
    policy: Policy, arena: Arena, algorithm: Algorithm, plan: Plan, manager: PlaysGroups
) -> StreamSource:
    return Stepped(_make_stream(arena, plan), plan.name, _make_writer(policy, algorithm))


def _rollouts(
    policy: Policy, arena: Arena, algorithm: Algorithm, plan: Plan, manager: PlaysGroups
) -> StreamSource:
    return Rollouts(
        _make_stream(arena, plan),
        plan.name,
        manager,
        sampling=replace(plan.sampling, routes=algorithm.replays),
        seed=seed_for(plan.seed, plan.name, "rollouts"),
        group_size=algorithm.group_size,
        greedy_baseline=algorithm.greedy_baseline,
        redundant_attempts=plan.rollouts.redundant_attempts,
        redundant_groups=plan.rollouts.redundant_groups,
    )


SOURCES: dict[str, Callable[[Policy, Arena, Algorithm, Plan, PlaysGroups], StreamSource]] = {
    "rows": _rows,
    "pairs": _pairs,
    "labelled": _labelled,
    "steps": _steps,
    "rollouts": _rollouts,
}
