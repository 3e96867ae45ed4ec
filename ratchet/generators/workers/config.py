"""Configuration of generators in processes of their own. Free of torch and of their code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, ClassVar, Literal

from pydantic import Field, SerializeAsAny, model_validator

from ratchet.config.base import Section
from ratchet.config.resolve import Slot


class WorkersConfig(Section):
    """Other generators, each in a process of its own, behind a router that shares requests out."""

    builds: ClassVar[str] = "ratchet.generators.workers.pool:Router"

    of: Annotated[SerializeAsAny[Section], Slot("generating")] = Field(
        description="The generator that each of them holds."
    )
    workers: int = Field(2, ge=1, le=1024, description="Processes, each with the whole model.")
    plays: Literal["requests", "groups"] = Field(
        "requests",
        description="What workers are asked for. requests: completions; groups: whole groups of "
        "attempts, whose environments "
        "and rewards run there too, which pays where attempts are short and many.",
    )
    recovery: Literal["none", "restart"] = Field(
        "none",
        description="When one dies, or is silent for too long. none: the run ends; restart: "
        "another one takes its place, and "
        "what it had not answered is drawn again.",
    )
    max_restarts: int = Field(
        3, ge=1, description="Of all of them together in a run; the next death ends it."
    )

    @model_validator(mode="after")
    def _restarts(self) -> WorkersConfig:
        if self.plays == "groups" and self.recovery == "restart":
            raise ValueError(
                "plays=groups begins no group a second time: set recovery=none, or plays=requests"
            )
        if self.recovery == "none" and "max_restarts" in self.changed:
            raise ValueError(
                "max_restarts bounds what recovery=restart does: set that, or remove max_restarts"
            )
        return self

    @property
    def placeable(self) -> bool:
        return getattr(self.of, "placeable", True)

    @property
    def filters(self) -> bool:
        return getattr(self.of, "filters", True)

    @property
    def least_temperature(self) -> float:
        return getattr(self.of, "least_temperature", 0.0)

    @property
    def misfit(self) -> Callable[..., str | None] | None:
        return getattr(self.of, "misfit", None)

    @property
    def accelerators(self) -> int:
        """Of each worker, where there are any."""
        return getattr(self.of, "accelerators", 1)
