"""Merge inline text into the assistant's turns.

A message of the role "inline" is text that the environment writes into the assistant's open turn,
such as the result of a code block. The assistant then continues in the same turn, so a chat
template sees one message of the assistant: its text, the inline text, and the rest of its text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from ratchet.errors import DataError
from ratchet.types import Message


class Segment(NamedTuple):
    """A part of an assistant's turn."""

    text: str
    is_inline: bool
    """True if the environment wrote it."""


def merge_inline(
    messages: Sequence[Message],
) -> tuple[list[Message], Mapping[int | None, Sequence[Segment]]]:
    """Return the messages with inline text merged into its turns, and the segments of such turns.

    The segments are by the index of the merged message. Raise DataError for inline text that
    follows no message of the assistant.
    """
    merged: list[Message] = []
    segments: dict[int | None, list[Segment]] = {}
    previous_role = ""
    for i, message in enumerate(messages):
        is_inline = message.role == "inline"
        if is_inline and previous_role not in ("assistant", "inline"):
            raise DataError(
                f"message {i} is inline text, and no message of the assistant is before it"
            )
        if is_inline or (previous_role == "inline" and message.role == "assistant"):
            last = len(merged) - 1
            turn = segments.setdefault(last, [Segment(merged[last].text, False)])
            turn.append(Segment(message.text, is_inline))
            text = merged[last].text + message.text
            merged[last] = replace(merged[last], content=text, tool_calls=message.tool_calls)
        else:
            merged.append(message)
        previous_role = message.role
    return merged, segments


def split_segments(answer: str, segments: Sequence[Segment], prefill: str) -> list[str]:
    """Return the rendered text of each segment of a turn.

    The first has the template's text before the turn's own, the last has its end of turn. Raise
    DataError if the template changed the text.

    Args:
        answer: The rendered turn.
        prefill: The beginning of the turn that its prompt already contains.
    """
    texts = [segment.text for segment in segments]
    start = answer.find("".join(texts))
    if start < 0 and prefill and texts[0].startswith(prefill):
        texts[0] = texts[0][len(prefill) :]
        start = answer.find("".join(texts))
    if start < 0:
        raise DataError(
            "the chat template changes the text of a turn that has inline text, so what the "
            "environment wrote can't be told apart: choose another `tokenizer.template`"
        )
    end = start + sum(map(len, texts))
    texts[0] = answer[:start] + texts[0]
    texts[-1] += answer[end:]
    return texts
