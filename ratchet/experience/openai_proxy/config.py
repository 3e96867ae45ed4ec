"""The recipe sections of agents. This module imports neither their code nor the server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from ratchet.config.base import Section


@dataclass(frozen=True)
class AgentServerSettings:
    """The settings of the server that an agent's attempts call."""

    ignored: tuple[str, ...] = ()
    """Fields of requests that have no effect."""
    host: str = "127.0.0.1"
    """The address that the server listens on."""
    public_host: str | None = None
    """The host name in the base URL that agents get; None: `host`."""


LOCAL_SERVER = AgentServerSettings()


class CommandConfig(Section):
    """A program that plays one attempt.

    It reads the task as JSON from its standard input, and the server's address and key from
    OPENAI_BASE_URL and OPENAI_API_KEY, or from ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY.
    """

    builds: ClassVar[str] = "ratchet.experience.openai_proxy.agents:CommandAgent"

    command: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=1)]
    """The program and its arguments; no shell reads it."""
    directory: str | None = None
    """Working directory of the program; null: where the run was started."""
