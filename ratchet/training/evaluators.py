"""Create the evaluator of a stage, which judges answers, pairs or scores on held-out tasks."""

from __future__ import annotations

import itertools
from dataclasses import replace

from ratchet.algorithms.base import Algorithm
from ratchet.errors import ConfigError, DataError
from ratchet.evals.evaluator import Evaluator
from ratchet.evals.pair_evaluator import PairEvaluator
from ratchet.evals.score_evaluator import ScoreEvaluator
from ratchet.experience.seeds import derive_seed
from ratchet.learners.compute.token_outputs import SCALARS
from ratchet.protocols import Learner
from ratchet.training.managers import make_manager
from ratchet.training.sources import SOURCES, make_pairs
from ratchet.training.stage import EnvSetup, Policy, StageSpec
from ratchet.types import Sampling, Task


def list_held_out_tasks(arena: EnvSetup, plan: StageSpec) -> list[Task]:
    """Return the tasks that the stage is evaluated on."""
    count = plan.evaluation.tasks
    return (
        list(itertools.islice(arena.environment.tasks("test", seed=plan.seed), count))
        if count
        else []
    )


def make_evaluator(policy: Policy, arena: EnvSetup, plan: StageSpec) -> Evaluator | None:
    """Return the evaluator of the policy's answers, or None without held-out tasks."""
    settings = plan.evaluation
    tasks = list_held_out_tasks(arena, plan)
    if not tasks:
        return None
    manager = make_manager(policy, arena, arena.eval_reward or arena.reward, plan.rollouts)
    return Evaluator(
        manager,
        tasks,
        make_eval_sampling(plan),
        samples=settings.samples,
        greedy=settings.greedy,
        pass_threshold=settings.pass_threshold,
    )


def make_eval_sampling(plan: StageSpec) -> Sampling:
    """Return the sampling parameters of the sampled evaluation attempts."""
    settings = plan.evaluation
    return replace(
        plan.sampling,
        temperature=plan.sampling.temperature
        if settings.temperature is None
        else settings.temperature,
        max_new_tokens=settings.max_new_tokens or plan.sampling.max_new_tokens,
        seed=derive_seed(plan.seed, "evaluation"),
    )


def make_pair_evaluator(
    policy: Policy, arena: EnvSetup, algorithm: Algorithm, plan: StageSpec, learner: Learner
) -> PairEvaluator | None:
    """Return the evaluator that compares the two answers of each pair, as they have no rewards.

    Returns None without held-out tasks.

    Raises:
        ConfigError: The environment has no pairs.
    """
    tasks = list_held_out_tasks(arena, plan)
    if not tasks:
        return None
    pairs = make_pairs(policy, arena, algorithm, plan)
    try:
        pairs.pair(tasks[0])
    except DataError as error:
        raise ConfigError(
            f"evaluation compares pairs of held-out answers, and there are none ({error}). Set "
            "evaluation.tasks=0"
        ) from error
    return PairEvaluator(learner, pairs, tasks)


def make_score_evaluator(
    policy: Policy, arena: EnvSetup, algorithm: Algorithm, plan: StageSpec, learner: Learner
) -> ScoreEvaluator | None:
    """Return the evaluator of a scoring model, which measures its loss on held-out rows.

    Returns None without held-out tasks.
    """
    tasks = list_held_out_tasks(arena, plan)
    if not tasks:
        return None
    source = SOURCES[algorithm.source](
        policy, arena, algorithm, plan, make_manager(policy, arena, None, plan.rollouts)
    )
    return ScoreEvaluator(learner, source, tasks, algorithm)


def make_stage_evaluator(
    policy: Policy, arena: EnvSetup, algorithm: Algorithm, plan: StageSpec, learner: Learner
) -> Evaluator | PairEvaluator | ScoreEvaluator | None:
    """Return the stage's evaluator of scores, pairs or answers; None without held-out tasks."""
    arena = arena.evaluation or arena
    if SCALARS & algorithm.required_outputs("policy"):
        return make_score_evaluator(policy, arena, algorithm, plan, learner)
    if not arena.judges:
        return make_pair_evaluator(policy, arena, algorithm, plan, learner)
    return make_evaluator(policy, arena, plan)
