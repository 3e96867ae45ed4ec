"""Configuration of the built-in tools. Free of torch and of their code."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field, SerializeAsAny

from ratchet.config.base import Section
from ratchet.config.resolve import Slot


class ToolConfig(Section):
    """The keys that all tools share; `builds` makes one tool, or a sequence of them."""


class CalculatorConfig(ToolConfig):
    """Arithmetic, exactly: + - * / // % ** and parentheses."""

    builds: ClassVar[str] = "ratchet.environments.tool_use.calculator:Calculator"


class PythonConfig(ToolConfig):
    """Runs a program in the sandbox and answers with what it prints."""

    builds: ClassVar[str] = "ratchet.environments.tool_use.python:PythonTool"

    timeout_s: float = Field(
        4.0, gt=0, description="Processor time of one program; of the clock, three times it."
    )
    memory_mib: int = Field(512, ge=64, description="Address space of the program.")
    workers: int = Field(2, gt=0, description="Programs that run at once.")
    isolation: Literal["namespaces", "landlock", "seccomp"] = Field(
        "landlock",
        description="The weakest sandbox that will do; the strongest that there is is taken.",
    )


class SearchConfig(ToolConfig):
    """Finds passages of a corpus, by their words (BM25) and, if asked for, by their meaning."""

    builds: ClassVar[str] = "ratchet.environments.tool_use.retriever:search_tool"

    corpus: Path = Field(description="JSON Lines with the column `text`, and perhaps `title`.")
    results: int = Field(3, gt=0, description="Passages of one answer.")
    max_chars: int = Field(1000, gt=0, description="Of one passage.")
    embeddings: str | None = Field(
        None,
        description="Also by meaning: my_pkg.my_mod:function (texts -> [N, d] array), or a model's "
        "directory.",
    )


class MCPConfig(ToolConfig):
    """All tools of a server that speaks the Model Context Protocol over its standard input and
    output."""

    builds: ClassVar[str] = "ratchet.environments.tool_use.mcp:mcp_tools"

    command: tuple[str, ...] = Field(
        min_length=1, description="The program that is the server, and its arguments."
    )
    env: dict[str, str] = Field(
        {}, description="Its environment variables, beside a few that any program needs."
    )
    only: tuple[str, ...] = Field((), description="Offer these tools alone; empty: all.")
    start_s: float = Field(30.0, gt=0, description="In which it must have listed its tools.")


Tools = Annotated[tuple[SerializeAsAny[Section], ...], Slot("tool", many=True)]
