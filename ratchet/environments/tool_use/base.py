"""Define tools, and run the tool calls of a policy.

An error of the policy (an unknown tool, wrong arguments, an invalid expression) or of a tool
becomes the answer to the call, and the policy may try again. An error of the infrastructure (a
failed sandbox, a lost server) is a RatchetError and fails the attempt.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Protocol, runtime_checkable

from pydantic import SerializeAsAny

from ratchet.config.base import Section
from ratchet.config.resolve import Slot, build
from ratchet.data.formats.media import embed, is_pillow_image
from ratchet.errors import ConfigError, RatchetError
from ratchet.rewards.deadline import Deadline
from ratchet.rewards.user_threads import call_user_function
from ratchet.types import Message, Part, ToolCall
from ratchet.utils.user_code import leave_when_cancelled


class ToolConfig(Section):
    """The base class of tool sections. `builds` names a function that returns one or more tools."""


Tools = Annotated[tuple[SerializeAsAny[Section], ...], Slot("tool", is_list=True)]


PYTHON_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "number": (int, float),
    "integer": (int,),
    "boolean": (bool,),
    "array": (list, tuple),
    "object": (Mapping,),
    "null": (type(None),),
}


class ToolError(Exception):
    """An error of a tool call, in words for the policy."""


class ToolUnavailable(RatchetError):
    """An error of the infrastructure behind a tool. The attempt fails, and is not judged."""


@runtime_checkable
class Tool(Protocol):
    """A tool that the policy can call.

    `parameters` is the JSON schema of an object. `call` gets the arguments by name, and returns the
    answer (see `read_answer`). It may be async.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]

    def call(self, **arguments: Any) -> Any: ...


@dataclass(frozen=True)
class ToolAnswer:
    """The answer to a tool call, for the policy: text, or parts with images."""

    content: str | tuple[Part, ...]
    is_error: bool = False


class Toolbox:
    """A set of tools, and the limits of their calls.

    Args:
        tools: The tools. Their names must differ.
        timeout_s: Time limit of one call, in wall-clock seconds.
        max_chars: Maximum number of characters of one text; the rest is cut off.
    """

    def __init__(
        self, tools: Sequence[Tool], *, timeout_s: float = 30.0, max_chars: int = 4000
    ) -> None:
        """Raise ConfigError if two tools share a name."""
        self._tools = {tool.name: tool for tool in tools}
        self.timeout_s, self.max_chars = timeout_s, max_chars
        names = [tool.name for tool in tools]
        repeated = next((name for name in names if names.count(name) > 1), None)
        if repeated is not None:
            raise ConfigError(f"two tools are called '{repeated}': leave one out")

    @property
    def schemas(self) -> tuple[Mapping[str, Any], ...]:
        """The descriptions of the tools in OpenAI's format."""
        return tuple(
            make_tool_schema(tool.name, tool.description, tool.parameters)
            for tool in self._tools.values()
        )

    def __contains__(self, name: str) -> bool:
        return name in self._tools

    async def run_calls(self, calls: Sequence[ToolCall]) -> tuple[list[Message], int]:
        """Run the calls of one turn. Return a message for each call, and the number of errors.

        Calls run one after the other, because a later one may depend on an earlier one.
        """
        messages: list[Message] = []
        n_errors = 0
        for call in calls:
            answer = await self.run_call(call)
            messages.append(Message("tool", answer.content, tool_call_id=call.id))
            n_errors += answer.is_error
        return messages, n_errors

    async def run_call(self, call: ToolCall) -> ToolAnswer:
        """Run a call, and return its answer. Raises RatchetError if the infrastructure failed."""
        try:
            tool = self._tools.get(call.name)
            if tool is None:
                raise ToolError(describe_unknown_tool(call.name, self._tools))
            check_arguments(tool.parameters, call.arguments)
            content = read_answer(await self._run(tool, call.arguments))
            if isinstance(content, str):
                return ToolAnswer(self._truncate(content))
            return ToolAnswer(tuple(map(self._truncate_part, content)))
        except ToolError as error:
            return ToolAnswer(self._truncate(f"Error: {error}"), is_error=True)

    async def _run(self, tool: Tool, arguments: Mapping[str, Any]) -> Any:
        limit = Deadline(self.timeout_s)
        try:
            async with limit:
                return await leave_when_cancelled(call_user_function(tool.call, **arguments))
        except (RatchetError, ToolError):
            raise
        # A tool is user code and may raise any exception. The policy reads the exception's text and
        # may continue.
        except Exception as error:
            if isinstance(error, TimeoutError) and limit.expired():
                message = f"{tool.name} gave no answer within {self.timeout_s:g} s"
                raise ToolError(message) from None
            raise ToolError(f"{type(error).__name__}: {error}") from error

    def _truncate_part(self, part: Part) -> Part:
        return Part("text", self._truncate(part.value)) if part.type == "text" else part

    def _truncate(self, text: str) -> str:
        return (
            text
            if len(text) <= self.max_chars
            else f"{text[: self.max_chars]}\n[cut after {self.max_chars} characters]"
        )


