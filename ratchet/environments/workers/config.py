"""Configuration of environments that are played in worker processes. Free of torch and of their
code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field, SerializeAsAny

from ratchet.config.base import Section
from ratchet.config.resolve import Slot
from ratchet.environments.config import EnvironmentConfig


class WorkersConfig(EnvironmentConfig):
    """Another environment, its attempts played in processes of their own: for one that computes
    long, blocks or crashes."""

    builds: ClassVar[str] = "ratchet.environments.workers.environment:workers"

    worker: Annotated[SerializeAsAny[Section], Slot("played")] = Field(
        description="The environment whose attempts they play."
    )
    processes: int = Field(
        2, ge=1, le=1024, description="Worker processes at most; each starts when it is needed."
    )
    threads: int = Field(
        8, ge=1, le=1024, description="Threads of each: attempts beyond these wait for one another."
    )

    @property
    def default_reward(self) -> str | Mapping[str, Any]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return getattr(self.worker, "default_reward", "")

    @property
    def gives(self) -> frozenset[str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return getattr(self.worker, "gives", EnvironmentConfig.gives)

    @property
    def judges(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return getattr(self.worker, "judges", True)
