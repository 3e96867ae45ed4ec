"""Configuration of the adapters for environments of other packages. Free of torch and of those
packages."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field, model_validator

from ratchet.environments.config import EnvironmentConfig


class SeededConfig(EnvironmentConfig):
    """A task is a seed. The episode's rewards are those of the environment's own steps."""

    gives: ClassVar[frozenset[str]] = frozenset({"rollouts"})

    test_tasks: int = Field(100, ge=1, description="Seeds from 0 on that are held out.")
    max_turns: int = Field(100, ge=1, description="An episode that is not over by then ends there.")
    replayable: bool = Field(
        True, description="The same seed and the same actions give the same episode."
    )
    process_random: bool = Field(
        True,
        description="It draws from Python's or numpy's generator of the whole process: its calls "
        "run one at a time, each with "
        "that generator as its own last call left it. false: calls run at once, in threads.",
    )


class GymnasiumConfig(SeededConfig):
    """Any Gymnasium environment with discrete or text observations and actions, by its id."""

    builds: ClassVar[str] = "ratchet.environments.adapters.gymnasium:GymnasiumEnvironment"

    id: str = Field(
        min_length=1,
        description='As for gymnasium.make: "FrozenLake-v1", or "my_pkg.my_mod:Maze-v0".',
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
    reply: str = Field("{observation}", description="The messages after it, likewise.")
    process_random: bool = Field(
        False,
        description="As above; Gymnasium's own environments have generators of their own, and need "
        "it not.",
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


class GemConfig(SeededConfig):
    """A gem environment by its id, or a class in the style of ROLL and gem by its import path:
    `reset(seed)` gives `(observation, info)`, `step(text)` gives `(observation, reward, terminated,
    truncated, info)`."""

    builds: ClassVar[str] = "ratchet.environments.adapters.gem:GemEnvironment"

    id: str | None = Field(
        None, min_length=1, description='As for gem.make: "game:GuessTheNumber-v0-easy".'
    )
    path: str | None = Field(
        None, pattern=r"^[\w.]+:\w+$", description="my_pkg.my_mod:MyEnvironment, instead of an id."
    )
    kwargs: dict[str, Any] = Field({}, description="Arguments of gem.make, or of the class.")

    @model_validator(mode="after")
    def _one_of_both(self) -> GemConfig:
        if (self.id is None) == (self.path is None):
            raise ValueError("set either id (of a gem environment) or path (of a class)")
        return self


class VerifiersConfig(EnvironmentConfig):
    """An environment of the package verifiers (its v1 interface) by the id of its taskset."""

    builds: ClassVar[str] = "ratchet.environments.adapters.verifiers:VerifiersEnvironment"
    gives: ClassVar[frozenset[str]] = frozenset({"rollouts"})

    taskset: str = Field(
        min_length=1, description="Id of the taskset: a package that exports it, or a built-in one."
    )
    options: dict[str, Any] = Field({}, description="Further keys of the taskset's own config.")
    env: dict[str, Any] = Field(
        {},
        description="Keys of the environment's config, its id among them where it is not the "
        "taskset's.",
    )
    seat: str | None = Field(
        None, description="The agent that the policy plays; null: the only one that there is."
    )
    tasks: int | None = Field(
        None, ge=2, description="Only the first so many; an endless taskset needs it."
    )
    max_turns: int = Field(
        64,
        ge=1,
        description="Replies of the policy before the environment is told that it has stopped.",
    )
    replayable: bool = Field(True, description="The same replies give the same episode.")
