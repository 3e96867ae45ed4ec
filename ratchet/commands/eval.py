"""Evaluate a model on held-out tasks or a benchmark (`ratchet eval`), and compare it with another
model on request."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

from rich.console import Console
from rich.markdown import Markdown
from rich.table import Table

from ratchet.algorithms.base import Algorithm
from ratchet.commands.eval_setup import (
    NO_TASKS,
    EvaluationSettings,
    add_metadata,
    build_eval_setup,
    require_judge,
)
from ratchet.commands.model_target import Target, open_target, require_config
from ratchet.config.loader import load_config
from ratchet.config.resolve import build
from ratchet.config.schema import OptimizerConfig
from ratchet.errors import ConfigError, DataError, RatchetError
from ratchet.evals.evaluator import Evaluator, report_failures
from ratchet.evals.message_player import MessagePlayer
from ratchet.evals.openai_client import EndpointPlayer, get_completions_url, is_endpoint
from ratchet.evals.oracle import ORACLE, OraclePlayer
from ratchet.evals.paired_test import compare
from ratchet.evals.report import REPORT, format_comparison, format_report, save_report
from ratchet.evals.results import RESULTS, EvalResults
from ratchet.evals.stage_evaluator import (
    EvaluationResult,
    StageEvaluator,
    list_answer_results,
    list_parts,
)
from ratchet.executors.event_loop import run_event_loop
from ratchet.executors.freeze import limit_garbage_collection, prepare_process
from ratchet.experience.rollout.manager import RolloutManager
from ratchet.learners.compute.token_outputs import SCALAR_COLUMNS
from ratchet.learners.config import LocalConfig
from ratchet.models.scalar_head import load_head
from ratchet.observe.progress_bar import show_bar
from ratchet.protocols import Learner
from ratchet.rewards.llm.http_client import Endpoint, EndpointConfig
from ratchet.runs.resolve import fetch_run_model
from ratchet.runs.run_dir import RunDirectory
from ratchet.training.evaluators import (
    list_held_out_tasks,
    make_eval_sampling,
    make_evaluator,
    make_stage_evaluator,
)
from ratchet.training.roles import make_roles
from ratchet.training.saved_weights import split_step
from ratchet.training.stage import EnvSetup, Policy, StageSpec
from ratchet.training.workers.judges import close_judges
from ratchet.utils.object_store import fetch_directory, is_address
from ratchet.utils.process_settings import keep_settings
from ratchet.utils.safe_read import read_json
from ratchet.utils.terminal_text import make_console


def evaluate_target(
    target: str,
    evaluation: EvaluationSettings,
    *,
    against: str | None = None,
    out: Path | None = None,
) -> None:
    """Evaluate a target, print the results, and write them to a directory.

    Args:
        target: The model or endpoint to evaluate, or the results of an earlier evaluation.
        against: A second target, evaluated in the same way and compared with the first.
        out: The directory for the results. None: a new directory in the run's `evals`, or in
            `evals` of the working directory if the target is not a run.

    Raises ConfigError for wrong settings, and if `out` holds a results.json or report.md that no
    evaluation wrote. Raises RatchetError if no attempt could be judged.
    """
    limit_garbage_collection()
    console = make_console()
    if out is not None:
        _require_replaceable(out)
        _require_replaceable(out / "against")
    target = _fetch_results(target)
    against = against and _fetch_results(against)
    results = _get_results(target, evaluation)
    if results.answers is None and against is not None:
        raise ConfigError(
            f"--against compares judged answers, but {target} is evaluated by its loss only: "
            "remove --against"
        )
    _print_other_metrics(results, console)
    if results.answers is None:
        return
    print_and_save(results.answers, target, out, console)
    if against is None:
        return
    second_results = _get_results(against, replace(evaluation, step=None))
    if second_results.answers is None:
        raise ConfigError(
            f"--against compares judged answers, but {against} is evaluated by its loss only, by "
            "its own recipe. Set --recipe to a recipe with a reward for both"
        )
    _print_other_metrics(second_results, console)
    directory = None if out is None else out / "against"
    print_and_save(second_results.answers, against, directory, console)
    comparison = compare(results.answers, second_results.answers)
    console.print(Markdown(format_comparison(comparison, target, against)))


def _require_replaceable(directory: Path) -> None:
    """Raise ConfigError if results.json or report.md there was not written by an evaluation."""
    if not any(os.path.lexists(directory / name) for name in (RESULTS, REPORT)):
        return
    with suppress(OSError, ValueError, TypeError):
        if {"format", "prompts"} <= set(read_json(directory / RESULTS)):
            return
    raise ConfigError(
        f"--out {directory} has a {RESULTS} or {REPORT} of something else, which is not "
        "overwritten. Name another directory"
    )


@dataclass(frozen=True)
class _Results:
    """The results of an evaluation."""

    answers: EvalResults | None
    """The results of the policy's answers; None if nothing judges answers."""
    n_tasks: int = 0
    """The number of held-out tasks."""
    other_metrics: Mapping[str, float] = field(default_factory=dict)
    """All other metrics, such as the held-out loss."""


