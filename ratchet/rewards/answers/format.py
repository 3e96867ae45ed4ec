"""An answer consists of tags, as <think>...</think><answer>...</answer>."""

from __future__ import annotations

import re

from ratchet.rewards.base import AnswerReward
from ratchet.rewards.config import FormatConfig
from ratchet.types import Task


class Format(AnswerReward):
    name = "format"
    bounds = (0.0, 1.0)

    def __init__(self, config: FormatConfig) -> None:
        self.config = config
        self._tag = re.compile(rf"(</?(?:{'|'.join(map(re.escape, config.tags))})>)")

    def grade(self, text: str, task: Task) -> float:
        tags = self.config.tags
        if self.config.opened:
            text = f"<{tags[0]}>{text}"
        pieces = self._tag.split(text)  # text, tag, text, tag, ..., text
        found, texts = pieces[1::2], pieces[0::2]
        right = [name for name in tags if _used_once(name, found, texts)]
        in_order = found == [tag for name in tags for tag in (f"<{name}>", f"</{name}>")]
        clean = self.config.outside or not any(piece.strip() for piece in texts[0::2])
        if in_order and clean and len(right) == len(tags):
            return 1.0
        return self.config.share * len(right) / len(tags)


def _used_once(name: str, found: list[str], texts: list[str]) -> bool:
    """Opened and closed once, with text and no other tag between."""
    start = f"<{name}>"
    if found.count(start) != 1 or found.count(f"</{name}>") != 1:
        return False
    at = found.index(start)
    return found[at + 1 : at + 2] == [f"</{name}>"] and bool(texts[at + 1].strip())
