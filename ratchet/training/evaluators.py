"""Create the evaluator of a stage: accuracy of answers, accuracy of pairs, or a held-out loss."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ratchet.algorithms.base import Algorithm
from ratchet.errors import ConfigError, DataError
from ratchet.evals.evaluator import Evaluator
from ratchet.evals.loss_evaluator import LossEvaluator
from ratchet.evals.pair_evaluator import PairEvaluator
from ratchet.evals.stage_evaluator import CombinedEvaluator, StageEvaluator
from ratchet.experience.seeds import derive_seed
from ratchet.learners.compute.token_outputs import SCALAR_COLUMNS
from ratchet.protocols import Learner
from ratchet.training.roles import get_max_row_length
from ratchet.training.sources import SOURCES, make_manager, make_pairs
from ratchet.training.stage import EnvSetup, Policy, StageSpec
from ratchet.types import Sampling, Task

log = logging.getLogger(__name__)


def list_held_out_tasks(setup: EnvSetup, spec: StageSpec) -> list[Task]:
    """Return the tasks that the stage is evaluated on.

    They are listed once, and evaluators share the list: it reads every held-out row.
    """
    setup = setup.evaluation or setup
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


def make_evaluator(
    policy: Policy, setup: EnvSetup, spec: StageSpec, tasks: Sequence[Task]
) -> Evaluator:
    """Return the evaluator of the policy's answers to held-out tasks."""
    settings = spec.evaluation
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
    policy: Policy,
    setup: EnvSetup,
    algorithm: Algorithm,
    spec: StageSpec,
    learner: Learner,
    tasks: Sequence[Task],
) -> PairEvaluator | None:
    """Return the evaluator that compares the two answers of each held-out pair.

    Stages without rewards are evaluated in this way. Returns None if all pairs are too long.

    Raises:
        ConfigError: The environment has no pairs.
    """
    pairs = make_pairs(policy, setup, algorithm, _without_selection(spec))
    try:
        tasks = [task for task in tasks if pairs.long_rows.keeps(task)]
        if not tasks:
            return None
        pairs.rows(tasks[0])
    except DataError as error:
        raise ConfigError(explain_no_answers("pairs", str(error))) from error
    return PairEvaluator(learner, pairs, tasks)


def make_loss_evaluator(
    policy: Policy,
    setup: EnvSetup,
    algorithm: Algorithm,
    spec: StageSpec,
    roles: Mapping[str, Learner],
    tasks: Sequence[Task],
) -> LossEvaluator | None:
    """Return the evaluator of the algorithm's own loss on held-out tasks.

    If the algorithm learns from rollouts, the evaluator's rollouts need no reward. Returns None if
    all rows are too long.
    """
    manager = make_manager(
        policy,
        setup,
        None,
        spec.rollouts,
        max_context=get_max_row_length(policy.model, roles),
        needs_reward=False,
    )
    source = SOURCES[algorithm.source](policy, setup, algorithm, _without_selection(spec), manager)
    tasks = [task for task in tasks if source.long_rows.keeps(task)]
    if not tasks:
        return None
    return LossEvaluator(roles, source, tasks, algorithm, (manager,))


def explain_no_answers(source: str, reason: str) -> str:
    """Return the error text for held-out tasks without the answers that the evaluation needs.

    source: "pairs" or "rows", as in `StageConfig.source`.
    reason: the text of the error that the environment raised.
    """
    measure = "compares pairs" if source == "pairs" else "computes the loss"
    return (
        f"evaluation {measure} of held-out answers, but there are none ({reason}). Set "
        "evaluation.tasks=0"
    )


def _without_selection(spec: StageSpec) -> StageSpec:
    """Return the spec without the keys that select training tasks, so that no task is left out."""
    return replace(spec, examples=None, curriculum=None)


def _explain_missing_answers(setup: EnvSetup, task: Task) -> str:
    """Return why a held-out task has no demonstration; "" if it has one."""
    try:
        setup.environment.demonstration(task)
    except DataError as error:
        return str(error)
    return ""


def make_stage_evaluator(
    policy: Policy,
    setup: EnvSetup,
    algorithm: Algorithm,
    spec: StageSpec,
    roles: Mapping[str, Learner],
    tasks: Sequence[Task],
) -> StageEvaluator | None:
    """Return the stage's evaluator on held-out tasks; None without any that fits into the model.

    A reward model is evaluated by its loss. For any other model, the policy's answers are judged if
    there is a reward; without one, the answers of pairs are compared. If the algorithm has a
    held-out loss (see `has_held_out_loss`), it is measured too.

    Raises:
        ConfigError: The held-out tasks have nothing that the algorithm can be evaluated on.
    """
    setup = setup.evaluation or setup
    if not tasks:
        return None
    if SCALAR_COLUMNS & algorithm.required_outputs("policy"):
        return make_loss_evaluator(policy, setup, algorithm, spec, roles, tasks)
    evaluators: list[StageEvaluator | None] = []
    if setup.has_rewards:
        evaluators.append(make_evaluator(policy, setup, spec, tasks))
    elif algorithm.source == "pairs":
        learner = roles["policy"]
        evaluators.append(make_pair_evaluator(policy, setup, algorithm, spec, learner, tasks))
    if has_held_out_loss(algorithm, setup, spec, tasks):
        evaluators.append(make_loss_evaluator(policy, setup, algorithm, spec, roles, tasks))
    elif not evaluators:
        raise ConfigError(
            "nothing judges the held-out answers, and the loss of algorithm "
            f"{algorithm.name} can't be measured on held-out tasks. Set eval_rewards, or "
            "evaluation.tasks=0"
        )
    present = tuple(evaluator for evaluator in evaluators if evaluator is not None)
    return CombinedEvaluator(present) if len(present) > 1 else next(iter(present), None)


def has_held_out_loss(
    algorithm: Algorithm, setup: EnvSetup, spec: StageSpec, tasks: Sequence[Task]
) -> bool:
    """True if the algorithm's loss is measured on held-out tasks.

    This depends on the source of the algorithm's groups:
    - rows: True if the first task has a demonstration.
    - labelled, steps: True if no reward judges answers.
    - rollouts: True for distillation without a loss on routers. The loss of a policy gradient is
      not measured, because it depends on the rewards of other attempts.
    - pairs: False, because the accuracy of pairs is measured instead.

    Raises:
        ConfigError: The tasks have no demonstrations, and no reward judges answers.
    """
    if algorithm.source == "rows":
        reason = _explain_missing_answers(setup, tasks[0])
        if reason and not setup.has_rewards:
            raise ConfigError(explain_no_answers("rows", reason))
        if reason:
            log.info("stage %s: no held-out loss is measured: %s", spec.name, reason)
        return not reason
    if algorithm.source == "rollouts":
        return not algorithm.reads_reward and "routers" not in algorithm.required_outputs("policy")
    return algorithm.source != "pairs" and not setup.has_rewards