def _get_results(target: str, evaluation: EvaluationSettings) -> _Results:
    """Evaluate a target, or read the saved results of an earlier evaluation if it names them."""
    if is_endpoint(target):
        return _Results(_evaluate_endpoint(target, evaluation))
    if target == ORACLE and not Path(target).exists():
        return _Results(_evaluate_oracle(evaluation))
    path = fetch_run_model(target, evaluation.step)
    if evaluation.step is not None and not RunDirectory(path).is_used:
        raise ConfigError(
            f"--step {evaluation.step} is only for runs, and {target} is not a run: remove --step"
        )
    if (path / RESULTS).is_file() or path.name == RESULTS:
        return _Results(EvalResults.read(path))
    return _evaluate_model(path, target, evaluation)


def _fetch_results(target: str) -> str:
    """Return the path of a local copy if `target` is the address of results, else `target`."""
    if not is_address(target) or is_endpoint(target) or "/evals/" not in target:
        return target
    try:
        return str(fetch_directory(target.removesuffix(f"/{RESULTS}")))
    except OSError as error:
        raise DataError(f"{target} can't be fetched: {error}") from error


def print_and_save(
    results: EvalResults,
    target: str,
    out: Path | None,
    console: Console,
    *,
    attached: Mapping[str, Path] = MappingProxyType({}),
) -> None:
    """Print and write the results, unless they were read from a file.

    Args:
        results: The results.
        target: The target; new results of a run go to its directory.
        out: The directory for the results; None: a new one.
        console: Where the results are printed.
        attached: Files to copy into the directory, by their names there.

    Raises:
        RatchetError: The results can't be written, or no attempt has a reward.
    """
    path = Path(target)
    if (path / RESULTS).is_file() or path.name == RESULTS:
        return
    title = f"{results.about.get('on')} by {results.about.get('target', target)}"
    console.print(Markdown(format_report(results, title)))
    run = RunDirectory(Path(split_step(target)[0]))
    directory = out or _choose_new_directory(
        (run.evals if run.is_used else Path("evals"))
        / str(results.about.get("on")).replace(":", ".")
    )
    if not save_report(results, directory, title):
        raise RatchetError(f"the results are not in {directory}: see the warning above")
    for name, file in attached.items():
        shutil.copyfile(file, directory / name)
    console.print(f"results {directory}", markup=False, highlight=False, soft_wrap=True)
    attempts = [attempt for prompt in results.prompts for attempt in prompt.attempts]
    if not attempts:
        raise RatchetError("there are no attempts to judge")
    if all(attempt.reward is None for attempt in attempts):
        reason = attempts[0].detail or attempts[0].end
        raise RatchetError(
            f"no attempt has a reward. The first attempt ended with: {reason[-500:]}"
        )


