"""Conflicts between keys of a recipe, as the checks of this package report them."""

from __future__ import annotations

from dataclasses import dataclass

Key = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Conflict:
    """A conflict between keys of a recipe, which becomes an error for the user."""

    keys: tuple[Key, ...]
    """The keys whose change can fix the conflict, the likeliest first. The error names the line of
    the first key that the recipe sets."""
    message: str
    """The text of the error, with the smallest fix."""


def clash(message: str, *keys: str) -> Conflict:
    """Return a conflict between keys of one stage or of the run, with dots (`sampling.top_p`)."""
    return Conflict(tuple(tuple(key.split(".")) for key in keys), message)
