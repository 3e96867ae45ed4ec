"""Adapter for environments of gem (arXiv:2510.01051), and ROLL's classes with gem's interface."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field

from ratchet.config.resolve import import_object
from ratchet.environments.adapters.reset_step import (
    Observation,
    ResetStepConfig,
    ResetStepEnvironment,
)
from ratchet.errors import ConfigError, suggest_install
from ratchet.rewards.integrations.base import read_number
from ratchet.types import is_finite_number

# Counters of gem's ToolEnvWrapper since the beginning of the episode.
TOOL_COUNTERS = frozenset({"tool_use_counter", "tool_success_counter"})


class GemConfig(ResetStepConfig):
    """A gem environment, by its id or by the import path of a class with gem's interface.

    The class's `reset(seed)` returns `(observation, info)`, and its `step(text)` returns
    `(observation, reward, terminated, truncated, info)`.
    """

    builds: ClassVar[str] = "ratchet.environments.adapters.gem:GemEnvironment"

    id: str | None = Field(None, min_length=1)
    """Id for gem.make: "game:GuessTheNumber-v0-easy"; null: set path."""
    path: str | None = Field(None, pattern=r"^[\w.]+:\w+$")
    """Import path of a class, instead of an id: my_pkg.my_mod:MyEnvironment; null: set id."""
    kwargs: dict[str, Any] = Field({})
    """Keyword arguments of gem.make, or of the class."""
    wrappers: tuple[str, ...] = ()
    """Import paths of functions (or wrapper classes) that wrap the environment, the innermost
    first, such as one that returns gem's ToolEnvWrapper."""

    def check_keys(self) -> None:
        if (self.id is None) == (self.path is None):
            raise ValueError(
                f"id={self.id} and path={self.path}: set either id (of a gem environment) or path "
                "(of a class)"
            )


class GemEnvironment(ResetStepEnvironment):
    """An adapter of a gem environment. Raises ConfigError for an unknown id or path."""

    def __init__(self, config: GemConfig) -> None:
        super().__init__(config, config.id or str(config.path))
        self.config = config
        self.factory = _get_gem_factory(config.id) if config.id else import_object(str(config.path))
        self.wrappers = [import_object(path) for path in config.wrappers]

    def make_inner(self) -> Any:
        inner = self.factory(**self.config.kwargs)
        for wrap in self.wrappers:
            inner = wrap(inner)
        return inner

    def make_first_observation(self, observation: Any, info: Mapping[str, Any]) -> Observation:
        self._counts = dict.fromkeys(TOOL_COUNTERS, 0.0)
        instruction = info.get("env_instruction")
        prompt = "\n".join(
            str(text) for text in (instruction, _join_text(observation, info)) if text
        )
        return Observation(prompt, str(observation))

    def take_action(self, text: str) -> Observation:
        observation, reward, terminated, truncated, info = self.step_inner(text)
        metrics = {**info, **(info.get("metrics") or {})}
        # What else is in `info` is no metric, and must not fail the attempt.
        numeric_metrics = {
            name: float(value)
            for name, value in metrics.items()
            if isinstance(name, str) and is_finite_number(value)
        }
        # Metrics are summed over turns, and these counters already are.
        for name in TOOL_COUNTERS & numeric_metrics.keys():
            count = numeric_metrics[name]
            numeric_metrics[name] = count - self._counts[name]
            self._counts[name] = count
        return Observation(
            text=_join_text(observation, info),
            state=str(observation),
            reward=read_number(reward, self.inner.step),
            done=bool(terminated or truncated),
            metrics={**numeric_metrics, "environment_truncated": float(truncated)},
        )


def _join_text(observation: Any, info: Mapping[str, Any]) -> str:
    """Return the observation and `info["suffix"]`, gem's request for the next move."""
    return "\n".join(str(text) for text in (observation, info.get("suffix")) if text)


def _get_gem_factory(name: str) -> Any:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        import gem
        from gem.envs.registration import ENV_REGISTRY
    except ImportError as error:
        raise ConfigError(
            f"environment.kind 'gem' can't import gem ({error}): {suggest_install('gem')} on "
            "Python 3.11 (gem-llm has no release for later ones), or set environment.path to a "
            "class"
        ) from error
    finally:  # Importing gem configures the root logger, which only the program should do.
        root.handlers[:] = handlers
        root.setLevel(level)
    if name not in ENV_REGISTRY:
        raise ConfigError(
            f"environment.id: gem has no '{name}'; gem.print_envs() lists its environments"
        )
    return lambda **kwargs: gem.make(name, **kwargs)
