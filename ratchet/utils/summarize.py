"""Shorten lists for messages."""

from __future__ import annotations

from collections.abc import Iterable


def summarize_names(names: Iterable[str], max_names: int = 5, separator: str = ", ") -> str:
    """Return a text with the first names, and with the number of all others.

    max_names: Maximum number of names in the text.
    """
    all_names = list(names)
    n_omitted = max(0, len(all_names) - max_names)
    ending = f" and {n_omitted:,} more" if n_omitted else ""
    return separator.join(all_names[:max_names]) + ending
