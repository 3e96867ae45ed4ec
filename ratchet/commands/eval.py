"""Evaluate a model on held-out tasks or a benchmark (`ratchet eval`), and compare it with another
model on request."""

from __future__ import annotations

import asyncio
import itertools
import logging
import sys
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.markdown import Markdown
from rich.table import Table

from ratchet.algorithms.base import Algorithm
from ratchet.commands.model_target import Target, open_target, require_config
from ratchet.config.from_words import section_from_words
from ratchet.config.length import shorten
from ratchet.config.loader import load_config
from ratchet.config.resolve import build
from ratchet.config.schema import OptimizerConfig, RunConfig
from ratchet.config.sections import EnvironmentConfig
from ratchet.data.presets.benchmarks import ALIASES, BENCHMARK_NAMES
from ratchet.environments.datasets.config import DatasetConfig
from ratchet.errors import ConfigError, DataError, RatchetError
from ratchet.evals.evaluator import Evaluator, report_failures
from ratchet.evals.openai_client import EndpointPlayer, get_completions_url, is_endpoint
from ratchet.evals.paired_test import compare
from ratchet.evals.report import format_comparison, format_report, save_report
from ratchet.evals.results import RESULTS, EvalResults
from ratchet.evals.stage_evaluator import StageEvaluator, list_parts
from ratchet.experience.rollout.manager import RolloutManager
from ratchet.learners.compute.token_outputs import SCALAR_COLUMNS
from ratchet.learners.config import LocalConfig
from ratchet.models.scalar_head import load_head
from ratchet.observe.summary import get_installed_versions
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
from ratchet.training.from_config import build_env_setup, build_eval_env_setup, build_stage_spec
from ratchet.training.roles import make_roles
from ratchet.training.saved_weights import split_step
from ratchet.training.stage import EnvSetup, Policy, StageSpec
from ratchet.types import Sampling, Task
from ratchet.utils.object_store import fetch_directory, is_address
from ratchet.utils.terminal_text import make_console

log = logging.getLogger(__name__)

Result = TypeVar("Result")
NO_TASKS = "the recipe sets evaluation.tasks=0, so there is nothing to evaluate on: add --tasks N"
MAX_NEW_TOKENS = 2048  # length limit of an answer without a recipe


