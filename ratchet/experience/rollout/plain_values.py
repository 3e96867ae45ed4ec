"""Groups and completions as plain values and arrays, which a checkpoint can hold, and back. Nothing
that is read can execute: the classes that it may name are those of `ratchet.types` listed here."""

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
    """Arrays and plain values are themselves."""
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
    """Raises CheckpointError for a class that is none of those."""
    if isinstance(value, Mapping) and TAG in value:
        given = {key: restored(item) for key, item in value.items() if key != TAG}
        try:
            return STORED[value[TAG]](**given)
        except (KeyError, TypeError, ValueError, AssertionError) as error:
            raise CheckpointError(
                f"a stored {value[TAG]!r:.40} can't be read: {error!r}"
            ) from error
    if isinstance(value, Mapping):
        return {key: restored(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(restored(item) for item in value)
    return value
