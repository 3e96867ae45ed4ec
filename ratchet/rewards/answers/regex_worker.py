"""The function that workers of the reward `regex` call.

The module imports nothing of Ratchet, so that workers start at once.
"""

from __future__ import annotations

import re
from collections import deque


def match(pattern: str, text: str, whole: bool, group: int | str | None) -> str | None:
    """Return the text that the pattern's last match has in `group`; None without a match.

    Return "" if the group took no part in the match. If `group` is None, return the text of the
    first match. If `whole` is true, the match must be the whole `text`.
    """
    matcher = re.compile(pattern)
    if whole:
        match_object = matcher.fullmatch(text)
    elif group is None:
        match_object = matcher.search(text)
    else:
        match_object = next(iter(deque(matcher.finditer(text), maxlen=1)), None)
    return None if match_object is None else match_object[group or 0] or ""
