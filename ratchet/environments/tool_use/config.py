"""Configuration of environments with tools. Free of torch and of their code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field, SerializeAsAny

from ratchet.config.base import Section
from ratchet.config.resolve import Slot
from ratchet.data.files import DataFile
from ratchet.environments.config import EnvironmentConfig
from ratchet.environments.tool_use.tools_config import Tools


class WithToolsConfig(EnvironmentConfig):
    """The keys that all environments with tools share."""

    tools: Tools = Field(min_length=1, description="What the policy may call; each with its kind.")
    system: str = Field("", description="A system message before each task; empty: none.")
    max_calling_turns: int = Field(
        8, gt=0, description="Turns with calls; one more ends the attempt without an answer."
    )
    timeout_s: float = Field(30.0, gt=0, description="Of one call, by the clock.")
    max_chars: int = Field(4000, gt=0, description="Of one tool's answer; the rest is cut off.")


class ToolUseConfig(WithToolsConfig):
    """The problems of another environment, with tools to solve them."""

    builds: ClassVar[str] = "ratchet.environments.tool_use.environment:ToolUse"

    problems: Annotated[SerializeAsAny[Section], Slot("problems")] = Field(
        description="An environment of one prompt and one answer; its reward judges the final "
        "message."
    )

    @property
    def default_reward(self) -> str | Mapping[str, Any]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return getattr(self.problems, "default_reward", "")


class QAConfig(WithToolsConfig):
    """Questions from a file with the columns `question` and `answer`, and tools to look the answer
    up (kind: search).

    The test split is the file `test`, or else one in ten of the questions.
    """

    builds: ClassVar[str] = "ratchet.environments.datasets.qa:QA"

    train: DataFile = Field(description="A file, or an address in an object store.")
    test: DataFile | None = Field(None, description="Likewise.")

    @property
    def default_reward(self) -> str | Mapping[str, Any]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The F1 of words, as usual for short answers (arXiv:1606.05250)."""
        return {"kind": "similarity", "measure": "bag", "ignore_case": True}
