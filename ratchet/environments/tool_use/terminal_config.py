"""Configuration of the terminal environment. Free of torch and of its code."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, SerializeAsAny

from ratchet.config.base import Section
from ratchet.config.resolve import Slot
from ratchet.data.files import DataFile
from ratchet.environments.config import EnvironmentConfig
from ratchet.sandbox.config import local_sandbox

INSTRUCTIONS = (
    "\n\nYou have a shell. Give one command (or several lines) in a ```sh block, or by the tool "
    "`bash`, and you see what it "
    "prints. When the goal is reached, say so without a command."
)


class TerminalConfig(EnvironmentConfig):
    """Reach a goal by commands in a sandbox; a check that the agent never sees decides
    (docs/sandbox.md).

    Rows with `goal` and `check`, and, where needed, `id`, `image`, `files`, `check_files`,
    `expected`, `solution`. The test split is the file `test`, or else one in ten of the goals of
    `train`. A step gives the reward: 1 or 0 at the end.
    """

    builds: ClassVar[str] = "ratchet.environments.tool_use.terminal:Terminal"

    train: DataFile = Field(description="A file, or an address in an object store.")
    test: DataFile | None = Field(None, description="Likewise.")
    sandbox: Annotated[SerializeAsAny[Section], Slot("sandbox")] = Field(
        default_factory=local_sandbox,
        description="Where commands run: local, docker or remote, and its keys.",
    )
    isolation: Literal["kernel", "namespaces"] = Field(
        "namespaces", description="The weakest sandbox that will do."
    )
    workers: int = Field(2, gt=0, description="Commands that run at once.")
    instructions: str = Field(INSTRUCTIONS, description="Appended to each goal.")
    commands: int = Field(20, gt=0, description="Of an attempt; it is judged after the last one.")
    command_timeout_s: float = Field(30.0, gt=0, description="Of one command, of the clock.")
    check_timeout_s: float = Field(60.0, gt=0, description="Of the check, of the clock.")
    cpu_s: float = Field(30.0, gt=0, description="Processor time of each process.")
    memory_mib: int = Field(512, ge=64, description="Of a session.")
    shown_characters: int = Field(
        4000, ge=100, description="Of what a command prints: its beginning and its end."
    )