@dataclass(frozen=True)
class EndpointSettings:
    """Settings of requests to a target that is an OpenAI-compatible endpoint.

    Attributes:
        model: The endpoint's name for the model.
        api_key_env: The environment variable that holds the API key.
        concurrency: The maximum number of concurrent requests.
        timeout_s: The time limit of a request, in seconds.
        body: Further keys of each request's JSON body; None as a value removes the key.
    """

    model: str | None = None
    api_key_env: str | None = None
    concurrency: int = 16
    timeout_s: float = 600.0
    body: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class EvaluationSettings:
    """Settings of an evaluation. None takes the value of the recipe.

    Attributes:
        recipe: A recipe to use instead of the target's.
        on: A benchmark, a kind of environment, or an import path.
        overrides: `key=value`, with keys of the environment that `on` names.
        tasks: The number of held-out tasks.
        samples: Sampled attempts per task, beside the greedy one.
        greedy: True also makes one attempt per task at temperature 0.
        pass_threshold: The minimum reward of a sampled attempt that counts as passed.
        generator: The kind of the generator, for a target that is a model.
        step: The step of the target's checkpoint; None takes the trained model.
        endpoint: Settings for a target that is an endpoint.
    """

    recipe: Path | None = None
    on: str | None = None
    overrides: Sequence[str] = ()
    tasks: int | None = None
    samples: int = 4
    greedy: bool = True
    pass_threshold: float = 1.0
    temperature: float | None = None
    max_new_tokens: int | None = None
    seed: int = 0
    generator: str | None = None
    step: int | None = None
    endpoint: EndpointSettings = EndpointSettings()


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
            `evals` of the working directory if the target is no run.

    Raises ConfigError, and RatchetError if no attempt could be judged.
    """
    console = make_console()
    target, against = _fetch_results(target), against and _fetch_results(against)
    results = _get_results(target, evaluation)
    if results.answers is None and against is not None:
        raise ConfigError(
            f"--against compares judged answers, but {target} is evaluated by its loss only: "
            "remove --against"
        )
    _print_other_metrics(results, console)
    if results.answers is None:
        return
    _print_and_save(results.answers, target, out, console)
    if against is None:
        return
    second_results = _get_results(against, replace(evaluation, step=None))
    assert second_results.answers is not None, "both targets are evaluated in the same way"
    _print_other_metrics(second_results, console)
    directory = None if out is None else out / "against"
    _print_and_save(second_results.answers, against, directory, console)
    comparison = compare(results.answers, second_results.answers)
    console.print(Markdown(format_comparison(comparison, target, against)))


@dataclass(frozen=True)
class _Results:
    """The results of an evaluation.

    Attributes:
        answers: The results of the policy's answers; None if nothing judges answers.
        n_tasks: The number of held-out tasks.
        other_metrics: All other metrics, such as the held-out loss.
    """

    answers: EvalResults | None
    n_tasks: int = 0
    other_metrics: Mapping[str, float] = field(default_factory=dict)


def _get_results(target: str, evaluation: EvaluationSettings) -> _Results:
    """Evaluate a target, or read the saved results of an earlier evaluation if it names them."""
    if is_endpoint(target):
        return _Results(_evaluate_endpoint(target, evaluation))
    path = fetch_run_model(target, evaluation.step)
    if evaluation.step is not None and not RunDirectory(path).used:
        raise ConfigError(
            f"--step {evaluation.step} is only for runs, and {target} is no run: remove --step"
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


def _print_and_save(results: EvalResults, target: str, out: Path | None, console: Console) -> None:
    """Print and write the results, unless they were read from a file."""
    path = Path(target)
    if (path / RESULTS).is_file() or path.name == RESULTS:
        return
    title = f"{results.about.get('on')} by {results.about.get('target', target)}"
    console.print(Markdown(format_report(results, title)))
    run = RunDirectory(Path(split_step(target)[0]))
    directory = out or _choose_new_directory(
        (run.evals if run.used else Path("evals")) / str(results.about.get("on")).replace(":", ".")
    )
    if save_report(results, directory, title):
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
    setup, spec = build_eval_setup(config, evaluation)
    spec = replace(spec, sampling=target.policy.with_stop_ids(spec.sampling))
    algorithm = None if config is None or evaluation.on else build(config.stages[-1].algorithm)
    if algorithm is None:
        _require_judge(setup)
        evaluator: StageEvaluator | None = make_evaluator(target.policy, setup, spec)
    else:
        roles = _load_roles(target, algorithm, setup)
        evaluator = make_stage_evaluator(target.policy, setup, algorithm, spec, roles)
    if evaluator is None:
        raise ConfigError(NO_TASKS)
    result = asyncio.run(_run_and_close(target.policy, evaluator.run()))
    tasks = list_held_out_tasks(setup, spec)
    sampling = make_eval_sampling(spec)
    generator = type(target.policy.generator).__name__
    if evaluation.step is not None:
        name = f"{name}, step {evaluation.step}"
    other_metrics: dict[str, float] = {}
    answers = None
    for part in list_parts(result):
        if isinstance(part, EvalResults):
            report_failures(part)
            answers = _add_metadata(part, name, generator, evaluation, tasks, sampling)
        else:
            other_metrics |= part.get_metrics()
    return _Results(answers, len(tasks), other_metrics)


def _evaluate_endpoint(url: str, evaluation: EvaluationSettings) -> EvalResults:
    settings = evaluation.endpoint
    if settings.model is None:
        raise ConfigError("--model is missing: give the endpoint's name for the model")
    if evaluation.generator is not None:
        raise ConfigError(
            f"--generator {evaluation.generator} is only for models that run here, and {url} is an "
            "endpoint: remove it"
        )
    config = None if evaluation.recipe is None else load_config(evaluation.recipe)
    if config is None and evaluation.on is None:
        raise ConfigError(
            "an endpoint has no recipe that names tasks: add --on KIND, or --recipe RECIPE"
        )
    setup, spec = build_eval_setup(config, evaluation)
    _require_judge(setup)
    rollouts = spec.rollouts
    section = EndpointConfig(
        api_key_env=settings.api_key_env,
        concurrency=settings.concurrency,
        timeout_s=settings.timeout_s,
    )  # pyright: ignore[reportCallIssue]
    player = EndpointPlayer(
        Endpoint(get_completions_url(url), section),
        settings.model,
        settings.body,
        rollouts.max_turns,
        rollouts.attempt_timeout_s,
    )
    tasks = list_held_out_tasks(setup, spec)
    if not tasks:
        raise ConfigError(NO_TASKS)
    manager = RolloutManager(
        player,
        setup.get_environment_factory(),
        setup.eval_reward or setup.reward,
        judge_timeout_s=rollouts.attempt_timeout_s,
        retries=rollouts.retries,
    )
    evaluator = Evaluator(
        manager,
        tasks,
        make_eval_sampling(spec),
        spec.evaluation.samples,
        greedy=spec.evaluation.greedy,
        pass_threshold=spec.evaluation.pass_threshold,
    )
    results = asyncio.run(_run_evaluator(evaluator))
    report_failures(results)
    return _add_metadata(results, url, settings.model, evaluation, tasks, evaluator.sampling)


async def _run_evaluator(evaluator: Evaluator) -> EvalResults:
    try:
        return await evaluator.run()
    finally:
        await evaluator.manager.close()


def build_eval_setup(
    config: RunConfig | None, evaluation: EvaluationSettings
) -> tuple[EnvSetup, StageSpec]:
    """Return the environment setup and the stage spec for an evaluation.

    Settings that `evaluation` does not override are those of the recipe's last stage.
    """
    if config is None:
        spec = StageSpec("eval", 1, 1, sampling=Sampling(max_new_tokens=MAX_NEW_TOKENS))
    else:
        # No step is trained. With a length of 1 step, the data need not be read to turn `passes`
        # into steps.
        spec = build_stage_spec(shorten(config, 1)[0], len(config.stages) - 1)
    if evaluation.on is not None:
        section = make_env_section(evaluation.on, evaluation.overrides)
        setup = build_eval_env_setup(section)
        # By default all tasks of a dataset are used, because a score on a part of a benchmark can't
        # be compared with published scores.
        if isinstance(section, DatasetConfig):
            spec = replace(
                spec, evaluation=spec.evaluation.model_copy(update={"tasks": sys.maxsize})
            )
    else:
        assert config is not None, "either --on or a recipe names the tasks"
        setup = build_env_setup(config.stages[-1])
        setup = setup.evaluation or setup
    if evaluation.on is None and evaluation.overrides:
        raise ConfigError(
            f"'{evaluation.overrides[0]}' is a key of the environment that --on names: add --on "
            "KIND, or change the recipe"
        )
    settings = {
        "tasks": evaluation.tasks or spec.evaluation.tasks,
        "samples": evaluation.samples,
        "greedy": evaluation.greedy,
        "pass_threshold": evaluation.pass_threshold,
        "temperature": spec.evaluation.temperature
        if evaluation.temperature is None
        else evaluation.temperature,
        "max_new_tokens": evaluation.max_new_tokens or spec.evaluation.max_new_tokens,
    }
    if evaluation.temperature == 0 and evaluation.samples:
        raise ConfigError(
            "--temperature 0 makes all sampled attempts equal: give --samples 0, or remove "
            "--temperature"
        )
    if not evaluation.greedy and not evaluation.samples:
        raise ConfigError("--no-greedy and --samples 0 leave no attempt: give --samples")
    return setup, replace(
        spec, evaluation=spec.evaluation.model_copy(update=settings), seed=evaluation.seed
    )


def _require_judge(setup: EnvSetup) -> None:
    if not setup.judges:
        raise ConfigError(
            "the environment has no reward to judge answers: name another by --on KIND, or a "
            "recipe with rewards by --recipe RECIPE"
        )


def make_env_section(name: str, overrides: Sequence[str]) -> EnvironmentConfig:
    """Return the config section of a benchmark or an environment.

    By default only the test split of a benchmark is read.
    """
    full_name = ALIASES.get(name, name)
    if full_name not in BENCHMARK_NAMES:
        return section_from_words("environment", name, overrides)
    keys = {override.partition("=")[0].strip() for override in overrides}
    # An empty train_split means that no training split is read.
    defaults = [] if keys & {"train", "train_split"} else ["train_split="]
    return section_from_words(
        "environment", "dataset", [f"preset={full_name}", *defaults, *overrides]
    )


def _add_metadata(
    results: EvalResults,
    target: str,
    generator: str,
    evaluation: EvaluationSettings,
    tasks: Sequence[Task],
    sampling: Sampling,
) -> EvalResults:
    """Return the results with a description of what was evaluated, and how."""
    about = {
        "target": target,
        "generator": generator,
        "on": evaluation.on or tasks[0].environment or "recipe",
        "keys": " ".join(evaluation.overrides) or None,
        "tasks": len(tasks),
        "samples": evaluation.samples,
        "temperature": sampling.temperature if evaluation.samples else None,
        "max_new_tokens": sampling.max_new_tokens,
        "seed": evaluation.seed,
        "ratchet": get_installed_versions()["ratchet"],
    }
    return replace(results, about=about)


async def _run_and_close(policy: Policy, evaluation: Coroutine[Any, Any, Result]) -> Result:
    try:
        return await evaluation
    finally:
        await policy.close()


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
    measures_loss = algorithm.source != "pairs" and not setup.judges
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
