"""Write responses in the form of OpenAI's Responses API: whole, or as typed events.

Sources: OpenAI's API reference, and the types and the stream reader of its Python client 3.57.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from typing import Any

from ratchet.experience.openai_proxy.answers import (
    ChatReply,
    format_named_event,
    write_arguments,
)
from ratchet.experience.openai_proxy.responses_api.request import ResponsesRequest
from ratchet.experience.openai_proxy.responses_api.store import ResponseStore, StoredResponse
from ratchet.experience.openai_proxy.schema import ChatMessage
from ratchet.experience.openai_proxy.wire import ApiError


class ResponsesFormat:
    """The form of a reply as a response of the Responses API.

    Args:
        request: The request that is answered.
        conversation: The messages before the answer, without the instructions.
        name: The id of the response.
        store: Store to which `keep` adds the response.
    """

    def __init__(
        self,
        request: ResponsesRequest,
        conversation: Sequence[ChatMessage],
        name: str,
        store: ResponseStore,
    ) -> None:
        self.request = request
        self.conversation = conversation
        self.name = name
        self.store = store
        self._created_at = int(time.time())
        self._n_events = 0
        tools = [tool.model_dump(exclude_none=True) for tool in request.tools or ()]
        self._echo = _drop_constants(
            {
                "instructions": request.instructions,
                "metadata": request.metadata or {},
                "temperature": request.temperature,
                "tools": [{"strict": False, **tool} for tool in tools],
                "top_p": request.top_p,
                "user": request.user,
            }
        )

    def write_body(self, reply: ChatReply) -> dict[str, Any]:
        """Return the response body."""
        is_whole = reply.completion.stop.finished
        status = "completed" if is_whole else "incomplete"
        return {
            **self._write_response(status),
            "incomplete_details": None if is_whole else {"reason": "max_output_tokens"},
            "output": self._write_items(reply, status),
            "usage": _count_usage(reply),
        }

    def write_opening(self) -> Iterator[str]:
        """Yield the start of the response, which has no output yet."""
        for kind in ("response.created", "response.in_progress"):
            yield self._write_event(kind, response=self._write_response("in_progress"))

    def write_content(self, reply: ChatReply) -> Iterator[str]:
        """Yield the events of each output item, with its content in one delta."""
        status = "completed" if reply.completion.stop.finished else "incomplete"
        for index, item in enumerate(self._write_items(reply, status)):
            is_message = item["type"] == "message"
            opening = {"content": []} if is_message else {"arguments": ""}
            added = {**item, "status": "in_progress", **opening}
            yield self._write_event("response.output_item.added", output_index=index, item=added)
            position = {"item_id": item["id"], "output_index": index}
            yield from (
                self._write_text(position, item["content"][0])
                if is_message
                else self._write_arguments(position, item)
            )
            yield self._write_event("response.output_item.done", output_index=index, item=item)

    def write_end(self, reply: ChatReply) -> Iterator[str]:
        """Yield the whole response."""
        body = self.write_body(reply)
        yield self._write_event(f"response.{body['status']}", response=body)

    def write_error(self, error: ApiError) -> Iterator[str]:
        """Yield the failed response."""
        code = "server_error" if error.status >= 500 else error.code or "invalid_prompt"
        body = {
            **self._write_response("failed"),
            "error": {"code": code, "message": str(error)},
        }
        yield self._write_event("response.failed", response=body)

    def keep(self, reply: ChatReply) -> None:
        """Store the response, unless the request forbids it."""
        if self.request.stores:
            response = StoredResponse.from_values(
                self.conversation, reply.message, self.write_body(reply)
            )
            self.store.add(self.name, response)

    def _write_text(self, item_position: dict[str, Any], part: dict[str, Any]) -> Iterator[str]:
        position = {**item_position, "content_index": 0}
        empty_part = {**part, "text": "", "logprobs": []}
        text, logprobs = part["text"], part["logprobs"]
        yield self._write_event("response.content_part.added", **position, part=empty_part)
        yield self._write_event(
            "response.output_text.delta", **position, delta=text, logprobs=logprobs
        )
        yield self._write_event(
            "response.output_text.done", **position, text=text, logprobs=logprobs
        )
        yield self._write_event("response.content_part.done", **position, part=part)

    def _write_arguments(self, position: dict[str, Any], item: dict[str, Any]) -> Iterator[str]:
        kind = "response.function_call_arguments"
        arguments = item["arguments"]
        yield self._write_event(f"{kind}.delta", **position, delta=arguments)
        yield self._write_event(f"{kind}.done", **position, name=item["name"], arguments=arguments)

    def _write_event(self, kind: str, **fields: Any) -> str:
        event = {"type": kind, "sequence_number": self._n_events, **fields}
        self._n_events += 1
        return format_named_event(event)

    def _write_items(self, reply: ChatReply, status: str) -> list[dict[str, Any]]:
        """Return an answer's items: its text and its calls, or one empty text."""
        message, suffix = reply.message, self.name.removeprefix("resp")
        part = {
            "type": "output_text",
            "text": message.text,
            "annotations": [],
            "logprobs": reply.logprobs or [],
        }
        text = {
            "id": f"msg{suffix}",
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": [part],
        }
        calls = [
            {
                "id": f"fc{suffix}_{index}",
                "type": "function_call",
                "status": status,
                "call_id": call.id,
                "name": call.name,
                "arguments": write_arguments(call.arguments),
            }
            for index, call in enumerate(message.tool_calls)
        ]
        return [*([text] if message.text or not calls else []), *calls]

    def _write_response(self, status: str) -> dict[str, Any]:
        """Return a response with this status, but without output, usage and error."""
        request = self.request
        return {
            **self._echo,
            "id": self.name,
            "object": "response",
            "created_at": self._created_at,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "max_output_tokens": request.max_output_tokens,
            "model": request.model,
            "output": [],
            "parallel_tool_calls": True,
            "previous_response_id": request.previous_response_id,
            "reasoning": {"effort": None, "summary": None},
            "store": request.stores,
            "text": {"format": _write_format(request)},
            "tool_choice": _write_tool_choice(request),
            "truncation": "disabled",
            "usage": None,
        }


def _write_format(request: ResponsesRequest) -> dict[str, Any]:
    text_format = None if request.text is None else request.text.format
    if text_format is None:
        return {"type": "text"}
    return _drop_constants(text_format.model_dump(by_alias=True, exclude_none=True))


def _write_tool_choice(request: ResponsesRequest) -> Any:
    choice = request.tool_choice or "auto"
    return choice if isinstance(choice, str) else choice.model_dump()


def _drop_constants(fields: dict[str, Any]) -> dict[str, Any]:
    """Return fields of a request without NaN and Infinity, which are not JSON."""
    return json.loads(json.dumps(fields), parse_constant=lambda constant: None)


def _count_usage(reply: ChatReply) -> dict[str, Any]:
    n_prompt_tokens = len(reply.prompt)
    n_sampled_tokens = len(reply.completion.tokens)
    return {
        "input_tokens": n_prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": n_sampled_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": n_prompt_tokens + n_sampled_tokens,
    }
