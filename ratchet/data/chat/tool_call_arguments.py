"""Read the arguments of tool calls: JSON values, or plain text converted by the tool's schema."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

Call = tuple[str, dict[str, Any]]  # name, arguments
Tools = Sequence[Mapping[str, Any]]

# Maximum nesting of arguments. No tool needs more, and recursive code would fail on more.
MAX_DEPTH = 32


def _refuse_constant(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def parse_values(text: str, separators: str = " \t\r\n") -> list[Any] | None:
    """Return the JSON values in `text`, with any characters of `separators` between them.

    Return None if there is no value, any other text, or a value that is nested too deeply.
    """
    values: list[Any] = []
    position = 0
    try:
        while True:
            while position < len(text) and text[position] in separators:
                position += 1
            if position == len(text):
                break
            value, position = _DECODER.raw_decode(text, position)
            values.append(value)
        _require_encodable(values)
    except (ValueError, RecursionError):
        return None
    return values if values and not is_too_deep(values) else None


def _require_encodable(values: object) -> None:
    """Raise ValueError for infinite numbers (1e999), and for unpaired UTF-16 surrogates.

    JSON can spell a lone surrogate, but no tokenizer can write it.
    """
    json.dumps(values, ensure_ascii=False, allow_nan=False).encode()


def is_too_deep(value: object) -> bool:
    """True if a JSON value is nested more than `MAX_DEPTH` levels deep."""
    level: list[object] = [value]
    for _ in range(MAX_DEPTH + 1):
        next_level: list[object] = []
        for item in level:
            next_level += (
                item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()
            )
        level = next_level
    return bool(level)


def read_call(value: object) -> Call | None:
    """Return the call in a JSON value, or None if it is malformed.

    Its key `arguments` or `parameters` may be an object, or the JSON text of one.
    """
    if not isinstance(value, dict):
        return None
    name = value.get("name")
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        arguments = parse_single_value(arguments)
    return (
        (name, arguments)
        if isinstance(name, str) and name and isinstance(arguments, dict)
        else None
    )


def parse_single_value(text: str) -> Any:
    """Return the one JSON value in `text`; None if there is not exactly one."""
    values = parse_values(text)
    return values[0] if values is not None and len(values) == 1 else None


def read_named_call(name: str, arguments: str) -> Call | None:
    """Return the call with this name and JSON text of arguments, or None if it is malformed."""
    return read_call({"name": name.strip(), "arguments": arguments})


def find_parameter_types(tools: Tools, name: str) -> dict[str, Any]:
    """Return the JSON type of each parameter of the tool `name`; {} for an unknown tool."""
    for tool in tools:
        function = tool.get("function", tool)
        if function.get("name") == name:
            properties = (function.get("parameters") or {}).get("properties") or {}
            return {
                key: schema.get("type")
                for key, schema in properties.items()
                if isinstance(schema, Mapping)
            }
    return {}


def convert_argument(value: str, json_type: object) -> Any:
    """Return an argument: its text for a string parameter, else the JSON value in its text.

    Text that is not one JSON value stays text, and the tool reports the mistake.
    """
    if json_type == "string":
        return value
    values = parse_values(value)
    return values[0] if values is not None and len(values) == 1 else value
