"""Convert tasks, messages, steps and trajectories to plain values and back.

Environment workers send them, and checkpoints hold them. Plain values are those of JSON. Values of
other types, such as arrays, stay as they are, for a serializer that supports or refuses them.

JSON has fewer types than Python. Tuples, dictionaries with other keys than strings, and the classes
in CODED_TYPES are wrapped with their type, so that they arrive unchanged. Decoding runs no stored
code, and creates objects of these types only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from enum import Enum
from typing import Any

from ratchet import types
from ratchet.allowed_tokens import AllowedTokens
from ratchet.errors import CheckpointError
from ratchet.protocols import Step

CODED_TYPES: Mapping[str, type[Any]] = {
    cls.__name__: cls
    for cls in (
        AllowedTokens,
        Step,
        types.Cancelled,
        types.Comparison,
        types.Completion,
        types.Failed,
        types.LabelledAnswer,
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
# The key of a wrapped value's type. A dictionary with this key is wrapped too.
TYPE_KEY = "is"
CONTENT_KEY = "content"
UNCHANGED_TYPES = frozenset((type(None), bool, int, float, str))


def to_plain(value: Any) -> Any:
    """Convert a value to plain values."""
    kind = type(value)
    if kind in UNCHANGED_TYPES:
        return value
    if isinstance(value, list):
        return [to_plain(item) for item in value]
    if isinstance(value, tuple):
        return _wrap("tuple", [to_plain(item) for item in value])
    if isinstance(value, Mapping):
        if all(type(key) is str and key != TYPE_KEY for key in value):
            return {key: to_plain(item) for key, item in value.items()}
        return _wrap("mapping", [[to_plain(key), to_plain(item)] for key, item in value.items()])
    if CODED_TYPES.get(kind.__name__) is not kind:
        return value
    if isinstance(value, Enum):
        return _wrap(kind.__name__, value.value)
    return _wrap(
        kind.__name__,
        {field.name: to_plain(getattr(value, field.name)) for field in fields(value)},
    )


def from_plain(value: Any) -> Any:
    """Convert the result of `to_plain` back to the value.

    Raises CheckpointError if a wrapped value has another form than `to_plain` gave it.
    """
    if isinstance(value, list):
        return [from_plain(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    if TYPE_KEY not in value:
        return {key: from_plain(item) for key, item in value.items()}
    name = value[TYPE_KEY]
    try:
        content = value[CONTENT_KEY]
        if name == "tuple":
            return tuple(from_plain(item) for item in content)
        if name == "mapping":
            return {from_plain(key): from_plain(item) for key, item in content}
        if issubclass(CODED_TYPES[name], Enum):
            return CODED_TYPES[name](content)
        return CODED_TYPES[name](**{key: from_plain(item) for key, item in content.items()})
    except (AttributeError, KeyError, TypeError, ValueError, AssertionError) as error:
        raise CheckpointError(
            f"a stored {name!r:.40} can't be read ({error!r}): another version of Ratchet may have "
            "written it"
        ) from error


def _wrap(name: str, content: Any) -> dict[str, Any]:
    return {TYPE_KEY: name, CONTENT_KEY: content}
