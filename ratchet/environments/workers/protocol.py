"""The wire format of tasks, messages and steps between the driver and its environment workers.

It consists of JSON frames, each after its length. JSON has fewer types than Python. Tuples,
dictionaries with other keys than strings, and the classes in TYPES are wrapped with their type, so
that they arrive unchanged. NumPy scalars become Python's. A value of any other type is refused.
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

HEAD = struct.Struct("!I")  # the length of a frame
MAX_BYTES = 256 * 2**20
TYPES = {
    cls.__name__: cls for cls in (Comparison, LabelledAnswer, Message, Part, Step, Task, ToolCall)
}
# The key of a wrapped value's type. A dictionary with this key is wrapped too.
WRAPPED = ""


def make_frame(values: Mapping[str, Any]) -> bytes:
    """Return values as a frame. Raises DataError for other types than JSON's, and above 256 MiB."""
    try:
        text = json.dumps(values).encode("ascii")
    except (TypeError, ValueError) as error:
        raise DataError(f"{error}: it can't be sent to or from a worker process") from None
    if len(text) > MAX_BYTES:
        raise DataError(
            f"{len(text) >> 20} MiB can't be sent to or from a worker process at once: the limit "
            f"is {MAX_BYTES >> 20} MiB"
        )
    return HEAD.pack(len(text)) + text


def pack(value: Any) -> Any:
    """Return a value as JSON types. Raises DataError for a type that can't be sent."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [pack(item) for item in value]
    if isinstance(value, tuple):
        return {WRAPPED: "tuple", "content": [pack(item) for item in value]}
    if isinstance(value, Mapping):
        if all(type(key) is str and key != WRAPPED for key in value):
            return {key: pack(item) for key, item in value.items()}
        return {
            WRAPPED: "mapping",
            "content": [[pack(key), pack(item)] for key, item in value.items()],
        }
    type_name = type(value).__name__
    if TYPES.get(type_name) is not type(value):
        raise DataError(
            f"{value!r:.80} of type {type_name} can't be sent to or from a worker process: tasks, "
            "messages and steps may contain only None, numbers, strings, and lists, tuples and "
            "dictionaries of these"
        )
    return {
        WRAPPED: type_name,
        "content": {field.name: pack(getattr(value, field.name)) for field in fields(value)},
    }


def unpack(value: Any) -> Any:
    """Return the value that `pack` was called with."""
    if isinstance(value, list):
        return [unpack(item) for item in value]
    if not isinstance(value, dict):
        return value
    if WRAPPED not in value:
        return {key: unpack(item) for key, item in value.items()}
    content = value["content"]
    if value[WRAPPED] == "tuple":
        return tuple(unpack(item) for item in content)
    if value[WRAPPED] == "mapping":
        return {unpack(key): unpack(item) for key, item in content}
    return TYPES[value[WRAPPED]](**{name: unpack(item) for name, item in content.items()})
