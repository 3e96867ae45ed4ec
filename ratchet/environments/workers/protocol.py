"""The wire format of tasks, messages and steps between the driver and its environment workers: JSON
frames, each after its length.

JSON has fewer types than Python: a value that is not None, a boolean, a number, a string, a list or
a dictionary with string keys is wrapped with its type, so that it arrives unchanged. NumPy scalars
become Python's. A value of any other type is refused.
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
from ratchet.types import Comparison, Judged, Message, Part, Task, ToolCall

HEAD = struct.Struct("!I")  # the length of a frame
MAX_BYTES = 256 * 2**20
TYPES = {made.__name__: made for made in (Comparison, Judged, Message, Part, Step, Task, ToolCall)}
WRAPPED = ""  # the key of a wrapped value's type; a dictionary that has it is wrapped too


def frame(values: Mapping[str, Any]) -> bytes:
    """Return values as a frame. Raises DataError for types that JSON lacks, and above 256 MiB."""
    try:
        text = json.dumps(values).encode("ascii")
    except (TypeError, ValueError) as error:
        raise DataError(f"{error}: it can't be sent to or from a worker process") from None
    if len(text) > MAX_BYTES:
        raise DataError(
            f"{len(text) >> 20} MiB can't be sent to or from a worker process at once, at most "
            f"{MAX_BYTES >> 20}"
        )
    return HEAD.pack(len(text)) + text


def packed(value: Any) -> Any:
    """Return a value as JSON types. Raises DataError for a type that can't be sent."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [packed(item) for item in value]
    if isinstance(value, tuple):
        return {WRAPPED: "tuple", "of": [packed(item) for item in value]}
    if isinstance(value, Mapping):
        if all(type(key) is str and key != WRAPPED for key in value):
            return {key: packed(item) for key, item in value.items()}
        return {
            WRAPPED: "mapping",
            "of": [[packed(key), packed(item)] for key, item in value.items()],
        }
    type_name = type(value).__name__
    if TYPES.get(type_name) is not type(value):
        raise DataError(
            f"{value!r:.80} can't be sent to or from a worker process: of a task, a message and a "
            "step, only None, numbers, "
            f"strings, and lists, tuples and dictionaries of these can travel, not {type_name}"
        )
    return {
        WRAPPED: type_name,
        "of": {field.name: packed(getattr(value, field.name)) for field in fields(value)},
    }


def unpacked(value: Any) -> Any:
    """Return the value that `packed` was called with."""
    if isinstance(value, list):
        return [unpacked(item) for item in value]
    if not isinstance(value, dict):
        return value
    if WRAPPED not in value:
        return {key: unpacked(item) for key, item in value.items()}
    of = value["of"]
    if value[WRAPPED] == "tuple":
        return tuple(unpacked(item) for item in of)
    if value[WRAPPED] == "mapping":
        return {unpacked(key): unpacked(item) for key, item in of}
    return TYPES[value[WRAPPED]](**{name: unpacked(item) for name, item in of.items()})
