"""The recipe sections of environments of NeMo RL and of Atropos. This module imports neither."""

from __future__ import annotations

import inspect
from typing import Any, ClassVar

from pydantic import Field, field_validator

from ratchet.config.resolve import import_object
from ratchet.config.sections import EnvironmentConfig
from ratchet.errors import ConfigError

REQUIRED_METHODS = ("step", "global_post_process_and_metrics")


class MessageLogConfig(EnvironmentConfig):
    """An environment that implements NeMo RL's `EnvironmentInterface` (docs/rollouts.md)."""

    builds: ClassVar[str] = "ratchet.experience.nemo_rl.training:MessageLogEnvironment"
    data_kinds: ClassVar[frozenset[str]] = frozenset({"rollouts"})

    interface: str
    """Path of the environment's class: my_pkg.my_mod:MyEnv."""
    arguments: dict[str, Any] = Field({})
    """Arguments of the class, by name."""
    data: str
    """Path of a function that takes a split ("train" or "test") and returns its samples as
    DatumSpecs."""
    raw_observations: bool | None = None
    """true: append the text of observations as its own tokens, without the chat template, as NeMo
    RL does; null: as the class's attribute raw_observations says."""
    judges_cut_answers: bool | None = None
    """true: let the environment judge an answer that a token limit cut off, as NeMo RL does; null:
    as the class's attribute judges_cut_answers says."""

    @field_validator("interface", "data")
    @classmethod
    def _check_import(cls, path: str) -> str:
        try:
            target = import_object(path)
        except ConfigError as error:
            raise ValueError(str(error)) from error
        if not callable(target):
            raise ValueError(f"'{path}' can't be called. Name a class or a function")
        return path

    def check_keys(self) -> None:
        interface = import_object(self.interface)
        missing = next((name for name in REQUIRED_METHODS if not hasattr(interface, name)), None)
        if missing is not None:
            raise ValueError(
                f"interface '{self.interface}' has no method {missing}: derive it from "
                "EnvironmentInterface"
            )
        try:
            inspect.signature(interface).bind(**self.arguments)
        except TypeError as error:
            raise ValueError(f"arguments don't fit '{self.interface}': {error}") from error


class AtroposConfig(EnvironmentConfig):
    """An environment of Atropos, a subclass of its `BaseEnv` (docs/environments.md)."""

    builds: ClassVar[str] = "ratchet.experience.atropos.environment:AtroposEnvironment"
    data_kinds: ClassVar[frozenset[str]] = frozenset({"rollouts"})

    path: str
    """Path of the environment's class: my_pkg.my_mod:MyEnv, or my_env.py:MyEnv."""
    config: dict[str, Any] = Field({})
    """Keys of the environment's own config class, such as tokenizer_name, which must be the
    policy's tokenizer. Others are as its config_init gives them."""
    test_tasks: int = Field(16, ge=1)
    """Number of held-out items: the first that the environment gives."""
    ignore: tuple[str, ...] = ()
    """Fields of the environment's requests that have no effect, such as temperature and top_p,
    which are the run's."""