def _evaluate_model(path: Path, name: str, evaluation: EvaluationSettings) -> _Results:
    """Evaluate the model in a directory.

    Args:
        path: The directory.
        name: The target's name in the results.
        evaluation: The settings.
    """
    target = open_target(path, evaluation.recipe, evaluation.generator, step=evaluation.step)
    config = target.config if evaluation.on else require_config(target)
    if config is not None:
        # As in the run: another number of threads rounds sums differently.
        prepare_process(config.threads)
    setup, spec = build_eval_setup(config, evaluation)
    spec = replace(spec, sampling=target.policy.with_stop_ids(spec.sampling))
    algorithm = None if config is None or evaluation.on else build(config.stages[-1].algorithm)
    if algorithm is None:
        require_judge(setup)
    tasks = list_held_out_tasks(setup, spec)
    if not tasks:
        raise ConfigError(NO_TASKS)
    if algorithm is None:
        evaluator: StageEvaluator | None = make_evaluator(target.policy, setup, spec, tasks)
    else:
        roles = _load_roles(target, algorithm, setup)
        evaluator = make_stage_evaluator(target.policy, setup, algorithm, spec, roles, tasks)
    if evaluator is None:  # no task fits into the model
        raise ConfigError(NO_TASKS)
    result = run_event_loop(_run_and_close(evaluator, setup, target.policy))
    sampling = make_eval_sampling(spec)
    generator = type(target.policy.generator).__name__
    if evaluation.step is not None:
        name = f"{name}, step {evaluation.step}"
    other_metrics: dict[str, float] = {}
    answers = None
    for part in list_parts(result):
        if isinstance(part, EvalResults):
            report_failures(part)
            answers = add_metadata(part, name, generator, evaluation, tasks, sampling)
        else:
            other_metrics |= part.get_metrics()
    return _Results(answers, len(tasks), other_metrics)


def _evaluate_endpoint(url: str, evaluation: EvaluationSettings) -> EvalResults:
    """Evaluate the model behind an OpenAI-compatible endpoint."""
    settings = evaluation.endpoint
    if settings.model is None:
        raise ConfigError("--model is missing: give the endpoint's name for the model")
    setup, spec = _build_setup_without_model(url, evaluation)
    section = EndpointConfig(
        api_key_env=settings.api_key_env,
        concurrency=settings.concurrency,
        timeout_s=settings.timeout_s,
    )  # pyright: ignore[reportCallIssue]
    player = EndpointPlayer(
        Endpoint(get_completions_url(url), section),
        settings.model,
        settings.body,
        spec.rollouts.max_turns,
        spec.rollouts.history_window,
        spec.rollouts.attempt_timeout_s,
    )
    return _play_messages(player, url, settings.model, evaluation, setup, spec)


def _evaluate_oracle(evaluation: EvaluationSettings) -> EvalResults:
    """Return the results of the tasks' demonstrations, each played once."""
    evaluation = replace(evaluation, samples=0, greedy=True)
    setup, spec = _build_setup_without_model(ORACLE, evaluation)
    player = OraclePlayer(spec.rollouts.max_turns, spec.rollouts.attempt_timeout_s)
    return _play_messages(player, ORACLE, ORACLE, evaluation, setup, spec)


def _build_setup_without_model(
    target: str, evaluation: EvaluationSettings
) -> tuple[EnvSetup, StageSpec]:
    """Return the setup for an endpoint or the oracle, which have no recipe of their own."""
    if evaluation.generator is not None:
        raise ConfigError(
            f"--generator {evaluation.generator} is only for models that run here, and {target} is "
            "not one: remove --generator"
        )
    config = None if evaluation.recipe is None else load_config(evaluation.recipe)
    if config is None and evaluation.on is None:
        raise ConfigError(
            f"{target} has no recipe that names tasks: add --on KIND, or --recipe RECIPE"
        )
    setup, spec = build_eval_setup(config, evaluation)
    require_judge(setup)
    return setup, spec


