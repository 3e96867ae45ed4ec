"""Convert groups and completions to plain values and arrays for checkpoints, and back.

Reading executes nothing: only the classes of `ratchet.types` listed here can be named.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from enum import Enum
from typing import Any

from ratchet import types
from ratchet.errors import CheckpointError

TAG = "is"
STORED = {
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


def stored(value: Any) -> Any:
    """Return a value as plain values and arrays."""
    name = type(value).__name__
    if name in STORED and isinstance(value, Enum):
        return {TAG: name, "value": value.value}
    if name in STORED:
        return {
            TAG: name,
            **{field.name: stored(getattr(value, field.name)) for field in fields(value)},
        }
    if isinstance(value, Mapping):
        return {key: stored(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(stored(item) for item in value)
    return value


def restored(value: Any) -> Any:
    """Return the value that plain values describe.

    Raises:
        CheckpointError: A class is not one of `STORED`, or its fields are wrong.
    """
    if isinstance(value, Mapping) and TAG in value:
        arguments = {key: restored(item) for key, item in value.items() if key != TAG}
        try:
            return STORED[value[TAG]](**arguments)
        except (KeyError, TypeError, ValueError, AssertionError) as error:
            raise CheckpointError(
                f"a stored {value[TAG]!r:.40} can't be read: {error!r}"
            ) from error
    if isinstance(value, Mapping):
        return {key: restored(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(restored(item) for item in value)
    return value
