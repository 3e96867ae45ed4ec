"""Environments with tools: the policy calls tools, reads their answers, and then answers itself."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar

from pydantic import Field

from ratchet.config.resolve import Slot
from ratchet.config.schema import AnyEnvironment
from ratchet.config.sections import EnvironmentConfig
from ratchet.environments.build import build_environment
from ratchet.environments.tool_use.base import Toolbox, ToolError, Tools, build_tools
from ratchet.environments.tool_use.calculator import calculate, format_value
from ratchet.errors import DataError
from ratchet.protocols import Environment, Step
from ratchet.types import Message, Split, Task, ToolCall


class ToolEnvironmentConfig(EnvironmentConfig):
    """The keys that all environments with tools share."""

    tools: Tools = Field(min_length=1)
    """Tools that the policy may call."""
    system: str = ""
    """System message before each task; empty: none."""
    max_calling_turns: int = Field(8, gt=0)
    """Maximum number of turns with calls; a further call ends the attempt without an answer."""
    timeout_s: float = Field(30.0, gt=0)
    """Wall time of one tool call, in seconds."""
    max_chars: int = Field(4000, gt=0)
    """Maximum characters of a tool's answer; the rest is cut off."""


class ToolUseConfig(ToolEnvironmentConfig):
    """An environment that adds tools to the problems of another environment."""

    builds: ClassVar[str] = "ratchet.environments.tool_use.environment:ToolUse"

    problems: Annotated[AnyEnvironment, Slot("problems")]
    """Single-turn environment with the problems; its reward judges the final message."""

    @property
    def default_reward(self) -> str | Mapping[str, Any]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.problems.default_reward


class ToolEnvironment(Environment):
    """A base class that plays the turns of an episode with tools. A subclass provides the tasks.

    A message without calls is the final answer. It ends the episode, and a reward judges it.
    Copies share the tools, which keep no state of an attempt.
    """

    replayable = True

    def __init__(self, config: ToolEnvironmentConfig) -> None:
        self.settings = config
        self.toolbox = Toolbox(
            build_tools(config.tools), timeout_s=config.timeout_s, max_chars=config.max_chars
        )
        self._n_calling_turns = 0

    def tools(self, task: Task) -> Sequence[Mapping[str, Any]]:
        return self.toolbox.schemas

    def add_system_message(self, task: Task) -> Task:
        """Return the task with the configured system message, if there is one."""
        if not self.settings.system:
            return task
        return replace(task, messages=(Message("system", self.settings.system), *task.messages))

    async def reset(self, task: Task) -> Sequence[Message]:
        self._n_calling_turns = 0
        return task.messages

    async def step(self, message: Message) -> Step:
        """Run the calls of a message. Raises RatchetError if the infrastructure failed."""
        if not message.tool_calls or self._n_calling_turns >= self.settings.max_calling_turns:
            return Step(done=True)
        self._n_calling_turns += 1
        answers, n_errors = await self.toolbox.run_calls(message.tool_calls)
        return Step(
            messages=tuple(answers), metrics={"tool_calls": len(answers), "tool_errors": n_errors}
        )


class ToolUse(ToolEnvironment):
    """An environment that adds tools to the problems of another environment."""

    def __init__(self, config: ToolUseConfig) -> None:
        super().__init__(config)
        self.config = config
        self.problems = build_environment(config.problems)

    def tasks(self, split: Split, *, seed: int, start: int = 0) -> Iterator[Task]:
        return map(self.add_system_message, self.problems.tasks(split, seed=seed, start=start))

    def task_count(self) -> int | None:
        return self.problems.task_count()

    def demonstration(self, task: Task) -> Sequence[Message]:
        """Return an episode that evaluates the prompt's expression with the calculator.

        Raises DataError if there is no calculator, if the prompt is not an expression for it, or if
        its result is not the task's answer.
        """
        if "calculator" not in self.toolbox:
            raise DataError(
                f"task '{task.id}' has no demonstration with tools: `tools` lists no calculator"
            )
        expression, result = find_expression(task)
        call = ToolCall("call_0", "calculator", {"expression": expression})
        return (
            Message("assistant", tool_calls=(call,)),
            Message("tool", result, tool_call_id=call.id),
            Message("assistant", str(task.answer)),
        )


def find_expression(task: Task) -> tuple[str, str]:
    """Return the expression in a task's prompt, and its value, which is the task's answer.

    Raises DataError if the prompt is not an expression for the calculator, or has another value.
    """
    problem = f"task '{task.id}' has no demonstration with tools"
    expression = re.sub(r"\s*=?\s*\??$", "", task.messages[-1].text)
    try:
        result = format_value(calculate(expression))
    except ToolError as error:
        raise DataError(
            f"{problem}: its prompt is not an expression for the calculator: {error}"
        ) from error
    if result != str(task.answer):
        raise DataError(
            f"{problem}: the calculator's result for its prompt is {result}, and its answer is "
            f"{str(task.answer)[:100]!r}"
        )
    return expression, result