def _play_messages(
    player: MessagePlayer,
    target: str,
    model: str,
    evaluation: EvaluationSettings,
    setup: EnvSetup,
    spec: StageSpec,
) -> EvalResults:
    """Return the results of a player on the setup's held-out tasks."""
    tasks = list_held_out_tasks(setup, spec)
    if not tasks:
        raise ConfigError(NO_TASKS)
    manager = RolloutManager(
        player,
        setup.get_environment_factory(),
        setup.eval_reward or setup.reward,
        judge_timeout_s=spec.rollouts.attempt_timeout_s,
        retries=spec.rollouts.retries,
    )
    evaluator = Evaluator(
        manager,
        tasks,
        make_eval_sampling(spec),
        spec.evaluation.samples,
        greedy=spec.evaluation.greedy,
        pass_threshold=spec.evaluation.pass_threshold,
    )
    result = run_event_loop(_run_and_close(evaluator, setup, manager))
    (results,) = list_answer_results(result)
    report_failures(results)
    return add_metadata(results, target, model, evaluation, tasks, evaluator.sampling)


async def _run_and_close(
    evaluator: StageEvaluator, setup: EnvSetup, player: Policy | RolloutManager
) -> EvaluationResult:
    """Run an evaluation with a bar of what is done, and close its judges and its player."""
    try:
        with keep_settings(), show_bar("evaluated", evaluator.count) as advance:
            return await evaluator.run(advance)
    finally:
        await close_judges(setup.judges)
        await player.close()


def _load_roles(target: Target, algorithm: Algorithm, setup: EnvSetup) -> Mapping[str, Learner]:
    """Return the learners that score in the evaluation, by role.

    The policy is always included. The other roles (references, teachers) are included only if all
    of them can be loaded from a path. All learners are `LocalLearner`s, whatever `learner.kind` the
    run had, because this process holds the whole model.

    Raises:
        ConfigError: The target has no scalar head although the algorithm trains one, or its loss
            compares with the model before the stage.
    """
    policy = target.policy
    if SCALAR_COLUMNS & algorithm.required_outputs("policy"):
        head = load_head(target.model_dir, policy.model.hidden_size)
        if head is None:
            raise ConfigError(
                f"{target.model_dir} has no scalar head, but algorithm {algorithm.name} trains "
                "one: give a run of that algorithm"
            )
        device = next(policy.model.parameters()).device
        return {"policy": build(LocalConfig(), policy.model, head=head.to(device))}
    # A role without a path is a copy of the policy at the start of the stage.
    start_roles = [name for name, role in algorithm.roles.items() if role.path is None]
    # Judged answers and compared pairs need only the policy. Otherwise the held-out loss is
    # measured, which reads the other roles too.
    measures_loss = algorithm.source != "pairs" and not setup.has_rewards
    if start_roles and measures_loss and (start_model := _find_start_model(target)) is not None:
        roles = {
            name: replace(role, path=role.path or start_model)
            for name, role in algorithm.roles.items()
        }
        algorithm, start_roles = replace(algorithm, roles=roles), []
    if start_roles and measures_loss:
        raise ConfigError(
            f"the loss of {algorithm.name} compares with the model before its stage "
            f"({start_roles[0]}), which is not kept. Add --on KIND, or give the recipe "
            "eval_rewards"
        )
    if start_roles or not algorithm.roles:
        return {"policy": build(LocalConfig(), policy.model)}
    scoring_algorithm = replace(algorithm, losses={})
    section, optimizer = LocalConfig(), OptimizerConfig()
    return make_roles(
        policy.model,
        policy.tokenizer,
        scoring_algorithm,
        section=section,
        optimizer=optimizer,
        steps=1,
    )


def _find_start_model(target: Target) -> str | None:
    """Return the model that the target's last stage began with; None if the run has not kept it."""
    config = target.config
    return config.model.path if config is not None and len(config.stages) == 1 else None


def _print_other_metrics(results: _Results, console: Console) -> None:
    """Print the metrics that are not computed from answers."""
    if not results.other_metrics:
        return
    table = Table("held-out tasks", *results.other_metrics)
    table.add_row(
        str(results.n_tasks), *(f"{value:.4g}" for value in results.other_metrics.values())
    )
    console.print(table)


def _choose_new_directory(path: Path) -> Path:
    """Return the first of PATH-1, PATH-2, ... that does not exist."""
    return next(
        candidate
        for i in itertools.count(1)
        if not (candidate := path.with_name(f"{path.name}-{i}")).exists()
    )
