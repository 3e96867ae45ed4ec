"""Shorten lists for messages."""

from __future__ import annotations

from collections.abc import Iterable


def summarize_names(names: Iterable[str], most: int = 5, separator: str = ", ") -> str:
    """Return a text with the first names, and with the number of all others.

    most: The largest number of names in the text.
    """
    all_names = list(names)
    more = f" and {len(all_names) - most:,} more" if len(all_names) > most else ""
    return separator.join(all_names[:most]) + more
