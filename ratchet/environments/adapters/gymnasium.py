"""Adapter for Gymnasium environments with discrete or text observations and actions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from pydantic import Field

from ratchet.environments.adapters.reset_step import (
    Observation,
    ResetStepConfig,
    ResetStepEnvironment,
)
from ratchet.errors import ConfigError, MissingDependency
from ratchet.rewards.integrations.base import read_number

# A whole number with its sign. A hyphen inside a word, as in option-1, is not a sign.
NUMBER = re.compile(r"(?<!\w)-?[0-9]+(?!\w)")


class GymnasiumConfig(ResetStepConfig):
    """A Gymnasium environment with discrete or text observations and actions, by its id."""

    builds: ClassVar[str] = "ratchet.environments.adapters.gymnasium:GymnasiumEnvironment"

    id: str = Field(min_length=1)
    """Id for gymnasium.make: "FrozenLake-v1", or "my_pkg.my_mod:Maze-v0"."""
    kwargs: dict[str, Any] = Field({})
    """Further keyword arguments of gymnasium.make."""
    actions: tuple[str, ...] = ()
    """Words for the actions of a Discrete space, in order, each of one or several words; empty: the
    actions are numbers."""
    prompt: str = "{observation}"
    """First message, with {observation} or {screen} (the result of render)."""
    reply: str = "{observation}"
    """Further messages, with {observation} or {screen}."""
    uses_global_random: bool = False
    """True for an environment that uses the global generator of Python's random or of numpy. Its
    calls then run one at a time, and the generator's state is saved between them. False: calls run
    concurrently in threads. Gymnasium's own environments never use it."""

    def check_keys(self) -> None:
        for name in ("prompt", "reply"):
            text = getattr(self, name)
            if "{observation}" not in text and "{screen}" not in text:
                raise ValueError(
                    f"{name} has neither {{observation}} nor {{screen}}: add one, or the policy "
                    "would see nothing"
                )
        for action in self.actions:
            if not action or action != action.strip():
                raise ValueError(f"actions has {action!r}: write a word without spaces around it")
        if len(set(map(_normalise, self.actions))) < len(self.actions):
            raise ValueError(
                "actions repeat a word (case is ignored): give each action another word"
            )


class GymnasiumEnvironment(ResetStepEnvironment):
    """An adapter of a Gymnasium environment, which the policy sees and controls as text.

    Raises ConfigError if the id can't be made, if a space is neither Discrete nor Text, or if the
    settings don't fit the environment.
    """

    def __init__(self, config: GymnasiumConfig) -> None:
        super().__init__(config, config.id)
        self.config = config
        inner = self._make_inner_or_raise()
        self.discrete_space = inner.action_space if hasattr(inner.action_space, "n") else None
        self._check_settings(inner)
        self._actions = self._name_actions()
        self._action_pattern = _compile_words(self._actions) if config.actions else NUMBER
        inner.close()

    def make_inner(self) -> Any:
        import gymnasium

        return gymnasium.make(self.config.id, **self.config.kwargs)

    def _make_inner_or_raise(self) -> Any:
        """Return an inner environment, or raise an error that names the key or the package."""
        try:
            import gymnasium
        except ImportError as error:
            raise MissingDependency(
                "gymnasium", extra="envs", needed_for="environment.kind 'gymnasium'"
            ) from error
        try:
            return self.make_inner()
        except (gymnasium.error.Error, ImportError, TypeError) as error:
            raise ConfigError(f"environment.id {self.config.id}: {error}") from error

    def _check_settings(self, inner: Any) -> None:
        from gymnasium.spaces import Discrete, Text

        spaces = {"observation": inner.observation_space, "action": inner.action_space}
        for name, space in spaces.items():
            if not isinstance(space, Discrete | Text):
                hint = (
                    "wrap it so that it returns text"
                    if name == "observation"
                    else "wrap it so that it takes text"
                )
                raise ConfigError(
                    f"environment.id {self.config.id}: its {name}s are {space}, not Discrete or "
                    f"Text: {hint}"
                )
        n_words = len(self.config.actions)
        if n_words and (self.discrete_space is None or n_words != self.discrete_space.n):
            raise ConfigError(
                f"environment.actions names {n_words} actions, but the actions of {self.config.id} "
                f"are {spaces['action']}"
            )
        for name in ("prompt", "reply"):
            if "{screen}" in getattr(self.config, name) and inner.render_mode != "ansi":
                raise ConfigError(
                    f"environment.{name} shows {{screen}}, which is text only with kwargs: "
                    "{render_mode: ansi}"
                )

    def make_first_observation(self, observation: Any, info: Mapping[str, Any]) -> Observation:
        self._observation = observation
        return Observation(self._fill_template(self.config.prompt), str(observation))

    def take_action(self, text: str) -> Observation:
        action = self._find_action(text)
        if action is None:
            reply = "There is no such action.\n" + self._fill_template(self.config.reply)
            return Observation(reply, str(self._observation), metrics=_make_metrics(illegal=True))
        self._observation, reward, terminated, truncated, _ = self.step_inner(action)
        return Observation(
            text=self._fill_template(self.config.reply),
            state=str(self._observation),
            reward=read_number(reward, self.inner.step),
            done=bool(terminated or truncated),
            metrics=_make_metrics(illegal=False, truncated=bool(truncated)),
        )

    def _find_action(self, text: str) -> Any | None:
        """Return the action in the policy's text, or None.

        In a Text space the action is the whole text. In a Discrete space it is the last word or
        number that names an action.
        """
        if self.discrete_space is None:
            return text if self.inner.action_space.contains(text) else None
        words = self._action_pattern.findall(_normalise(text))
        actions = [self._actions[word] for word in words if word in self._actions]
        return actions[-1] if actions else None

    def _name_actions(self) -> dict[str, Any]:
        """Return the actions of a Discrete space by their words, or else by their numbers."""
        space = self.discrete_space
        if space is None:
            return {}
        actions = [space.start + index for index in range(space.n)]
        words = self.config.actions or map(str, actions)
        return {_normalise(word): action for word, action in zip(words, actions, strict=True)}

    def _fill_template(self, template: str) -> str:
        text = template.replace("{observation}", str(self._observation))
        return text.replace("{screen}", str(self.inner.render())) if "{screen}" in text else text


def _normalise(text: str) -> str:
    """Return a text without its case, with single spaces and plain minus signs."""
    return " ".join(text.lower().replace("−", "-").split())


def _compile_words(words: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that finds words, longest first, where they are no part of another word."""
    patterns = [
        ("" if re.match(r"[^\w-]", word) else r"(?<!\w)")
        + re.escape(word)
        + (r"(?!\w)" if re.search(r"\w$", word) else "")
        for word in sorted(words, key=len, reverse=True)
    ]
    return re.compile("|".join(patterns))


def _make_metrics(*, illegal: bool, truncated: bool = False) -> Mapping[str, float]:
    return {"illegal_moves": float(illegal), "environment_truncated": float(truncated)}
