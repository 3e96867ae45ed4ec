"""Adapter for Gymnasium environments with discrete or text observations and actions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field, model_validator

from ratchet.environments.adapters.reset_step import Observation, Seeded, SeededConfig
from ratchet.errors import ConfigError, MissingDependency


class GymnasiumConfig(SeededConfig):
    """A Gymnasium environment with discrete or text observations and actions, made by its id."""

    builds: ClassVar[str] = "ratchet.environments.adapters.gymnasium:GymnasiumEnvironment"

    id: str = Field(
        min_length=1,
        description='Id for gymnasium.make: "FrozenLake-v1", or "my_pkg.my_mod:Maze-v0".',
    )
    kwargs: dict[str, Any] = Field({}, description="Further arguments of gymnasium.make.")
    actions: tuple[str, ...] = Field(
        (), description="Words for the actions of a Discrete space, in order; none: numbers."
    )
    prompt: str = Field(
        "{observation}",
        description="The first message; {observation} and {screen} (what render gives) are filled "
        "in.",
    )
    reply: str = Field(
        "{observation}",
        description="The messages after the first; {observation} and {screen} are filled in.",
    )
    process_random: bool = Field(
        False,
        description="The environment draws from Python's or numpy's generator of the whole "
        "process: its calls run one at a time, each with that generator as its own last call left "
        "it. false: calls run at once, in threads. Gymnasium's own environments have their own "
        "generators, and don't need it.",
    )

    @model_validator(mode="after")
    def _shows_something(self) -> GymnasiumConfig:
        for name in ("prompt", "reply"):
            text = getattr(self, name)
            if "{observation}" not in text and "{screen}" not in text:
                raise ValueError(
                    f"{name} lacks {{observation}} and {{screen}}: the policy would see nothing"
                )
        if len({action.lower() for action in self.actions}) < len(self.actions):
            raise ValueError(
                "actions repeat a word (case does not count): give each a word of its own"
            )
        return self


class GymnasiumEnvironment(Seeded):
    """An adapter that shows a Gymnasium environment to the policy as text.

    Raises ConfigError if the id can't be made, if a space is neither Discrete nor Text, or if the
    settings don't fit the environment.
    """

    def __init__(self, config: GymnasiumConfig) -> None:
        super().__init__(config, config.id)
        self.config = config
        sample = self._first_one()
        self.discrete = sample.action_space if hasattr(sample.action_space, "n") else None
        self._check(sample)
        sample.close()

    def make(self) -> Any:
        import gymnasium

        return gymnasium.make(self.config.id, **self.config.kwargs)

    def _first_one(self) -> Any:
        try:
            import gymnasium
        except ImportError as error:
            raise MissingDependency(
                "gymnasium", extra="envs", needed_for="environment.kind 'gymnasium'"
            ) from error
        try:
            return self.make()
        except (gymnasium.error.Error, ImportError, TypeError) as error:
            raise ConfigError(f"environment.id {self.config.id}: {error}") from error

    def _check(self, sample: Any) -> None:
        from gymnasium.spaces import Discrete, Text

        both = {"observation": sample.observation_space, "action": sample.action_space}
        for name, space in both.items():
            if not isinstance(space, Discrete | Text):
                hint = (
                    "wrap it so that it gives text"
                    if name == "observation"
                    else "wrap it so that it takes text"
                )
                raise ConfigError(
                    f"environment.id {self.config.id}: its {name}s are {space}, not Discrete or "
                    f"Text: {hint}"
                )
        words = len(self.config.actions)
        if words and (self.discrete is None or words != self.discrete.n):
            raise ConfigError(
                f"environment.actions names {words} actions, but those of {self.config.id} are "
                f"{both['action']}"
            )
        if "{screen}" in self.config.prompt + self.config.reply and sample.render_mode != "ansi":
            raise ConfigError(
                "environment.prompt shows {screen}, which is text only with kwargs: {render_mode: "
                "ansi}"
            )

    def first(self, observation: Any, info: Mapping[str, Any]) -> Observation:
        self._seen = observation
        return Observation(self._filled(self.config.prompt), str(observation))

    def act(self, text: str) -> Observation:
        action = self._action(text)
        if action is None:
            told = "There is no such action.\n" + self._filled(self.config.reply)
            return Observation(told, str(self._seen), metrics=_metrics(illegal=True))
        self._seen, reward, terminated, truncated, _ = self.inner.step(action)
        return Observation(
            text=self._filled(self.config.reply),
            state=str(self._seen),
            reward=float(reward),
            done=bool(terminated or truncated),
            metrics=_metrics(illegal=False, truncated=bool(truncated)),
        )

    def _action(self, text: str) -> Any | None:
        """Return the action that a text names; None if it names none.

        In a Text space this is the whole text, in a Discrete space the last word or number that is
        an action.
        """
        if self.discrete is None:
            return text if self.inner.action_space.contains(text) else None
        words = {word.lower(): index for index, word in enumerate(self.config.actions)}
        if not words:
            words = {str(self.discrete.start + index): index for index in range(self.discrete.n)}
        actions = [word for word in re.findall(r"\w+", text.lower()) if word in words]
        return self.discrete.start + words[actions[-1]] if actions else None

    def _filled(self, template: str) -> str:
        text = template.replace("{observation}", str(self._seen))
        return text.replace("{screen}", str(self.inner.render())) if "{screen}" in text else text


def _metrics(*, illegal: bool, truncated: bool = False) -> Mapping[str, float]:
    return {"illegal_moves": float(illegal), "environment_truncated": float(truncated)}
