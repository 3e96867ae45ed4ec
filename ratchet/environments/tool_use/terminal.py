"""An environment of goals to reach by shell commands.

The check runs in a new session, with a copy of the files that the agent's session ended with. No
process that the agent started, and nothing else that it changed or watches, can reach the check,
and the agent never sees the check.

The agent's files lie in the directory $WORK, and the check starts in the directory of its own
files, $CHECK. Programs look for further files where they start and where their source lies (csv.py,
conftest.py, GNUmakefile, node_modules, .git). There they find only the check's files, so they use a
file of the agent only if the check names it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, SerializeAsAny

from ratchet.config.base import Section
from ratchet.config.resolve import Slot, build
from ratchet.data.files import DataFile
from ratchet.data.jsonl import DataRow
from ratchet.data.tables import read_rows
from ratchet.environments.base import EnvironmentConfig
from ratchet.environments.single_turn import Rows, held_out
from ratchet.errors import DataError
from ratchet.protocols import Step
from ratchet.sandbox.base import (
    Isolation,
    Limits,
    Reason,
    Result,
    Sandbox,
    Session,
    TooLarge,
    check_relative_path,
)
from ratchet.sandbox.compare_output import output_matches
from ratchet.sandbox.config import local_sandbox
from ratchet.types import Message, Split, Task, ToolCall

INSTRUCTIONS = (
    "\n\nYou have a shell. Give one command (or several lines) in a ```sh block, or by the tool "
    "`bash`, and you see what it "
    "prints. When the goal is reached, say so without a command."
)


class TerminalConfig(EnvironmentConfig):
    """An environment of goals to reach by commands in a sandbox (docs/sandbox.md).

    A check that the agent never sees judges the result: the last step's reward is 1 or 0. Rows have
    `goal` and `check`, and optionally `id`, `image`, `files`, `check_files`, `expected` and
    `solution`. The test split is the file `test`, or else one in ten of the goals of `train`.
    """

    builds: ClassVar[str] = "ratchet.environments.tool_use.terminal:Terminal"

    train: DataFile = Field(description="A file, or an address in an object store.")
    test: DataFile | None = Field(
        None, description="File of the test split, or an address in an object store."
    )
    sandbox: Annotated[SerializeAsAny[Section], Slot("sandbox")] = Field(
        default_factory=local_sandbox,
        description="Sandbox of the commands: local, docker or remote, and its keys.",
    )
    isolation: Literal["kernel", "namespaces"] = Field(
        "namespaces", description="Weakest isolation allowed."
    )
    workers: int = Field(2, gt=0, description="Commands that run at once.")
    instructions: str = Field(INSTRUCTIONS, description="Appended to each goal.")
    commands: int = Field(
        20, gt=0, description="Commands of an attempt; it is judged after the last one."
    )
    command_timeout_s: float = Field(
        30.0, gt=0, description="Wall time of one command, in seconds."
    )
    check_timeout_s: float = Field(60.0, gt=0, description="Wall time of the check, in seconds.")
    cpu_s: float = Field(30.0, gt=0, description="Processor time of each process, in seconds.")
    memory_mib: int = Field(512, ge=64, description="Memory limit of a session in MiB.")
    shown_characters: int = Field(
        4000,
        ge=100,
        description="Characters shown of a command's output: its beginning and its end.",
    )


TOOL = "bash"
BLOCK = re.compile(r"^```(?:sh|bash|shell)?[ \t]*\n(.*?)^```[ \t]*$", re.DOTALL | re.MULTILINE)
WORK, CHECK = "work", "check"
NAMED = re.compile(rf"\b{WORK.upper()}\b|\.\./{WORK}\b")
# Runs before the check, in its session. Python's variables are needed for a check that does
# `cd "$WORK"`; without that its default paths would be safe. git reads the configuration of a
# repository that the check names; the git variables keep `git status` and `git fetch` from running
# commands set there.
PREPARE = f"""
export {WORK.upper()}="$PWD/{WORK}" {CHECK.upper()}="$PWD/{CHECK}"
export HOME="$CHECK" PYTHONPATH="$CHECK" PYTHONSAFEPATH=1 PYTHONNOUSERSITE=1 PYTHONDONTWRITEBYTECODE=1
export GIT_CONFIG_COUNT=2 GIT_CONFIG_KEY_0=core.fsmonitor GIT_CONFIG_VALUE_0=false
export GIT_CONFIG_KEY_1=core.hooksPath GIT_CONFIG_VALUE_1=/dev/null GIT_ALLOW_PROTOCOL=file GIT_NO_LAZY_FETCH=1
mkdir -p "$WORK" "$CHECK" && cd "$CHECK" || exit 125
"""
# Optional columns of a row: (type, default).
COLUMNS: Mapping[str, tuple[type, Any]] = {
    "id": (str, ""),
    "image": (str, ""),
    "files": (dict, {}),
    "check_files": (dict, {}),
    "expected": (str, None),
    "solution": (list, []),
}


@dataclass
class Attempt:
    """The state of one attempt."""

    task: Task
    session: Session
    used: int = 0


class Terminal(Rows):
    name = "terminal"

    def __init__(self, config: TerminalConfig) -> None:
        """Raise SandboxError if the sandbox isolates commands less than `isolation` requires."""
        self.config = config
        at_least = Isolation[config.isolation.upper()]
        self.sandbox: Sandbox = build(config.sandbox, slots=config.workers, at_least=at_least)
        self.limits = Limits(
            cpu_s=config.cpu_s, memory_mib=config.memory_mib, processes=16, output_kib=256
        )
        self._attempt: Attempt | None = None

    def rows(self, split: Split) -> Sequence[Task]:
        """Return a split's tasks. Raises DataError (file, line) for a row that can't be used."""
        return self._tasks[split]

    @cached_property
    def _tasks(self) -> dict[Split, list[Task]]:
        read = [
            self._read(self.config.train, row)
            for row in read_rows(self.config.train, {"goal": str, "check": str})
        ]
        if self.config.test is None:
            return {
                "train": [task for task in read if not held_out(task.meta["goal"])],
                "test": [task for task in read if held_out(task.meta["goal"])],
            }
        test = [
            self._read(self.config.test, row)
            for row in read_rows(self.config.test, {"goal": str, "check": str})
        ]
        return {"train": read, "test": test}

    def _read(self, path: DataFile, row: DataRow) -> Task:
        where, meta = (
            f"{path}, {row.where}",
            {"goal": row.values["goal"], "check": row.values["check"]},
        )
        for name, (expected, default) in COLUMNS.items():
            meta[name] = row.values.get(name, default)
            if meta[name] is not default and not isinstance(meta[name], expected):
                raise DataError(
                    f"{where}: column '{name}' is {meta[name]!r:.60}, must be of type "
                    f"{expected.__name__}"
                )
        for name in ("files", "check_files"):
            for file, text in meta[name].items():
                check_relative_path(file)
                if not isinstance(text, str):
                    raise DataError(
                        f"{where}: '{name}' must give each file's text, and that of {file!r} is "
                        f"{text!r:.60}"
                    )
        if not any(NAMED.search(text) for text in (meta["check"], *meta["check_files"].values())):
            raise DataError(
                f"{where}: the check never names the agent's files, which lie in $WORK, so that it "
                "says the same of every "
                "attempt. Write \"$WORK/FILE\" for FILE in 'check', or read the variable WORK in a "
                "file of 'check_files'."
            )
        task_id = meta.pop("id") or f"{Path(path).stem}/{row.line}"
        prompt = Message("user", row.values["goal"] + self.config.instructions)
        return Task(
            f"{self.name}/{task_id}", (prompt,), environment=self.name, tag=self.name, meta=meta
        )

    def demonstration(self, task: Task) -> Sequence[Message]:
        if not task.meta["solution"]:
            raise DataError(f"task '{task.id}' has no solution")
        return (
            *(Message("assistant", f"```sh\n{command}\n```") for command in task.meta["solution"]),
            Message("assistant", "Done."),
        )

    def tools(self, task: Task) -> Sequence[Mapping[str, Any]]:
        command = {"type": "string", "description": "One command, or several lines."}
        parameters = {"type": "object", "properties": {"command": command}, "required": ["command"]}
        described = "Runs a shell command and gives what it prints."
        return [
            {
                "type": "function",
                "function": {"name": TOOL, "description": described, "parameters": parameters},
            }
        ]

    async def reset(self, task: Task) -> Sequence[Message]:
        await self.close()
        session = await self.sandbox.open(task.meta["image"], self.limits)
        self._attempt = Attempt(task, session)
        await session.put(_files(task.meta["files"]))
        return task.messages

    async def step(self, message: Message) -> Step:
        attempt = self._attempt
        assert attempt is not None, "step before reset"
        commands = extract_commands(message)
        answers: list[Message] = []
        for call, command in commands[: self.config.commands - attempt.used]:
            attempt.used += 1
            error_text = (
                command
                if command is None
                else shown(await self._run(attempt, command), self.config.shown_characters)
            )
            text = (
                f"there is no such call: call {TOOL} with a command"
                if error_text is None
                else error_text
            )
            answers.append(
                Message("tool", text, tool_call_id=call) if call else Message("user", text)
            )
        if commands and attempt.used < self.config.commands:
            return Step(messages=tuple(answers))
        reward = await self._judge(attempt)
        return Step(reward=reward, done=True, metrics={"commands": float(attempt.used)})

    async def _run(self, attempt: Attempt, command: str) -> Result:
        return await attempt.session.run(command, self.config.command_timeout_s)

    async def _judge(self, attempt: Attempt) -> float:
        """Return 1 if the check exits with code 0 and prints `expected`, if that is set; else 0."""
        meta = attempt.task.meta
        try:
            files = await attempt.session.get()
        except TooLarge:  # the agent wrote too much, so its files can't be judged
            return 0.0
        await self.close()
        session = await self.sandbox.open(meta["image"], self.limits)
        try:
            await session.put(_below(CHECK, _files(meta["check_files"])))
            try:
                await session.put(_below(WORK, files))
            # The agent's files leave no room beside the check's. The reward is 0, because a failed
            # attempt would not count against the agent.
            except TooLarge:
                return 0.0
            result = await session.run(PREPARE + meta["check"], self.config.check_timeout_s)
        finally:
            await session.close()
        return float(
            result.ok if meta["expected"] is None else output_matches(result, meta["expected"])
        )

    async def close(self) -> None:
        if (attempt := self._attempt) is not None:
            self._attempt = None
            await attempt.session.close()


def extract_commands(message: Message) -> list[tuple[str, str | None]]:
    """Return (tool call's id, command) of each command of a message.

    The command is None if the call is not a valid call of `bash`. In a message without tool calls
    the text's last block is the command, with "" as id.
    """
    if message.tool_calls:
        return [(call.id, _called(call)) for call in message.tool_calls]
    blocks = BLOCK.findall(message.text)
    return [("", blocks[-1])] if blocks else []


def _called(call: ToolCall) -> str | None:
    command = call.arguments.get("command") if call.name == TOOL else None
    return command if isinstance(command, str) else None


def shown(result: Result, most: int) -> str:
    """Return the text that the agent sees of a command.

    It is both outputs, cut in the middle beyond `most` characters, and how the command failed if it
    did.
    """
    text = (result.stdout + result.stderr).decode("utf-8", "replace")
    if len(text) > most:
        text = (
            f"{text[: most // 2]}\n[{len(text) - most} characters left out]\n{text[-(most // 2) :]}"
        )
    ended = result.reason.value if result.reason is not Reason.EXIT else f"exit code {result.exit}"
    return text if result.ok and text else f"{text.rstrip()}\n[{ended}]".lstrip()


def _below(folder: str, files: Mapping[str, bytes]) -> dict[str, bytes]:
    return {f"{folder}/{name}": data for name, data in files.items()}


def _files(texts: Mapping[str, str]) -> dict[str, bytes]:
    return {name: text.encode("utf-8", "surrogatepass") for name, text in texts.items()}
