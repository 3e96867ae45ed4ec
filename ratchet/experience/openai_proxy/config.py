"""Configuration of agents. It imports neither their code nor the server."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from ratchet.config.base import Section


class CommandConfig(Section):
    """A program that plays one attempt.

    It gets the task as JSON on its standard input, and the server in OPENAI_BASE_URL and
    OPENAI_API_KEY.
    """

    builds: ClassVar[str] = "ratchet.experience.openai_proxy.agents:CommandAgent"

    command: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=1)] = (
        Field(description="The program and its arguments; no shell reads it.")
    )
    directory: str | None = Field(
        None, description="Where it starts; null: where the run was started."
    )
