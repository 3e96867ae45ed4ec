"""The reward `format`: the answer consists of tags, as <think>...</think><answer>...</answer>."""

from __future__ import annotations

import re
from typing import Annotated, ClassVar

from pydantic import Field

from ratchet.config.base import Section
from ratchet.rewards.base import AnswerReward
from ratchet.types import Task


class FormatConfig(Section):
    """A reward of 1 if the answer consists of the tags, in order.

    Each must be opened and closed once, with text within.
    """

    builds: ClassVar[str] = "ratchet.rewards.answers.format:Format"

    tags: tuple[Annotated[str, Field(pattern=r"^[A-Za-z][\w-]*$")], ...] = Field(
        ("think", "answer"), min_length=1, description="Names, without brackets."
    )
    opened: bool = Field(False, description="The prompt has already opened the first tag.")
    outside: bool = Field(False, description="Text outside the tags is allowed.")
    share: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="For all tags used rightly in a wrong whole; in parts for some of them.",
    )


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
    """True if the tag is opened and closed once, with text and no other tag between."""
    start = f"<{name}>"
    if found.count(start) != 1 or found.count(f"</{name}>") != 1:
        return False
    at = found.index(start)
    return found[at + 1 : at + 2] == [f"</{name}>"] and bool(texts[at + 1].strip())
