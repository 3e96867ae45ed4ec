"""Read conversations in OpenAI's format with tool calls, or in ShareGPT's format.

A message in ShareGPT's format is {"from": "human", "value": ...}.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from ratchet.data.formats.media_columns import join_parts, read_content
from ratchet.data.jsonl import describe_type
from ratchet.errors import DataError
from ratchet.types import Message, Part, Role, ToolCall
from ratchet.utils.safe_read import parse_json

ROLES: Mapping[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "tool": "tool",
}
KNOWN_KEYS = ("role", "from", "content", "value", "tool_calls", "tool_call_id", "name")


def read_messages(value: Any, where: str) -> tuple[Message, ...]:
    """Return the messages of a conversation.

    Raise DataError for content that would be lost or misread.

    Args:
        where: The file, the row and the column, for errors.
    """
    if not isinstance(value, list) or not value:
        actual = "an empty array" if value == [] else describe_type(value)
        raise DataError(
            f'{where} is {actual}, must be an array of messages such as {{"role": "user", '
            f'"content": "..."}}'
        )
    return tuple(
        _read_message(item, f"{where}, message {index}") for index, item in enumerate(value)
    )


def read_tools(value: Any, where: str) -> tuple[Mapping[str, Any], ...]:
    """Return the tools of a conversation: descriptions of functions in OpenAI's format.

    Args:
        value: A list of descriptions, or the list as JSON text, since Arrow can't hold lists of
            different objects. None: no tools.
        where: The file, the row and the column, for errors.
    """
    if isinstance(value, str):
        value = _parse_json_text(value, where) if value.strip() else None
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise DataError(
            f"{where} is {describe_type(value)}, must be an array of the functions that may be "
            "called, or its JSON text"
        )
    for index, tool in enumerate(value):
        function = tool.get("function", tool)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise DataError(
                f'{where}, tool {index} has no name: write {{"type": "function", "function": '
                f'{{"name": ...}}}}'
            )
    return tuple(
        tool if "function" in tool else {"type": "function", "function": tool} for tool in value
    )


def _read_message(item: Any, where: str) -> Message:
    if not isinstance(item, dict):
        raise DataError(
            f'{where} is {describe_type(item)}, must be an object such as {{"role": "user", '
            f'"content": "..."}}'
        )
    unread = next((key for key, value in item.items() if key not in KNOWN_KEYS and value), None)
    if unread is not None:
        raise DataError(
            f"{where} has '{unread}', which would be lost: only {', '.join(KNOWN_KEYS)} are read; "
            f"remove '{unread}'"
        )
    role_name = item.get("role", item.get("from"))
    role = ROLES.get(role_name) if isinstance(role_name, str) else None
    if role is None:
        raise DataError(
            f"{where} has the role {role_name!r:.40}, must be one of "
            f"{', '.join(dict.fromkeys(ROLES.values()))}"
        )
    raw_calls = item.get("tool_calls") or []
    if not isinstance(raw_calls, list):
        raise DataError(
            f"{where} has {describe_type(raw_calls)} as 'tool_calls', must be an array of calls"
        )
    calls = tuple(_read_call(call, index, where) for index, call in enumerate(raw_calls))
    if calls and role != "assistant":
        raise DataError(
            f"{where} has tool_calls, and its role is '{role}': only the assistant calls tools"
        )
    call_id = item.get("tool_call_id")
    return Message(
        role,
        _read_content(item, where, may_be_null=bool(calls)),
        calls,
        call_id if isinstance(call_id, str) else None,
    )


def _read_content(
    item: Mapping[str, Any], where: str, *, may_be_null: bool
) -> str | tuple[Part, ...]:
    """Return the content as text, or as parts if some of them are not text.

    Args:
        may_be_null: True if null stands for empty text, as it does in a message with tool calls.
    """
    content = item.get("content", item.get("value"))
    if content is None and may_be_null:
        return ""
    if not isinstance(content, str | list):
        problem = (
            "has no 'content'"
            if "content" not in item and "value" not in item
            else f"has {describe_type(content)} as 'content'"
        )
        raise DataError(f"{where} {problem}: write it as a string")
    parsed = content if isinstance(content, str) else join_parts(read_content(content, where))
    text = (
        parsed
        if isinstance(parsed, str)
        else "".join(part.value for part in parsed if part.type == "text")
    )
    if any("\ud800" <= c <= "\udfff" for c in text):
        raise DataError(
            f"{where} holds half of a surrogate pair (\\ud800 to \\udfff), which is not text: "
            "remove it"
        )
    return parsed


def _read_call(call: Any, index: int, where: str) -> ToolCall:
    where = f"{where}, tool call {index}"
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise DataError(
            f'{where} names no function: write {{"id": ..., "function": {{"name": ..., '
            f'"arguments": ...}}}}'
        )
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = _parse_json_text(arguments, where) if arguments.strip() else {}
    if not isinstance(arguments, dict):
        raise DataError(
            f"{where} has {describe_type(arguments)} as arguments, must be an object, or its JSON "
            "text"
        )
    call_id = call.get("id")
    return ToolCall(
        call_id if isinstance(call_id, str) and call_id else f"call_{index}",
        function["name"],
        arguments,
    )


def _parse_json_text(text: str, where: str) -> Any:
    try:
        return parse_json(text, parse_constant=_refuse_constant)
    except ValueError as error:
        raise DataError(f"{where}: malformed JSON in a string: {error}") from error


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")
