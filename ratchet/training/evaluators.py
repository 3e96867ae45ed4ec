"""Create the evaluator of a stage, which judges answers, pairs or scores on held-out tasks."""

from __future__ import annotations

import itertools
import logging
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

log = logging.getLogger(__name__)


def list_held_out_tasks(setup: EnvSetup, spec: StageSpec) -> list[Task]:
    """Return the tasks that the stage is evaluated on."""
    count = spec.evaluation.tasks
    if not count:
        return []
    tasks = list(itertools.islice(setup.environment.tasks("test", seed=spec.seed), count))
    if not tasks:
        log.warning(
            "evaluation.tasks=%d, but the environment has no held-out task: nothing is evaluated. "
            "Set evaluation.tasks=0, or give the environment a test split",
            count,
        )
    return tasks


def make_evaluator(policy: Policy, setup: EnvSetup, spec: StageSpec) -> Evaluator | None:
    """Return the evaluator of the policy's answers, or None without held-out tasks."""
    settings = spec.evaluation
    tasks = list_held_out_tasks(setup, spec)
    if not tasks:
        return None
    manager = make_manager(policy, setup, setup.eval_reward or setup.reward, spec.rollouts)
    return Evaluator(
        manager,
        tasks,
        make_eval_sampling(spec),
        samples=settings.samples,
        greedy=settings.greedy,
        pass_threshold=settings.pass_threshold,
    )


def make_eval_sampling(spec: StageSpec) -> Sampling:
    """Return the sampling parameters of the sampled evaluation attempts."""
    settings = spec.evaluation
    return replace(
        spec.sampling,
        temperature=spec.sampling.temperature
        if settings.temperature is None
        else settings.temperature,
        max_new_tokens=settings.max_new_tokens or spec.sampling.max_new_tokens,
        seed=derive_seed(spec.seed, "evaluation"),
    )


def make_pair_evaluator(
    policy: Policy, setup: EnvSetup, algorithm: Algorithm, spec: StageSpec, learner: Learner
) -> PairEvaluator | None:
    """Return the evaluator that compares the two answers of each pair.

    It is for environments without rewards. Returns None without held-out tasks.

    Raises:
        ConfigError: The environment has no pairs.
    """
    tasks = list_held_out_tasks(setup, spec)
    if not tasks:
        return None
    pairs = make_pairs(policy, setup, algorithm, spec)
    try:
        pairs.pair(tasks[0])
    except DataError as error:
        raise ConfigError(
            f"evaluation compares pairs of held-out answers, and there are none ({error}). Set "
            "evaluation.tasks=0"
        ) from error
    return PairEvaluator(learner, pairs, tasks)


def make_score_evaluator(
    policy: Policy, setup: EnvSetup, algorithm: Algorithm, spec: StageSpec, learner: Learner
) -> ScoreEvaluator | None:
    """Return the evaluator of a scoring model, which measures its loss on held-out rows.

    Returns None without held-out tasks.
    """
    tasks = list_held_out_tasks(setup, spec)
    if not tasks:
        return None
    source = SOURCES[algorithm.source](
        policy, setup, algorithm, spec, make_manager(policy, setup, None, spec.rollouts)
    )
    return ScoreEvaluator(learner, source, tasks, algorithm)


def make_stage_evaluator(
    policy: Policy, setup: EnvSetup, algorithm: Algorithm, spec: StageSpec, learner: Learner
) -> Evaluator | PairEvaluator | ScoreEvaluator | None:
    """Return the stage's evaluator of scores, pairs or answers; None without held-out tasks."""
    setup = setup.evaluation or setup
    if SCALARS & algorithm.required_outputs("policy"):
        return make_score_evaluator(policy, setup, algorithm, spec, learner)
    if not setup.judges:
        return make_pair_evaluator(policy, setup, algorithm, spec, learner)
    return make_evaluator(policy, setup, spec)
