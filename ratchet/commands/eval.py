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
from ratchet.commands.model_target import Target, open_target, parse_checkpoint_path, require_config
from ratchet.config.base import Section
from ratchet.config.from_words import section_from_words
from ratchet.config.loader import load_config
from ratchet.config.resolve import build
from ratchet.config.schema import RunConfig
from ratchet.data.presets.benchmarks import ALSO_CALLED, MEASURED_ON
from ratchet.environments.datasets.config import DatasetConfig
from ratchet.errors import ConfigError, DataError, RatchetError
from ratchet.evals.evaluator import Evaluator
from ratchet.evals.openai_client import EndpointPlayer, get_completions_url, is_endpoint
from ratchet.evals.paired_test import compare
from ratchet.evals.report import format_comparison, format_report, save_report
from ratchet.evals.results import RESULTS, EvalResults
from ratchet.evals.score_evaluator import ScoreLoss
from ratchet.experience.rollout.manager import RolloutManager
from ratchet.learners.compute.token_outputs import SCALARS
from ratchet.learners.config import LocalConfig
from ratchet.models.scalar_head import load_head
from ratchet.observe.summary import installed_versions
from ratchet.rewards.llm.http_client import Endpoint, EndpointConfig
from ratchet.runs.resolve import fetch_run_model
from ratchet.runs.run_dir import RunDirectory
from ratchet.training.evaluators import (
    list_held_out_tasks,
    make_eval_sampling,
    make_evaluator,
    make_score_evaluator,
)
from ratchet.training.from_config import build_env_setup, build_eval_env_setup, build_stage_spec
from ratchet.training.stage import EnvSetup, Policy, StageSpec
from ratchet.types import Sampling
from ratchet.utils.object_store import fetch_directory, is_address
from ratchet.utils.terminal_text import make_console

log = logging.getLogger(__name__)

Found = TypeVar("Found")
NOTHING = "there is nothing to evaluate on: the recipe says evaluation.tasks: 0; add --tasks N"
MAX_NEW_TOKENS = 2048  # length limit of an answer without a recipe


@dataclass(frozen=True)
class EndpointSettings:
    """Settings of requests to a target that is an endpoint.

    model: the name by which the endpoint knows the model.
    body: further keys of each request.
    """

    model: str | None = None
    api_key_env: str | None = None
    concurrency: int = 16
    timeout_s: float = 600.0
    body: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Evaluation:
    """Settings of an evaluation; None takes the value of the target's recipe.

    on: a benchmark, a kind of environment, or an import path.
    words: keys of the environment that `on` names.
    step: step of the target's checkpoint; None takes the trained model.
    """

    recipe: Path | None = None
    on: str | None = None
    words: Sequence[str] = ()
    tasks: int | None = None
    samples: int = 4
    greedy: bool = True
    pass_threshold: float = 1.0
    temperature: float | None = None
    max_new_tokens: int | None = None
    seed: int = 0
    generator: str | None = None
    step: int | None = None
    asked: EndpointSettings = EndpointSettings()


def evaluate_target(
    target: str, evaluation: Evaluation, *, against: str | None = None, out: Path | None = None
) -> None:
    """Evaluate a target, print the results, and write them to `out`.

    None writes to a new directory in `evals`: the run's, or the working directory's without a run.
    `target` and `against` may also be results of an earlier evaluation. Raises ConfigError, and
    RatchetError if no attempt could be judged.
    """
    console = make_console()
    target, against = _read_here(target), against and _read_here(against)
    results = _results(target, evaluation)
    if isinstance(results, ScoreLoss):
        if against is not None:
            raise ConfigError(
                "--against compares answers, and this model scores: evaluate it without"
            )
        console.print(_table(results))
        return
    _settle(results, target, out, console)
    if against is None:
        return
    other = _results(against, replace(evaluation, step=None))
    assert isinstance(other, EvalResults), "the same evaluation"
    _settle(other, against, None if out is None else out / "against", console)
    console.print(Markdown(format_comparison(compare(results, other), target, against)))


def _results(target: str, evaluation: Evaluation) -> EvalResults | ScoreLoss:
    if is_endpoint(target):
        return _evaluate_endpoint(target, evaluation)
    path = fetch_run_model(target, evaluation.step)
    if evaluation.step is not None and not RunDirectory(path).used:
        raise ConfigError(
            f"--step {evaluation.step} is of a run, and {target} is none: leave it out"
        )
    if (path / RESULTS).is_file() or path.name == RESULTS:
        return EvalResults.read(path)
    return _evaluate_model(path, target, evaluation)


