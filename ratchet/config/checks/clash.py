"""Conflicts between keys of a recipe."""

from __future__ import annotations

from dataclasses import dataclass

Key = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Conflict:
    """A conflict between keys.

    Attributes:
        keys: The keys that can fix it, the likeliest first.
    """

    keys: tuple[Key, ...]
    message: str


def clash(message: str, *keys: str) -> Conflict:
    return Conflict(tuple(tuple(key.split(".")) for key in keys), message)
