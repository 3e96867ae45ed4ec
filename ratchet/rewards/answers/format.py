"""The reward `format`: the answer consists of tags, as <think>...</think><answer>...</answer>."""

from __future__ import annotations

import re
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from ratchet.config.base import Section
from ratchet.rewards.base import AnswerReward, list_policy_messages
from ratchet.types import Task, Trajectory, Truncated


class FormatConfig(Section):
    """A reward of 1 if the answer consists of the tags, in order.

    Each tag must be opened and closed once, with text within.
    """

    builds: ClassVar[str] = "ratchet.rewards.answers.format:Format"

    tags: tuple[Annotated[str, Field(pattern=r"^[A-Za-z][\w-]*$")], ...] = Field(
        ("think", "answer"), min_length=1
    )
    """Names of the tags, without brackets."""
    opened: bool = False
    """True if the prompt has already opened the first tag."""
    outside: bool | Literal["after"] = False
    """True to allow text outside the tags. after: text must follow the last tag, must differ from
    the text in this tag, and may stand nowhere else outside the tags; a turn with a tool call needs
    no such text."""
    turns: Literal["last", "all"] = "last"
    """last: the last message is judged; all: each message of the policy, and the worst one
    counts."""
    share: float = Field(0.0, ge=0, lt=1)
    """Reward of an answer that uses all tags correctly but is otherwise malformed. With only some
    correct tags, it is multiplied by their share of all tags."""


class Format(AnswerReward):
    name = "format"
    bounds = (0.0, 1.0)

    def __init__(self, config: FormatConfig) -> None:
        self.config = config
        self._tag_pattern = re.compile(rf"(</?(?:{'|'.join(map(re.escape, config.tags))})>)")

    def judge(self, trajectory: Trajectory, task: Task) -> float:
        messages = list_policy_messages(trajectory)
        if isinstance(trajectory.outcome, Truncated):
            return 0.0
        judged = messages if self.config.turns == "all" else messages[-1:]
        return min(self._grade(message.text, bool(message.tool_calls)) for message in judged)

    def grade(self, text: str, task: Task) -> float:
        return self._grade(text, has_calls=False)

    def _grade(self, text: str, has_calls: bool) -> float:
        tags = self.config.tags
        if self.config.opened:
            text = f"<{tags[0]}>{text}"
        pieces = self._tag_pattern.split(text)  # text, tag, text, tag, ..., text
        written_tags, texts = pieces[1::2], pieces[0::2]
        correct_tags = [name for name in tags if _is_used_once(name, written_tags, texts)]
        is_in_order = written_tags == [tag for name in tags for tag in (f"<{name}>", f"</{name}>")]
        # If the tags are in order, the texts alternate: outside the tags, inside a tag, ...
        outer_texts = [piece.strip() for piece in texts[0::2]]
        if self.config.outside == "after":
            *outer_texts, answer = outer_texts
            is_answered = has_calls or bool(answer)
            is_copied = bool(answer) and answer in (piece.strip() for piece in texts[-2:-1])
            is_clean = is_answered and not is_copied and not any(outer_texts)
        else:
            is_clean = self.config.outside or not any(outer_texts)
        if is_in_order and is_clean and len(correct_tags) == len(tags):
            return 1.0
        return self.config.share * len(correct_tags) / len(tags)


def _is_used_once(name: str, written_tags: list[str], texts: list[str]) -> bool:
    """True if the tag is opened and closed once, with text and no other tag between."""
    start = f"<{name}>"
    if written_tags.count(start) != 1 or written_tags.count(f"</{name}>") != 1:
        return False
    index = written_tags.index(start)
    return written_tags[index + 1 : index + 2] == [f"</{name}>"] and bool(texts[index + 1].strip())
