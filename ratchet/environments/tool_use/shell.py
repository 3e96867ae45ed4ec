"""Base class of environments whose policy works with shell commands in a session of a sandbox."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, SerializeAsAny

from ratchet.config.base import Section
from ratchet.config.resolve import Slot, build
from ratchet.config.sections import EnvironmentConfig
from ratchet.environments.single_turn import Rows
from ratchet.protocols import Step
from ratchet.sandbox.base import Isolation, Limits, Reason, Result, Sandbox, Session
from ratchet.sandbox.config import local_sandbox
from ratchet.types import Message, Task, ToolCall

TOOL_NAME = "bash"
BLOCK_PATTERN = re.compile(
    r"^```(?:sh|bash|shell)?[ \t]*\n(.*?)^```[ \t]*$", re.DOTALL | re.MULTILINE
)
INSTRUCTIONS = (
    "\n\nYou have a shell. Give one command (or several lines) in a ```sh block, or by the tool "
    "`bash`, and you see what it "
    "prints. When the goal is reached, say so without a command."
)


class ShellConfig(EnvironmentConfig):
    """The keys that all environments with shell commands share."""

    sandbox: Annotated[SerializeAsAny[Section], Slot("sandbox")] = Field(
        default_factory=local_sandbox
    )
    """Sandbox of the commands: local, docker or remote."""
    isolation: Literal["kernel", "namespaces"] = "namespaces"
    """Weakest isolation allowed."""
    workers: int = Field(2, gt=0)
    """Maximum number of commands that run at once."""
    instructions: str = INSTRUCTIONS
    """Text appended to each goal."""
    commands: int = Field(20, gt=0)
    """Maximum number of commands in an attempt, which is then judged."""
    command_timeout_s: float = Field(30.0, gt=0)
    """Wall time limit of a command, in seconds."""
    cpu_s: float = Field(30.0, gt=0)
    """CPU time limit of each process, in seconds."""
    memory_mib: int = Field(512, ge=64)
    """Memory limit of a session in MiB."""
    shown_characters: int = Field(4000, ge=100)
    """Number of characters that the agent sees of a command's output, half from its beginning and
    half from its end."""


@dataclass
class Attempt:
    """The state of one attempt."""

    task: Task
    session: Session
    n_commands: int = 0
    """Number of commands so far."""
    seconds: float = 0.0
    """Wall time of all commands so far."""


class ShellEnvironment(Rows):
    """A base class that runs the commands of an attempt. A subclass opens sessions and judges."""

    def __init__(self, config: ShellConfig, sandbox: Section) -> None:
        """Raise SandboxError if the sandbox can't isolate commands as `isolation` requires."""
        self.settings = config
        at_least = Isolation[config.isolation.upper()]
        self.sandbox: Sandbox = build(sandbox, slots=config.workers, at_least=at_least)
        self.limits = Limits(
            cpu_s=config.cpu_s, memory_mib=config.memory_mib, processes=16, output_kib=256
        )
        self._attempt: Attempt | None = None

    @abstractmethod
    async def judge(self, attempt: Attempt) -> tuple[float, Mapping[str, float]]:
        """Return the reward and the metrics of an attempt that has ended."""

    def get_remaining_s(self, attempt: Attempt) -> float:
        """Return the wall time in seconds for the next command. 0 or less ends the attempt."""
        return self.settings.command_timeout_s

    def tools(self, task: Task) -> Sequence[Mapping[str, Any]]:
        command = {"type": "string", "description": "One command, or several lines."}
        parameters = {"type": "object", "properties": {"command": command}, "required": ["command"]}
        description = "Runs a shell command and gives what it prints."
        return [
            {
                "type": "function",
                "function": {
                    "name": TOOL_NAME,
                    "description": description,
                    "parameters": parameters,
                },
            }
        ]

    async def step(self, message: Message) -> Step:
        """Run the commands of a message.

        The attempt ends and is judged if the message has no command, or if no command or no time is
        left.
        """
        attempt = self._attempt
        assert attempt is not None, "step before reset"
        commands = extract_commands(message)
        answers: list[Message] = []
        for call_id, command in commands[: self.settings.commands - attempt.n_commands]:
            attempt.n_commands += 1
            if command is None:
                text = f"there is no such call: call {TOOL_NAME} with a command"
            elif (timeout_s := self.get_remaining_s(attempt)) <= 0:
                text = "no time is left for commands"
            else:
                result = await attempt.session.run(command, timeout_s)
                attempt.seconds += result.seconds
                text = format_result(result, self.settings.shown_characters)
            answers.append(
                Message("tool", text, tool_call_id=call_id) if call_id else Message("user", text)
            )
        has_commands_left = attempt.n_commands < self.settings.commands
        if commands and has_commands_left and self.get_remaining_s(attempt) > 0:
            return Step(messages=tuple(answers))
        reward, metrics = await self.judge(attempt)
        return Step(
            reward=reward,
            done=True,
            metrics={"commands": float(attempt.n_commands), **metrics},
        )

    async def close(self) -> None:
        if (attempt := self._attempt) is not None:
            self._attempt = None
            await attempt.session.close()


def extract_commands(message: Message) -> list[tuple[str, str | None]]:
    """Return (tool call id, command) for each command of a message.

    The command is None for a tool call that is not a valid call of `bash`. In a message without
    tool calls the last code block is the only command, and its id is "".
    """
    if message.tool_calls:
        return [(call.id, _read_command(call)) for call in message.tool_calls]
    blocks = BLOCK_PATTERN.findall(message.text)
    return [("", blocks[-1])] if blocks else []


def _read_command(call: ToolCall) -> str | None:
    command = call.arguments.get("command") if call.name == TOOL_NAME else None
    return command if isinstance(command, str) else None


def format_result(result: Result, max_chars: int) -> str:
    """Return the text that the agent sees after a command.

    It is the output and the error output of the command, without their middle if they have more
    than `max_chars` characters. If the command failed or printed nothing, a last line says how it
    ended, such as [exit code 1].
    """
    text = (result.stdout + result.stderr).decode("utf-8", "replace")
    if len(text) > max_chars:
        half = max_chars // 2
        text = f"{text[:half]}\n[{len(text) - max_chars} characters left out]\n{text[-half:]}"
    reason = result.reason.value if result.reason is not Reason.EXIT else f"exit code {result.exit}"
    return text if result.ok and text else f"{text.rstrip()}\n[{reason}]".lstrip()


def move_below(folder: str, files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the files with their paths moved into a folder."""
    return {f"{folder}/{name}": data for name, data in files.items()}
