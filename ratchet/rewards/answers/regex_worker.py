"""What the workers of the reward `regex` call. It imports nothing else, so that they start at
once."""

from __future__ import annotations

import re
from collections import deque


def match(pattern: str, text: str, whole: bool, group: int | str | None) -> str | None:
    """Of the last match: the group, "" where it took no part, the whole where None is asked for.
    None without a match."""
    matcher = re.compile(pattern)
    if whole:
        found = matcher.fullmatch(text)
    elif group is None:
        found = matcher.search(text)
    else:
        found = next(iter(deque(matcher.finditer(text), maxlen=1)), None)
    return None if found is None else found[group or 0] or ""