def _read_here(target: str) -> str:
    """Return a local copy of results at an address; return any other target unchanged."""
    if not is_address(target) or is_endpoint(target) or "/evals/" not in target:
        return target
    try:
        return str(fetch_directory(target.removesuffix(f"/{RESULTS}")))
    except OSError as error:
        raise DataError(f"{target} can't be fetched: {error}") from error


def _settle(found: EvalResults, target: str, out: Path | None, console: Console) -> None:
    """Print and write the results, unless they were read from a file."""
    path = Path(target)
    if (path / RESULTS).is_file() or path.name == RESULTS:
        return
    title = f"{found.about.get('on')} by {found.about.get('target', target)}"
    console.print(Markdown(format_report(found, title)))
    within = parse_checkpoint_path(path)
    run = RunDirectory(path if within is None else within[0])
    directory = out or _numbered(
        (run.evals if run.used else Path("evals")) / str(found.about.get("on")).replace(":", ".")
    )
    if save_report(found, directory, title):
        console.print(f"results {directory}", markup=False, highlight=False, soft_wrap=True)
    attempts = [attempt for prompt in found.prompts for attempt in prompt.attempts]
    if all(attempt.reward is None for attempt in attempts):
        why = next((attempt.detail or attempt.end for attempt in attempts), "there is none")
        raise RatchetError(f"no attempt has a reward; the first: {why[-500:]}")


def _evaluate_model(path: Path, called: str, evaluation: Evaluation) -> EvalResults | ScoreLoss:
    target = open_target(path, evaluation.recipe, evaluation.generator, step=evaluation.step)
    config = target.config if evaluation.on else require_config(target)
    setup, spec = where(config, evaluation)
    spec = replace(spec, sampling=target.policy.with_stop_ids(spec.sampling))
    algorithm = None if config is None or evaluation.on else build(config.stages[-1].algorithm)
    if algorithm is not None and SCALARS & algorithm.required_outputs("policy"):
        return _scores(target, algorithm, spec, setup)
    evaluator = make_evaluator(target.policy, setup, spec)
    if evaluator is None:
        raise ConfigError(NOTHING)
    by = type(target.policy.generator).__name__
    name = called if evaluation.step is None else f"{called}, step {evaluation.step}"
    return _about(
        asyncio.run(_measured(target.policy, evaluator.run())), name, by, evaluation, evaluator
    )


def _evaluate_endpoint(url: str, evaluation: Evaluation) -> EvalResults:
    asked = evaluation.asked
    if asked.model is None:
        raise ConfigError("--model is missing: the name by which the endpoint knows the model")
    if evaluation.generator is not None:
        raise ConfigError(
            f"--generator {evaluation.generator} is of models that run here, and {url} runs its "
            "own: remove it"
        )
    config = None if evaluation.recipe is None else load_config(evaluation.recipe)
    if config is None and evaluation.on is None:
        raise ConfigError("an endpoint says nothing about tasks: add --on KIND, or --recipe RECIPE")
    setup, spec = where(config, evaluation)
    rollouts = spec.rollouts
    section = EndpointConfig(
        api_key_env=asked.api_key_env, concurrency=asked.concurrency, timeout_s=asked.timeout_s
    )  # pyright: ignore[reportCallIssue]
    player = EndpointPlayer(
        Endpoint(get_completions_url(url), section),
        asked.model,
        asked.body,
        rollouts.max_turns,
        rollouts.attempt_timeout_s,
    )
    tasks = list_held_out_tasks(setup, spec)
    if not tasks:
        raise ConfigError(NOTHING)
    manager = RolloutManager(
        player,
        setup.copies(),
        setup.eval_reward or setup.reward,
        judge_timeout_s=rollouts.attempt_timeout_s,
        retries=rollouts.retries,
    )
    settings = spec.evaluation
    evaluator = Evaluator(
        manager,
        tasks,
        make_eval_sampling(spec),
        settings.samples,
        greedy=settings.greedy,
        pass_threshold=settings.pass_threshold,
    )
    return _about(asyncio.run(_played(evaluator)), url, asked.model, evaluation, evaluator)


