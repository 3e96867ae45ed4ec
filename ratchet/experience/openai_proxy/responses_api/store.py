"""Keep responses, so that requests of the Responses API can continue from one by its id."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from ratchet.experience.openai_proxy.answers import write_arguments
from ratchet.experience.openai_proxy.schema import MAX_MESSAGES, ChatMessage
from ratchet.experience.openai_proxy.wire import WireRequest
from ratchet.types import Message

MAX_RESPONSES = 1024
# Limit of all stored responses of a served model, in bytes of JSON text: each response is stored
# with its conversation.
MAX_SERVED_BYTES = 2**26
# The same limit for an attempt. It is small, because many attempts run at once, and agents continue
# from their latest responses.
MAX_ATTEMPT_BYTES = 2**22


class _Conversation(WireRequest):
    """A stored conversation, which is read within the limits of a request."""

    messages: Annotated[list[ChatMessage], Field(max_length=MAX_MESSAGES, fail_fast=True)]


@dataclass(frozen=True)
class StoredResponse:
    """A response and the conversation that ends with it, as JSON text.

    `conversation` lacks the instructions, which apply to one request alone.
    """

    conversation: bytes
    body: bytes

    @classmethod
    def from_values(
        cls, earlier: Sequence[ChatMessage], answer: Message, body: dict[str, Any]
    ) -> StoredResponse:
        """Return a response for the store.

        Args:
            earlier: The messages before the answer, without the instructions.
            answer: The policy's message.
            body: The response in OpenAI's form.
        """
        messages = [*(message.to_message() for message in earlier), answer]
        conversation = {"messages": [_write_message(message) for message in messages]}
        return cls(json.dumps(conversation).encode(), json.dumps(body).encode())

    @property
    def n_bytes(self) -> int:
        return len(self.conversation) + len(self.body)

    def read_messages(self) -> list[ChatMessage]:
        """Return the messages of the conversation. Raises ApiError if there are too many."""
        return _Conversation.read(self.conversation).messages


class ResponseStore:
    """The latest responses of an attempt or of a served model. Older ones are dropped.

    Args:
        max_bytes: Maximum bytes of all responses together. The latest is kept even if it is larger.
        max_responses: Maximum number of responses.
    """

    def __init__(self, max_bytes: int, max_responses: int = MAX_RESPONSES) -> None:
        self.max_responses = max_responses
        self.max_bytes = max_bytes
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self._n_bytes = 0

    def add(self, name: str, response: StoredResponse) -> None:
        """Keep a response under the new id `name`, and drop the oldest beyond the limits."""
        self._responses[name] = response
        self._n_bytes += response.n_bytes
        while len(self._responses) > 1 and (
            len(self._responses) > self.max_responses or self._n_bytes > self.max_bytes
        ):
            _, dropped = self._responses.popitem(last=False)
            self._n_bytes -= dropped.n_bytes

    def get(self, name: str) -> StoredResponse | None:
        """Return the response with the id `name`; None if it was not stored or has been dropped."""
        return self._responses.get(name)


def _write_content(message: Message) -> str | list[dict[str, Any]]:
    if isinstance(message.content, str):
        return message.content
    return [
        {"type": "text", "text": part.value}
        if part.type == "text"
        else {"type": "image_url", "image_url": part.value}
        for part in message.content
    ]


def _write_message(message: Message) -> dict[str, Any]:
    calls = [
        {
            "id": call.id,
            "function": {"name": call.name, "arguments": write_arguments(call.arguments)},
        }
        for call in message.tool_calls
    ]
    return {
        "role": message.role,
        "content": _write_content(message),
        "tool_calls": calls or None,
        "tool_call_id": message.tool_call_id,
    }
