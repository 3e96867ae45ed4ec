"""Convert groups and completions to plain values and arrays for checkpoints, and back.

Reading runs no stored code. It creates only the classes of `ratchet.types` listed here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from enum import Enum
from typing import Any

from ratchet import types
from ratchet.errors import CheckpointError

TAG = "is"
STORABLE_TYPES = {
    cls.__name__: cls
    for cls in (
        types.Cancelled,
        types.Completion,
        types.Failed,
        types.Message,
        types.Part,
        types.Scored,
        types.StopReason,
        types.Task,
        types.ToolCall,
        types.Trajectory,
        types.Truncated,
        types.Turn,
        types.Unjudged,
    )
}


def to_plain(value: Any) -> Any:
    """Convert a value to plain values and arrays."""
    name = type(value).__name__
    if name in STORABLE_TYPES and isinstance(value, Enum):
        return {TAG: name, "value": value.value}
    if name in STORABLE_TYPES:
        return {
            TAG: name,
            **{field.name: to_plain(getattr(value, field.name)) for field in fields(value)},
        }
    if isinstance(value, Mapping):
        return {key: to_plain(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(to_plain(item) for item in value)
    return value


def from_plain(value: Any) -> Any:
    """Convert the result of `to_plain` back to the value.

    Raises:
        CheckpointError: A class is not one of `STORABLE_TYPES`, or its fields are wrong.
    """
    if isinstance(value, Mapping) and TAG in value:
        arguments = {key: from_plain(item) for key, item in value.items() if key != TAG}
        try:
            return STORABLE_TYPES[value[TAG]](**arguments)
        except (KeyError, TypeError, ValueError, AssertionError) as error:
            raise CheckpointError(
                f"a stored {value[TAG]!r:.40} can't be read: {error!r}"
            ) from error
    if isinstance(value, Mapping):
        return {key: from_plain(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(from_plain(item) for item in value)
    return value