def make_tool_schema(
    name: str, description: str | None, parameters: Mapping[str, Any] | None
) -> Mapping[str, Any]:
    """Return the description of a tool in OpenAI's format.

    `parameters` is the JSON schema of an object; None or {}: the tool has no parameters.
    """
    function = {
        "name": name,
        "description": description or "",
        "parameters": parameters or {"type": "object", "properties": {}},
    }
    return {"type": "function", "function": function}


def describe_unknown_tool(name: str, names: Iterable[str]) -> str:
    """Return the error of a call of the tool `name`, which is not among the offered `names`."""
    return f"there is no tool '{name}'; there are {', '.join(names) or 'none'}"


def read_answer(value: Any) -> str | tuple[Part, ...]:
    """Convert the value that a tool returned to the content of a message.

    A `Part`, an image of Pillow, and a list or tuple with one of these become parts, in order.
    Anything else becomes text.
    """
    items = value if isinstance(value, list | tuple) else (value,)
    if not any(isinstance(item, Part) or is_pillow_image(item) for item in items):
        return str(value)
    return tuple(
        item
        if isinstance(item, Part)
        else embed(item)
        if is_pillow_image(item)
        else Part("text", str(item))
        for item in items
    )


def check_arguments(parameters: Mapping[str, Any], arguments: Mapping[str, Any]) -> None:
    """Raise ToolError for arguments that violate a JSON schema's names or types.

    Only the outer level of the schema is checked.
    """
    properties = parameters.get("properties", {})
    missing = [name for name in parameters.get("required", ()) if name not in arguments]
    unknown = [name for name in arguments if name not in properties]
    if missing:
        raise ToolError(
            f"the argument '{missing[0]}' is missing; the tool takes "
            f"{', '.join(properties) or 'none'}"
        )
    if unknown and not parameters.get("additionalProperties", False):
        raise ToolError(
            f"there is no argument '{unknown[0]}'; the tool takes {', '.join(properties) or 'none'}"
        )
    for name, value in arguments.items():
        schema = properties.get(name, {})
        expected = schema.get("type")
        if value is None and schema.get("nullable"):
            continue
        if (
            isinstance(expected, str)
            and expected in PYTHON_TYPES
            and not _has_type(value, expected)
        ):
            raise ToolError(f"the argument '{name}' must be of type {expected}, not {value!r:.80}")


def _has_type(value: Any, expected: str) -> bool:
    """True if a value has a JSON type. True and False are not numbers."""
    is_wrong_boolean = isinstance(value, bool) and expected != "boolean"
    return isinstance(value, PYTHON_TYPES[expected]) and not is_wrong_boolean


def build_tools(sections: Sequence[Section]) -> list[Tool]:
    """Build the tools of sections. Raises ConfigError if a section builds something else."""
    tools: list[Tool] = []
    for section in sections:
        section_tools = build(section)
        for tool in section_tools if isinstance(section_tools, list | tuple) else (section_tools,):
            if not isinstance(tool, Tool):
                raise ConfigError(
                    f"{tool!r:.80} is not a tool: it needs name, description, parameters and "
                    "call, or to be a plain function"
                )
            if inspect.isgeneratorfunction(tool.call) or inspect.isasyncgenfunction(tool.call):
                raise ConfigError(
                    f"the tool {tool.name} yields its answer. Return it, in one piece"
                )
            tools.append(tool)
    return tools
