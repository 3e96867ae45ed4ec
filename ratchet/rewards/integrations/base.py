"""Base classes and conversions for reward functions of other libraries."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import field_validator

from ratchet.config.base import Section
from ratchet.errors import ConfigError, DataError
from ratchet.rewards.base import PerTrajectory, copy_task
from ratchet.types import (
    READ_FROM,
    TEMPLATE_VARIABLES,
    Message,
    Part,
    Task,
    Trajectory,
    is_finite_number,
)
from ratchet.utils.user_code import get_qualified_name
from ratchet.utils.user_imports import import_object


class LibraryRewardConfig(Section):
    """The base class of sections that name a reward function written for another library."""

    function: str
    """The reward function: my_pkg.module:name, or path/file.py:name."""

    @field_validator("function")
    @classmethod
    def _check_function(cls, function: str) -> str:
        try:
            target = import_object(function)
        except ConfigError as error:
            raise ValueError(str(error)) from error
        if not callable(target):
            raise ValueError(f"'{function}' is not a function")
        return function

    @property
    def metric_name(self) -> str:
        """Return the reward's name in metrics: the function's name."""
        return self.function.rpartition(":")[2]


class LibraryReward(PerTrajectory):
    """The base class of rewards that call a function of another library for each attempt."""

    def __init__(self, config: LibraryRewardConfig) -> None:
        self.name = config.metric_name
        self.path = config.function
        self.function = import_object(config.function)

    @property
    def label(self) -> str:
        return self.path


def describe_location(function: Callable[..., Any]) -> str:
    """Return the name of a function, with its file and line if they are known."""
    unwrapped: Any = inspect.unwrap(function)
    definition = unwrapped if hasattr(unwrapped, "__code__") else type(unwrapped).__call__
    code = getattr(definition, "__code__", None)  # a function written in C has none
    name = (get_qualified_name(unwrapped) or type(unwrapped).__name__).rpartition(".")[2]
    return name if code is None else f"{name} ({code.co_filename}, line {code.co_firstlineno})"


def read_number(value: Any, function: Callable[..., Any]) -> float:
    """Return a reward as a float. Raises DataError unless it is a finite number.

    Scalars of torch and numpy, and tensors with one element, are numbers too.
    """
    number = _find_finite(value)
    if number is None:
        raise DataError(
            f"{describe_location(function)} returned {value!r:.200} as a reward, it must be a "
            "finite number"
        )
    return number


def read_metrics(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the values that can be logged: finite numbers, and tensors with one element."""
    numbers = {str(name): _find_finite(value) for name, value in values.items()}
    return {name: number for name, number in numbers.items() if number is not None}


def average_metrics(logged: Mapping[str, Sequence[Any]]) -> dict[str, float]:
    """Return the mean of the values under each name that can be logged, as in `read_metrics`."""
    numbers = {
        str(name): [number for value in values if (number := _find_finite(value)) is not None]
        for name, values in logged.items()
    }
    return {name: sum(values) / len(values) for name, values in numbers.items() if values}


def _find_finite(value: Any) -> float | None:
    """Return a finite number, or that of a tensor with one element, as a float; None otherwise."""
    try:
        number = value.item() if hasattr(value, "item") else value
    except Exception:  # a tensor or array with several elements, or without storage
        return None
    return float(number) if is_finite_number(number) else None


def read_columns(task: Task) -> dict[str, Any]:
    """Return copies of the columns of a task's row, which a function may change in place.

    `answer` is the task's if the row has no such column.
    """
    task = copy_task(task)
    columns = {
        name: value
        for name, value in task.meta.items()
        if name not in (READ_FROM, TEMPLATE_VARIABLES)
    }
    if task.answer is not None:
        columns.setdefault("answer", task.answer)
    return columns


def split_messages(trajectory: Trajectory) -> tuple[list[Message], list[Message]]:
    """Return the messages of the prompt, and those from the policy's first message on.

    Raises DataError if the policy wrote nothing.
    """
    messages = list(trajectory.messages)
    n_turns = int(trajectory.metrics.get("turns", 0)) or len(trajectory.turns) or 1
    replies = [i for i, message in enumerate(messages) if message.role == "assistant"]
    if len(replies) < n_turns:
        raise DataError("the trajectory has no assistant message to judge")
    return messages[: replies[-n_turns]], messages[replies[-n_turns] :]


def encode_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages as dictionaries with `role` and `content`, and OpenAI's tool calls."""
    encoded: list[dict[str, Any]] = []
    names = {call.id: call.name for message in messages for call in message.tool_calls}
    for message in messages:
        entry: dict[str, Any] = {"role": message.role, "content": _encode_content(message.content)}
        if message.tool_calls:
            entry["tool_calls"] = [
                {
                    "type": "function",
                    "function": {"name": call.name, "arguments": dict(call.arguments)},
                }
                for call in message.tool_calls
            ]
        if message.tool_call_id is not None and message.tool_call_id in names:
            entry["name"] = names[message.tool_call_id]
        encoded.append(entry)
    return encoded


def _encode_content(content: str | tuple[Part, ...]) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return content
    return [{"type": part.type, part.type: part.value} for part in content]