async def _played(evaluator: Evaluator) -> EvalResults:
    try:
        return await evaluator.run()
    finally:
        await evaluator.manager.close()


def where(config: RunConfig | None, evaluation: Evaluation) -> tuple[EnvSetup, StageSpec]:
    """Return the environment setup and the spec of the recipe's last stage, changed by
    `evaluation`."""
    if config is None:
        spec = StageSpec("eval", 1, 1, sampling=Sampling(max_new_tokens=MAX_NEW_TOKENS))
    else:
        spec = build_stage_spec(config, len(config.stages) - 1)
    if evaluation.on is not None:
        section = measured_on(evaluation.on, evaluation.words)
        setup = build_eval_env_setup(section)
        # A dataset is finite. By default all of it counts: part of it would be another benchmark.
        if isinstance(section, DatasetConfig):
            spec = replace(
                spec, evaluation=spec.evaluation.model_copy(update={"tasks": sys.maxsize})
            )
    else:
        assert config is not None, "one of the two says what the tasks are"
        setup = build_env_setup(config.stages[-1])
        setup = setup.evaluation or setup
    if evaluation.on is None and evaluation.words:
        raise ConfigError(
            f"'{evaluation.words[0]}' is a key of what --on names: add --on KIND, or change the "
            "recipe"
        )
    if not setup.judges:
        raise ConfigError(
            "nothing judges answers here: name an environment with a reward of its own, or a "
            "recipe with one"
        )
    asked = {
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
            "--temperature 0 makes the sampled attempts alike: give --samples 0, or leave "
            "--temperature out"
        )
    if not evaluation.greedy and not evaluation.samples:
        raise ConfigError("--no-greedy and --samples 0 leave no attempt: give --samples")
    return setup, replace(
        spec, evaluation=spec.evaluation.model_copy(update=asked), seed=evaluation.seed
    )


def measured_on(name: str, words: Sequence[str]) -> Section:
    """Return the config section of a benchmark or an environment.

    By default only the test split of a benchmark is read.
    """
    full_name = ALSO_CALLED.get(name, name)
    if full_name not in MEASURED_ON:
        return section_from_words("environment", name, words)
    keys = {word.partition("=")[0].strip() for word in words}
    usual = [] if keys & {"train", "train_split"} else ["train_split="]
    return section_from_words("environment", "dataset", [f"preset={full_name}", *usual, *words])


def _about(
    found: EvalResults, target: str, by: str, evaluation: Evaluation, evaluator: Evaluator
) -> EvalResults:
    tasks, sampling = evaluator.tasks, evaluator.sampling
    about = {
        "target": target,
        "generator": by,
        "on": evaluation.on or tasks[0].environment or "recipe",
        "keys": " ".join(evaluation.words) or None,
        "tasks": len(tasks),
        "samples": evaluation.samples,
        "temperature": sampling.temperature if evaluation.samples else None,
        "max_new_tokens": sampling.max_new_tokens,
        "seed": evaluation.seed,
        "ratchet": installed_versions()["ratchet"],
    }
    return replace(found, about=about)


async def _measured(policy: Policy, evaluation: Coroutine[Any, Any, Found]) -> Found:
    try:
        return await evaluation
    finally:
        await policy.close()


def _scores(target: Target, algorithm: Algorithm, spec: StageSpec, setup: EnvSetup) -> ScoreLoss:
    model = target.policy.model
    head = load_head(target.model, model.hidden_size)
    if head is None:
        raise ConfigError(
            f"{target.model} has no scalar head, and algorithm {algorithm.name} trains one: give a "
            "run of it"
        )
    # The local learner fits whatever learner the run used: this process has the whole model.
    scorer = build(LocalConfig(), model, head=head.to(next(model.parameters()).device))
    evaluator = make_score_evaluator(target.policy, setup, algorithm, spec, scorer)
    if evaluator is None:
        raise ConfigError(NOTHING)
    return asyncio.run(_measured(target.policy, evaluator.run()))


def _table(found: ScoreLoss) -> Table:
    numbers = found.numbers()
    table = Table("held-out tasks", *numbers)
    table.add_row(str(found.tasks), *(f"{value:.3g}" for value in numbers.values()))
    return table


def _numbered(path: Path) -> Path:
    return next(
        found
        for i in itertools.count(1)
        if not (found := path.with_name(f"{path.name}-{i}")).exists()
    )
