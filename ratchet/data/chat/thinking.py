"""The marks around a model's thinking: <think> and </think>, or [THINK] and [/THINK]."""

from __future__ import annotations

import re

REASONING = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
MARKS = re.compile("|".join(re.escape(mark) for pair in REASONING for mark in pair))
# A mark within a thought would end it. It is escaped by a word joiner (U+2060), which shows nothing
# and is not a character that models write in a mark; a mark that has some gets one more.
JOINER = "\u2060"
UNESCAPED_MARK = re.compile(rf"(?<=<)(?={JOINER}*/?think>)|(?<=\[)(?={JOINER}*/?THINK\])")
ESCAPED_MARK = re.compile(
    rf"(?<=<){JOINER}(?={JOINER}*/?think>)|(?<=\[){JOINER}(?={JOINER}*/?THINK\])"
)


def has_malformed_thinking(text: str, *, cut: bool) -> bool:
    """True unless the tags in a turn's text enclose exactly one thought, at its beginning.

    A turn without tags is well-formed. If a token limit cut the turn, the thinking may still be
    open.

    Args:
        text: The text of the turn without its tool calls. It includes what the chat template writes
            at the beginning of the turn, such as <think>.
        cut: True if a token limit ended the turn.
    """
    marks = MARKS.findall(text)
    if not marks:
        return False
    is_first = text.lstrip().startswith(marks[0])
    closes = any(marks == list(pair) or (cut and marks == [pair[0]]) for pair in REASONING)
    return not (is_first and closes)


def mark_thought(thought: str) -> str:
    """Return a thought between <think> and </think>, from which `split_thinking` reads it back."""
    opening, closing = REASONING[0]
    return f"{opening}{escape_marks(thought)}{closing}"


def escape_marks(thought: str) -> str:
    """Return a thought whose own marks, such as </think>, do not end it."""
    return UNESCAPED_MARK.sub(JOINER, thought)


def split_thinking(text: str) -> tuple[str, str]:
    """Return the thought at the beginning of a turn without its marks, and the text after it.

    A thought that is not closed takes the whole turn. Marks that were escaped are restored.
    """
    for opening, closing in REASONING:
        if text.lstrip().startswith(opening):
            thought, _, answer = text.lstrip().removeprefix(opening).partition(closing)
            return ESCAPED_MARK.sub("", thought), answer.lstrip()
    return "", text
