"""Render the prompt of a conversation, and bound the size of texts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ratchet.data.chat.renderer import Renderer, Tools
from ratchet.errors import DataError
from ratchet.experience.openai_proxy.strands import AgentAnswer, AgentPrompt
from ratchet.types import Message

# Maximum of messages times assistant turns in a conversation that extends no answer. A template
# renders all messages before each turn, which takes two seconds at this size.
MAX_RENDERED = 2**19
MAX_IMAGES = 64  # per conversation; each is decoded, and encoded by the model
# Maximum number of characters that a tokenizer's normalisation (such as NFKC) merges into one.
MAX_MERGED_CHARS = 4


def count_max_chars(renderer: Renderer, max_context: int) -> int:
    """Return an upper bound on the characters of a text with `max_context` tokens."""
    return MAX_MERGED_CHARS * renderer.tokenizer.max_token_chars * max_context


def render_prompt(
    renderer: Renderer, messages: Sequence[Message], tools: Tools | None, parent: AgentAnswer | None
) -> AgentPrompt:
    """Return the prompt of a conversation. This runs in a thread and changes no state.

    It continues from the exact tokens of `parent`, unless the template changes them.

    Args:
        parent: The answer that the conversation continues, if any.

    Raises:
        DataError: The conversation can't be rendered, or an image can't be read.
        ConfigError: Tools are offered to a model without a tool-call format.
    """
    n_images = sum(len(message.media) for message in messages)
    if n_images and renderer.processor is None:
        raise DataError("the messages have images, and the model reads only text: leave them out")
    if n_images > MAX_IMAGES:
        raise DataError(f"the messages have {n_images} images: send at most {MAX_IMAGES}")
    if tools is not None:
        renderer.tool_format  # noqa: B018  (the property raises ConfigError)
    if parent is not None:
        *history, reply = parent.messages
        new_messages = messages[len(parent.messages) :]
        sampled = parent.completion.tokens.tolist()
        if renderer.keeps_turn(sampled, new_messages, history=history, reply=reply, tools=tools):
            suffix = renderer.extend(sampled, new_messages, history=history, tools=tools)
            start = len(parent.tokens)
            new_media = tuple(
                placed._replace(start=start + placed.start)
                for placed in renderer.media(suffix, new_messages)
            )
            tokens = np.concatenate([parent.tokens, np.asarray(suffix, dtype=np.int64)])
            return AgentPrompt(tokens, parent, (*parent.media, *new_media))
    turns = sum(message.role == "assistant" for message in messages)
    if turns * len(messages) > MAX_RENDERED:
        raise DataError(
            f"{len(messages)} messages, {turns} of them from the assistant, are too many for a "
            "conversation that extends no answer of this attempt: the product of the two "
            f"numbers may be at most {MAX_RENDERED}. Send fewer messages"
        )
    tokens = np.asarray(renderer.prompt(messages, tools), dtype=np.int64)
    return AgentPrompt(tokens, media=renderer.media(tokens, messages))
