"""Keep responses, which later requests of the Responses API may continue from by id."""

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
# Bytes of JSON text: the conversation and the body of each response.
MAX_SERVED_BYTES = 2**26
# An agent goes on from its latest responses, and many attempts run at once.
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
        messages = [*(message.to_message() for message in earlier), answer]
        conversation = {"messages": [_write_message(message) for message in messages]}
        return cls(json.dumps(conversation).encode(), json.dumps(body).encode())

    @property
    def n_bytes(self) -> int:
        return len(self.conversation) + len(self.body)

    def read_messages(self) -> list[ChatMessage]:
        """Return the messages of the conversation. Raises ApiError if they are too many."""
        return _Conversation.read(self.conversation).messages


class ResponseStore:
    """The latest responses of an attempt or of a served model. Older ones are dropped.

    Args:
        max_bytes: Maximum number of bytes of all responses. The latest one may exceed it.
        max_responses: Maximum number of responses.
    """

    def __init__(self, max_bytes: int, max_responses: int = MAX_RESPONSES) -> None:
        self.max_responses = max_responses
        self.max_bytes = max_bytes
        self._responses: OrderedDict[str, StoredResponse] = OrderedDict()
        self._n_bytes = 0

    def add(self, name: str, response: StoredResponse) -> None:
        """Keep a response under a new id, and drop the oldest ones that exceed the limits."""
        self._responses[name] = response
        self._n_bytes += response.n_bytes
        while len(self._responses) > 1 and (
            len(self._responses) > self.max_responses or self._n_bytes > self.max_bytes
        ):
            _, dropped = self._responses.popitem(last=False)
            self._n_bytes -= dropped.n_bytes

    def get(self, name: str) -> StoredResponse | None:
        """Return a response, or None if it was not stored or has been dropped."""
        return self._responses.get(name)


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
        "content": message.text,
        "tool_calls": calls or None,
        "tool_call_id": message.tool_call_id,
    }
