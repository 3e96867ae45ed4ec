"""Prepare an evaluation: its settings, tasks, rewards and sampling."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ratchet.config.from_words import section_from_words
from ratchet.config.length import shorten
from ratchet.config.schema import RunConfig
from ratchet.config.sections import EnvironmentConfig
from ratchet.data.presets.benchmarks import ALIASES, BENCHMARK_NAMES
from ratchet.environments.datasets.config import DatasetConfig
from ratchet.errors import ConfigError
from ratchet.evals.results import EvalResults
from ratchet.observe.summary import get_installed_versions
from ratchet.training.stage import EnvSetup, StageSpec
from ratchet.training.stage_from_config import (
    build_env_setup,
    build_eval_env_setup,
    build_stage_spec,
)
from ratchet.training.workers.judges import start_judges
from ratchet.types import Sampling, Task

NO_TASKS = "the recipe sets evaluation.tasks=0, so there is nothing to evaluate on: add --tasks N"
MAX_NEW_TOKENS = 2048  # default limit of an answer without a recipe


@dataclass(frozen=True)
class EndpointSettings:
    """Settings of requests to a target that is an OpenAI-compatible endpoint."""

    model: str | None = None
    """The endpoint's name for the model."""
    api_key_env: str | None = None
    """The environment variable that holds the API key."""
    concurrency: int = 16
    """The maximum number of concurrent requests."""
    timeout_s: float = 600.0
    """The time limit of a request, in seconds."""
    body: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of each request's JSON body; None as a value removes the key."""


@dataclass(frozen=True)
class EvaluationSettings:
    """Settings of an evaluation. A setting that is None is taken from the recipe."""

    recipe: str | Path | None = None
    """A recipe to use instead of the target's; None uses the target's."""
    on: str | None = None
    """A benchmark, a kind of environment, or an import path of one."""
    overrides: Sequence[str] = ()
    """`key=value`, with keys of the environment that `on` names."""
    tasks: int | None = None
    """The number of held-out tasks."""
    samples: int = 4
    """The number of sampled attempts per task, beside the greedy one."""
    greedy: bool = True
    """True also makes one attempt per task at temperature 0."""
    pass_threshold: float = 1.0
    """The minimum reward at which a sampled attempt counts as passed."""
    temperature: float | None = None
    """The temperature of sampled attempts."""
    max_new_tokens: int | None = None
    """The maximum number of tokens of an answer."""
    seed: int = 0
    """The seed of the evaluation."""
    generator: str | None = None
    """The kind of the generator, for a target that is a model."""
    step: int | None = None
    """The step of the target's checkpoint to evaluate; None: its trained model."""
    endpoint: EndpointSettings = EndpointSettings()
    """Settings for a target that is an endpoint."""


def build_eval_setup(
    config: RunConfig | None, evaluation: EvaluationSettings
) -> tuple[EnvSetup, StageSpec]:
    """Return the environment setup and the stage spec for an evaluation.

    Settings that `evaluation` does not override are those of the recipe's last stage. Without a
    recipe (`config` None) they are the library's defaults. The recipe's judges start in this
    process, unless `--on` names the tasks; the caller closes them (`EnvSetup.judges`).

    Raises ConfigError for settings that contradict each other.
    """
    _check_settings(evaluation)
    if config is None:
        spec = StageSpec("eval", 1, 1, sampling=Sampling(max_new_tokens=MAX_NEW_TOKENS))
    else:
        # No step is trained. Shortening the stages to 1 step avoids reading the data, which would
        # otherwise be needed to convert `passes` into steps.
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
        setup = build_env_setup(config.stages[-1], judges=start_judges(config))
        setup = setup.evaluation or setup
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
    return setup, replace(
        spec, evaluation=spec.evaluation.model_copy(update=settings), seed=evaluation.seed
    )


def _check_settings(evaluation: EvaluationSettings) -> None:
    """Raise ConfigError for settings that contradict each other."""
    if evaluation.on is None and evaluation.overrides:
        raise ConfigError(
            f"'{evaluation.overrides[0]}' is a key of the environment that --on names: add --on "
            "KIND, or change the recipe"
        )
    if evaluation.temperature == 0 and evaluation.samples:
        raise ConfigError(
            "--temperature 0 makes all sampled attempts equal: give --samples 0, or remove "
            "--temperature"
        )
    if not evaluation.greedy and not evaluation.samples:
        raise ConfigError("--no-greedy and --samples 0 leave no attempt: give --samples N")


def require_judge(setup: EnvSetup) -> None:
    """Raise ConfigError if nothing judges the answers: neither a reward nor the environment."""
    if not setup.has_rewards:
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


def add_metadata(
    results: EvalResults,
    target: str,
    generator: str,
    evaluation: EvaluationSettings,
    tasks: Sequence[Task],
    sampling: Sampling,
) -> EvalResults:
    """Return the results with `about`, which describes what was evaluated, and how."""
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
