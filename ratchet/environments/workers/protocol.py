"""The wire format of tasks, messages and steps between the driver and its environment workers.

Each frame is JSON text, preceded by its length. JSON has fewer types than Python. Tuples,
dictionaries with other keys than strings, and the classes in SENDABLE_TYPES are wrapped with their
type, so that they arrive unchanged. NumPy scalars become Python numbers. A value of any other type
is refused.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np

from ratchet.errors import DataError
from ratchet.protocols import Step
from ratchet.types import Comparison, LabelledAnswer, Message, Part, Task, ToolCall

LENGTH_HEADER = struct.Struct("!I")  # the length of a frame
MAX_FRAME_BYTES = 256 * 2**20
SENDABLE_TYPES = {
    cls.__name__: cls for cls in (Comparison, LabelledAnswer, Message, Part, Step, Task, ToolCall)
}
# The key of a wrapped value's type. A dictionary with this key is wrapped too.
TYPE_KEY = ""


def make_frame(values: Mapping[str, Any]) -> bytes:
    """Return values as a frame. Raises DataError for types that JSON lacks, and above 256 MiB."""
    try:
        text = json.dumps(values).encode("ascii")
    except (TypeError, ValueError) as error:
        raise DataError(f"{error}: it can't be sent to or from a worker process") from None
    if len(text) > MAX_FRAME_BYTES:
        raise DataError(
            f"{len(text) >> 20} MiB can't be sent to or from a worker process at once: the limit "
            f"is {MAX_FRAME_BYTES >> 20} MiB"
        )
    return LENGTH_HEADER.pack(len(text)) + text


def pack(value: Any) -> Any:
    """Return a value as JSON types. Raises DataError for a type that can't be sent."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [pack(item) for item in value]
    if isinstance(value, tuple):
        return {TYPE_KEY: "tuple", "content": [pack(item) for item in value]}
    if isinstance(value, Mapping):
        if all(type(key) is str and key != TYPE_KEY for key in value):
            return {key: pack(item) for key, item in value.items()}
        return {
            TYPE_KEY: "mapping",
            "content": [[pack(key), pack(item)] for key, item in value.items()],
        }
    type_name = type(value).__name__
    if SENDABLE_TYPES.get(type_name) is not type(value):
        raise DataError(
            f"{value!r:.80} of type {type_name} can't be sent to or from a worker process: tasks, "
            "messages and steps may contain only None, numbers, strings, and lists, tuples and "
            "dictionaries of these"
        )
    return {
        TYPE_KEY: type_name,
        "content": {field.name: pack(getattr(value, field.name)) for field in fields(value)},
    }


def unpack(value: Any) -> Any:
    """Return the value that `pack` was called with."""
    if isinstance(value, list):
        return [unpack(item) for item in value]
    if not isinstance(value, dict):
        return value
    if TYPE_KEY not in value:
        return {key: unpack(item) for key, item in value.items()}
    content = value["content"]
    if value[TYPE_KEY] == "tuple":
        return tuple(unpack(item) for item in content)
    if value[TYPE_KEY] == "mapping":
        return {unpack(key): unpack(item) for key, item in content}
    return SENDABLE_TYPES[value[TYPE_KEY]](**{name: unpack(item) for name, item in content.items()})
