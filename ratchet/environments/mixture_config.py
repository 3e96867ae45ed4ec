"""Configuration of a mixture of environments. Free of torch and of their code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field, SerializeAsAny, model_validator

from ratchet.config.base import Section
from ratchet.config.resolve import Slot
from ratchet.environments.config import EnvironmentConfig


class MixtureConfig(EnvironmentConfig):
    """Several environments in one run, each with its share of the prompts and, by its tag, its own
    rewards."""

    builds: ClassVar[str] = "ratchet.environments.mixture:mixture"

    parts: Annotated[tuple[SerializeAsAny[Section], ...], Slot("part", many=True)] = Field(
        min_length=1,
        description="Environments, each with its weight, and a tag where two are of one kind.",
    )

    @model_validator(mode="after")
    def _distinct(self) -> MixtureConfig:
        tags = [get_part_tag(part) for part in self.parts]
        repeated = next((tag for tag in tags if tags.count(tag) > 1), None)
        if repeated is not None:
            raise ValueError(
                f"two parts have the tag '{repeated}': give one of them another, tag: {repeated}_2"
            )
        return self

    @property
    def default_reward(self) -> str | Mapping[str, Any]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Each part's own, by its tag; nothing where all of them judge by their steps."""
        default_rewards = {
            get_part_tag(part): getattr(part, "default_reward", "") for part in self.parts
        }
        if not any(default_rewards.values()):
            return ""
        return {
            "kind": "by_tag",
            "domains": {
                tag: [{"kind": kind}] if kind else [] for tag, kind in default_rewards.items()
            },
        }

    @property
    def gives(self) -> frozenset[str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Return what all parts offer; parts from other packages do not count."""
        tags = [
            frozenset(found)
            for part in self.parts
            if (found := getattr(part, "gives", None)) is not None
        ]
        return frozenset.intersection(*tags) if tags else EnvironmentConfig.gives

    @property
    def judges(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return all(getattr(part, "judges", True) for part in self.parts)


def get_part_tag(part: Section) -> str:
    return getattr(part, "tag", "") or str(getattr(part, "kind", "")).rpartition(":")[2]
