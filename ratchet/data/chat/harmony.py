"""Read and write turns in harmony, the format of gpt-oss: messages with a channel and a recipient.

    <|channel|>analysis<|message|>THOUGHT<|end|>
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{}<|call|>

A turn of the policy is several such messages; the prompt has written the first <|start|>assistant.
The recipient may also stand before the channel, as the chat template of gpt-oss writes it.

Source: the parser and the renderer of OpenAI's package openai-harmony 0.0.8.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from ratchet.data.chat.thinking import mark_thought, split_thinking
from ratchet.data.chat.tool_call_arguments import Call, Tools, read_named_call

START, MESSAGE, CHANNEL, CALL = "<|start|>", "<|message|>", "<|channel|>", "<|call|>"
MARKS = (f"{CHANNEL}commentary", CALL)  # in the chat template, or among the special tokens
END_OF_MESSAGE = re.compile(r"<\|(?:end|call|return)\|>")
RECIPIENT = re.compile(r"(?:^|\s)to=(\S+)")
FUNCTIONS = "functions."  # the beginning of a recipient that is a tool of the environment


class HarmonyMessage(NamedTuple):
    """A message within a turn."""

    channel: str
    """"analysis", "commentary", "final", or "" if the header names none."""
    recipient: str
    """The tool that the message calls; "" for none."""
    text: str
    is_complete: bool = True
    """False if the text ended within the header."""


def is_harmony(template: str) -> bool:
    """True if a chat template writes messages with channels."""
    return MARKS[0] in template


def split_turn(text: str) -> list[HarmonyMessage]:
    """Return the messages of a turn. Text without any header is one message without a channel."""
    if MESSAGE not in text and CHANNEL not in text:
        return [HarmonyMessage("", "", text)]
    return [_read_message(block) for block in text.split(START) if block]


def _read_message(block: str) -> HarmonyMessage:
    header, mark, body = block.partition(MESSAGE)
    role, _, rest = header.partition(CHANNEL)
    words = rest.split("<|constrain|>")[0].split()
    recipient = RECIPIENT.search(role) or RECIPIENT.search(" ".join(words))
    return HarmonyMessage(
        words[0] if words else "",
        "" if recipient is None else recipient[1],
        END_OF_MESSAGE.split(body, maxsplit=1)[0],
        is_complete=bool(mark),
    )


def read_text(text: str) -> str:
    """Return the text of a turn: its thoughts between <think> and </think>, then all else."""
    return _join_texts(split_turn(text))


def read_harmony(text: str, tools: Tools) -> tuple[str, list[Call | None]]:
    """Parse the calls of a turn. Return the text of its other messages, and the calls."""
    messages = split_turn(text)
    calls = [_read_call(message) for message in messages if message.recipient]
    return _join_texts([message for message in messages if not message.recipient]), calls


def _read_call(message: HarmonyMessage) -> Call | None:
    """Return the call, or None if it is malformed or calls a tool that is built into gpt-oss."""
    if not message.is_complete or not message.recipient.startswith(FUNCTIONS):
        return None
    return read_named_call(message.recipient.removeprefix(FUNCTIONS), message.text)


def _join_texts(messages: list[HarmonyMessage]) -> str:
    thoughts = [message.text for message in messages if message.channel == "analysis"]
    answer = "".join(message.text for message in messages if message.channel != "analysis")
    return (mark_thought("\n".join(thoughts)) if thoughts else "") + answer


def move_thoughts(messages: list[dict[str, Any]]) -> None:
    """Move thoughts of the assistant's messages to `thinking`, where gpt-oss's template reads them.

    The template shows thoughts only beside a call and in the last turn, so others are dropped. It
    takes no text beside a call and its thought, so that text is appended to the thought.
    """
    for index, message in enumerate(messages):
        if message["role"] != "assistant" or not isinstance(message["content"], str):
            continue
        thought, message["content"] = split_thinking(message["content"])
        has_calls = bool(message.get("tool_calls"))
        if has_calls and thought and message["content"]:
            thought, message["content"] = f"{thought}\n{message['content']}", ""
        if thought and (has_calls or index == len(messages) - 1):
            message["thinking"] = thought
