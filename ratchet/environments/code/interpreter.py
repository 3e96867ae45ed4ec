"""An environment in which the policy runs Python code in a session, within its own turn or not.

It has the protocol of NeMo RL's code environment: code in `<code>` tags, its result in `<result>`
tags (nemo_rl/environments/code_environment.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from importlib.resources import files
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import Field, SerializeAsAny, field_validator

from ratchet.config.base import Section
from ratchet.config.resolve import Slot, build
from ratchet.config.schema import AnyEnvironment
from ratchet.config.sections import EnvironmentConfig
from ratchet.environments.build import build_environment
from ratchet.environments.tool_use.environment import find_expression
from ratchet.environments.tool_use.python import FAILURES, WALL_PER_CPU
from ratchet.protocols import Environment, Step
from ratchet.rewards.deadline import ProgramRunner
from ratchet.sandbox import Isolation, Limits, Result, Sandbox
from ratchet.sandbox.config import local_sandbox
from ratchet.types import Message, Split, Task


class CodeInterpreterConfig(EnvironmentConfig):
    """An environment that runs the policy's code, cell by cell in one namespace, in a sandbox."""

    builds: ClassVar[str] = "ratchet.environments.code.interpreter:CodeInterpreter"

    problems: Annotated[AnyEnvironment, Slot("problems")]
    """Single-turn environment with the problems; its reward judges the text after the last
    result."""
    system: str = ""
    """System message before each task; empty: none."""
    inline: bool = True
    """True: the result is written into the policy's turn, which continues. False: it comes as a
    message of the user."""
    code_tags: tuple[str, str] = ("<code>", "</code>")
    """Texts before and after code. The second ends a turn."""
    result_tags: tuple[str, str] = ("<result>", "</result>")
    """Texts before and after a result."""
    max_cells: int = Field(8, gt=0)
    """Maximum number of cells; a further one ends the attempt."""
    timeout_s: float = Field(4.0, gt=0)
    """CPU time limit of a cell, in seconds; the wall time limit is three times as long."""
    memory_mib: int = Field(512, ge=64)
    """Memory limit (address space) of the cells, in MiB."""
    max_chars: int = Field(4000, gt=0)
    """Maximum characters of a result; the rest is cut off."""
    workers: int = Field(2, gt=0)
    """Maximum number of cells that run at once."""
    isolation: Literal["kernel", "namespaces", "landlock", "seccomp"] = "landlock"
    """Weakest isolation allowed; the strongest available is used."""
    sandbox: Annotated[SerializeAsAny[Section], Slot("sandbox")] = Field(
        default_factory=local_sandbox
    )
    """Sandbox of the cells: local, docker or remote, and its keys."""

    @field_validator("code_tags", "result_tags")
    @classmethod
    def _check_tags(cls, tags: tuple[str, str]) -> tuple[str, str]:
        if not all(tags) or tags[0] == tags[1]:
            raise ValueError(
                f"{list(tags)} must be two different texts, such as ['<code>', '</code>']"
            )
        return tags

    @property
    def default_reward(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.problems.default_reward


# An address in a value's text, which differs from process to process.
ADDRESS = re.compile(r"\b0x[0-9a-f]{6,16}\b")
ENDED = "nothing of this code was kept"


class Cell(NamedTuple):
    """The code of a message."""

    code: str
    lookahead: str
    """The text after the closing tag that is part of the tag's last token."""


class CodeInterpreter(Environment):
    """An environment that runs the policy's code.

    All cells of an attempt share a namespace, and each runs in a fresh process after the ones
    before it have run again. So an attempt holds no process, and a resumed or replayed one has the
    same values. A cell that was killed (by a limit, or by its own doing) is not run again. Random
    numbers are seeded alike; clock times differ from run to run.
    """

    replayable = True

    def __init__(self, config: CodeInterpreterConfig) -> None:
        """Raise SandboxError if this machine can't isolate the cells as `isolation` requires."""
        self.config = config
        self.problems = build_environment(config.problems)
        self.sandbox: Sandbox = build(
            config.sandbox,
            slots=config.workers,
            at_least=Isolation[config.isolation.upper()],
        )
        self.stop_strings = (config.code_tags[1],)
        self._cells: list[str] = []  # those that were not killed
        self._seconds = 0.0  # their wall time together
        self._n_run = 0  # number of cells, with those that were killed

    @cached_property
    def _program(self) -> str:
        source = files("ratchet.environments.code").joinpath("cells.py")
        return f"{source.read_text(encoding='utf-8')}\n\nmain()\n"

    def tasks(self, split: Split, *, seed: int, start: int = 0) -> Iterator[Task]:
        return map(self._add_system_message, self.problems.tasks(split, seed=seed, start=start))

    def task_count(self) -> int | None:
        return self.problems.task_count()

    def _add_system_message(self, task: Task) -> Task:
        if not self.config.system:
            return task
        return replace(task, messages=(Message("system", self.config.system), *task.messages))

    def demonstration(self, task: Task) -> Sequence[Message]:
        """Return an episode in which Python evaluates the prompt's expression.

        Raises DataError if the prompt is not an expression, or if its value is not the task's
        answer.
        """
        expression, result = find_expression(task)
        start, end = self.config.code_tags
        cell = Cell(expression, "")
        return (
            Message("assistant", f"{start}{expression}{end}"),
            self._make_observation(format_result(result, cell, self.config.result_tags)),
            Message("assistant", result),
        )

    async def reset(self, task: Task) -> Sequence[Message]:
        self._cells, self._seconds, self._n_run = [], 0.0, 0
        return task.messages

    async def step(self, message: Message) -> Step:
        """Run the code at the end of a message; a message without code is the final answer.

        Raises SandboxError if the sandbox failed.
        """
        # Servers of chat completions leave the stop string out.
        may_be_open = not self.config.inline
        cell = find_cell(message.text, self.config.code_tags, may_be_open=may_be_open)
        if cell is None or self._n_run >= self.config.max_cells:
            return Step(done=True)
        self._n_run += 1
        result, is_error = await self._run(cell.code)
        text = format_result(result, cell, self.config.result_tags)
        return Step(
            messages=(self._make_observation(text),),
            metrics={"cells": 1, "cell_errors": int(is_error)},
        )

    def _make_observation(self, text: str) -> Message:
        if self.config.inline:
            return Message("inline", text)
        return Message("user", text.lstrip("\n") or "".join(self.config.result_tags))

    async def _run(self, code: str) -> tuple[str, bool]:
        """Run a cell after the earlier ones. Return (text for the policy, True if it failed)."""
        cells = [*self._cells, code]
        request = {"cells": cells, "max_chars": self.config.max_chars}
        # The earlier cells run again first, so the limit grows by the time that they took.
        cpu_s = self.config.timeout_s + self._seconds
        limits = Limits(
            wall_s=WALL_PER_CPU * cpu_s,
            cpu_s=cpu_s,
            memory_mib=self.config.memory_mib,
            output_kib=64 + self.config.max_chars // 16,
        )
        result = await ProgramRunner(self.sandbox).run(
            self._program, json.dumps(request).encode("ascii"), limits
        )
        report = read_report(result)
        if report is None:
            reason = FAILURES.get(result.reason, "it ended the session's process")
            return f"{reason}; {ENDED}", True
        self._cells, self._seconds = cells, result.seconds
        printed, value, error = report
        # The join adds the line breaks.
        texts = [text.removesuffix("\n") for text in (printed, value, error) if text]
        text = ADDRESS.sub("0x...", "\n".join(texts))
        if len(text) > self.config.max_chars:
            text = (
                f"{text[: self.config.max_chars]}\n[cut after {self.config.max_chars} characters]"
            )
        return text, error is not None


def find_cell(text: str, tags: tuple[str, str], *, may_be_open: bool = False) -> Cell | None:
    """Return the first code block of a text; None if it has none.

    Generation stops at the closing tag, whose last token may hold the beginning of what follows.

    Args:
        may_be_open: True to accept a block that ends with the text.
    """
    before_end, closing, lookahead = text.partition(tags[1])
    _, opening, code = before_end.rpartition(tags[0])
    return Cell(code, lookahead) if opening and (closing or may_be_open) else None


def read_report(result: Result) -> tuple[str, str | None, str | None] | None:
    """Return (printed, value, error) as the program reported; None if it was killed.

    A cell can forge its report, but that only changes what its own attempt sees.
    """
    try:
        printed, value, error = json.loads(result.stdout) if result.ok else (None, None, None)
    except (ValueError, TypeError, RecursionError):
        return None
    if not isinstance(printed, str):
        return None
    return printed, *(text if isinstance(text, str) else None for text in (value, error))  # pyright: ignore[reportReturnType]


def format_result(result: str, cell: Cell, tags: tuple[str, str]) -> str:
    """Return a result between its tags; "" for code that has none.

    Code or results of several lines get lines of their own, as in NeMo RL. The text that the
    policy's last token has already written is left out.
    """
    if not result:
        return ""
    start, end = tags
    is_multiline = "\n" in cell.code or "\n" in result
    text = f"\n\n{start}\n{result}\n{end}" if is_multiline else f"{start}{result}{end}"
    return text.removeprefix(cell.lookahead)
