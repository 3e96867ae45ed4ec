"""Anthropic's Messages API: read its requests as chat requests, and write replies in its form.

A request has the same prompt tokens as the same conversation in chat completions: text blocks are
joined, a `tool_result` is a message of the tool, and thinking stands before the answer within
<think> marks, as the chat templates of reasoning models read and write it. An answer's reasoning
stays in its text. So when a client sends the answer back, the new prompt begins with the tokens
that were recorded before.

Sources: Anthropic's API reference, and the types of its Python client 2.14.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self, cast

from pydantic import Field, PlainValidator, field_validator, model_validator

from ratchet.data.formats.media_columns import join_parts
from ratchet.experience.openai_proxy.answers import (
    ChatReply,
    format_named_event,
    get_finish_reason,
    write_arguments,
)
from ratchet.experience.openai_proxy.content import (
    Content,
    join_text_parts,
    make_image,
    read_text_part,
)
from ratchet.experience.openai_proxy.schema import (
    MAX_MESSAGES,
    MAX_TOOLS,
    ChatCall,
    ChatMessage,
    ChatRequest,
    ChatTool,
    EchoedModel,
    NamedTool,
    ToolChoice,
    make_chat_tool,
    write_thinking,
)
from ratchet.experience.openai_proxy.structured import FlatJsonSchemaFormat, nest_format
from ratchet.experience.openai_proxy.wire import ApiError, SamplingFields, Stop, WireModel
from ratchet.types import Part

PATH = "/v1/messages"
ERROR_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}


# --- requests


class _Block(EchoedModel):
    cache_control: dict[str, Any] | None = None  # no effect: caching changes no token


class _Text(_Block):
    type: Literal["text"]
    text: str
    citations: Annotated[list[Any], Field(max_length=0)] | None = None


class _ImageSource(WireModel):
    type: Literal["base64"]
    media_type: str
    data: str


class _Image(_Block):
    type: Literal["image"]
    source: _ImageSource

    @model_validator(mode="after")
    def _check_format(self) -> Self:
        self.to_part()
        return self

    def to_part(self) -> Part:
        """Return the image. Raises ValueError for a format that is not supported."""
        return make_image(self.source.media_type, self.source.data)


class _Thinking(_Block):
    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class _ToolUse(_Block):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    caller: dict[str, Any] | None = None


def _read_result(content: Any) -> Content:
    """Return the content of a tool's result as text, or as parts if it has images."""
    if not isinstance(content, list):
        return join_text_parts(content, ("text",))
    return join_parts(
        [
            _Image.model_validate(block).to_part()
            if isinstance(block, dict) and block.get("type") == "image"
            else Part("text", read_text_part(block, ("text",), "a result takes text and image"))
            for block in content
        ]
    )


class _ToolResult(_Block):
    """The result of a call. `is_error` has no effect: the text should say what went wrong."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Annotated[Content, PlainValidator(_read_result)] = ""
    is_error: bool | None = None


Block = Annotated[_Text | _Image | _Thinking | _ToolUse | _ToolResult, Field(discriminator="type")]
BLOCK_TYPES = ("text", "image", "thinking", "tool_use", "tool_result")
BLOCKS_OF_ROLES = {
    "system": ("text", "image"),
    "user": ("text", "image", "tool_result"),
    "assistant": ("text", "thinking", "tool_use"),
}


class MessageParam(EchoedModel):
    """A message of a conversation, in blocks."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[list[Block], Field(fail_fast=True)]

    @field_validator("content", mode="before")
    @classmethod
    def _list_blocks(cls, content: Any) -> Any:
        if isinstance(content, str):
            return [{"type": "text", "text": content}]
        if not isinstance(content, list):
            raise ValueError("must be text, or a list of blocks")
        for block in content:
            kind = block.get("type") if isinstance(block, dict) else type(block).__name__
            if kind not in BLOCK_TYPES:
                raise ValueError(
                    f"a block of type '{kind!s:.40}' can't be read: this endpoint takes "
                    f"{', '.join(BLOCK_TYPES)}"
                )
        return content

    def to_chat(self) -> Iterator[ChatMessage]:
        """Yield the messages of chat completions with the same content.

        Raises:
            ApiError: 400 for a block that this role can't have.
        """
        for block in self.content:
            if block.type not in BLOCKS_OF_ROLES[self.role]:
                raise ApiError(
                    400,
                    f"messages: a message of the {self.role} can't hold a block of type "
                    f"'{block.type}'",
                    param="messages",
                    code="invalid_value",
                )
        if self.role == "assistant":
            yield self._join_blocks()
            return
        parts: list[Part] = []
        for block in self.content:
            if isinstance(block, _Text):
                parts.append(Part("text", block.text))
            elif isinstance(block, _Image):
                parts.append(block.to_part())
            elif isinstance(block, _ToolResult):
                if parts:
                    yield ChatMessage(role=self.role, content=join_parts(parts))
                    parts = []
                yield ChatMessage(
                    role="tool", content=block.content, tool_call_id=block.tool_use_id
                )
        if parts or not self.content:
            yield ChatMessage(role=self.role, content=join_parts(parts))

    def _join_blocks(self) -> ChatMessage:
        text = ""
        calls: list[ChatCall] = []
        for block in self.content:
            if isinstance(block, _Text):
                text += block.text
            elif isinstance(block, _Thinking):
                text += write_thinking(block.thinking)
            elif isinstance(block, _ToolUse):
                calls.append(ChatCall.from_values(block.id, block.name, block.input))
        return ChatMessage(role="assistant", content=text, tool_calls=calls or None)


class _Tool(EchoedModel):
    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    defer_loading: Literal[False] | None = None
    input_examples: Annotated[list[Any], Field(max_length=0)] | None = None
    # These change no token.
    cache_control: dict[str, Any] | None = None
    eager_input_streaming: bool | None = None

    def to_chat(self) -> ChatTool:
        return make_chat_tool(self.name, self.description, self.input_schema, strict=self.strict)


class _ToolChoice(WireModel):
    type: Literal["auto", "none", "any", "tool"]
    name: str | None = None
    disable_parallel_tool_use: Literal[False] | None = None

    @model_validator(mode="after")
    def _check_name(self) -> Self:
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("give a name with type 'tool', and with no other type")
        return self

    def to_chat(self) -> ToolChoice:
        if self.type == "tool" and self.name is not None:
            return NamedTool.from_name(self.name)
        return "required" if self.type == "any" else cast(ToolChoice, self.type)


class _NoThinking(WireModel):
    type: Literal["disabled"]


class _OutputConfig(WireModel):
    effort: None = None
    format: FlatJsonSchemaFormat | None = None


class _ContextManagement(WireModel):
    edits: Annotated[list[Any], Field(max_length=0)] | None = None


class CountTokensRequest(SamplingFields):
    """A request to count the tokens of a conversation."""

    messages: Annotated[
        list[MessageParam], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    ]
    system: str = ""
    tools: Annotated[list[_Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: _ToolChoice | None = None
    stop_sequences: Annotated[list[Stop], Field(max_length=4)] | None = None
    stream: bool | None = None
    output_config: _OutputConfig | None = None
    output_format: FlatJsonSchemaFormat | None = None  # the name before `output_config.format`
    # These would change tokens in ways that are not supported, so only their defaults pass.
    thinking: _NoThinking | None = None
    context_management: _ContextManagement | None = None
    mcp_servers: Annotated[list[Any], Field(max_length=0)] | None = None
    container: None = None
    # These are accepted without effect, because they change no token.
    metadata: dict[str, Any] | None = None
    cache_control: dict[str, Any] | None = None
    service_tier: str | None = None

    @field_validator("system", mode="before")
    @classmethod
    def _join_text_blocks(cls, system: Any) -> Any:
        return join_text_parts(system, ("text",))

    def to_chat(self) -> ChatRequest:
        """Return the request for a chat completion.

        Raises:
            ApiError: 400 for a conversation that can't be answered.
        """
        if self.messages[-1].role == "assistant":
            raise ApiError(
                400,
                "messages: the last one is the assistant's, but an answer can't be continued; end "
                "with a message of the user",
                param="messages",
                code="invalid_value",
            )
        output_config = self.output_config or _OutputConfig()
        if self.output_format is not None and output_config.format is not None:
            raise ApiError(
                400,
                "output_format: output_config.format gives a format too; send one of them",
                param="output_format",
                code="invalid_value",
            )
        system = [ChatMessage(role="system", content=self.system)] if self.system else []
        tools = None if self.tools is None else [tool.to_chat() for tool in self.tools]
        return ChatRequest.from_fields(
            self,
            messages=[*system, *(chat for message in self.messages for chat in message.to_chat())],
            tools=tools,
            tool_choice=None if self.tool_choice is None else self.tool_choice.to_chat(),
            response_format=nest_format(self.output_format or output_config.format),
            stop=[*(self.stop or ()), *(self.stop_sequences or ())] or None,
            stream=self.stream,
        )


class MessagesRequest(CountTokensRequest):
    """A request for a message: the fields of `CountTokensRequest`, and the length limit."""

    max_tokens: Annotated[int, Field(ge=1)] | None = None


# --- replies


@dataclass(frozen=True, slots=True)
class MessagesFormat:
    """The form of a reply as an Anthropic message."""

    request: ChatRequest
    name: str
    """Id of the message."""

    def write_body(self, reply: ChatReply) -> dict[str, Any]:
        """Return the response body."""
        return {
            **self._write_header(),
            "content": _write_blocks(reply),
            **_describe_end(reply),
            "usage": _count_usage(reply),
        }

    def write_opening(self) -> Iterator[str]:
        """Yield the start of the message. Its token counts are 0 here; `write_end` has them."""
        message = {
            **self._write_header(),
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": 0, "output_tokens": 0},
        }
        yield format_named_event({"type": "message_start", "message": message})

    def write_content(self, reply: ChatReply) -> Iterator[str]:
        """Yield the events of each block, with its content in one delta."""
        for index, block in enumerate(_write_blocks(reply)):
            if block["type"] == "text":
                start = {**block, "text": ""}
                delta = {"type": "text_delta", "text": block["text"]}
            else:
                start = {**block, "input": {}}
                delta = {
                    "type": "input_json_delta",
                    "partial_json": write_arguments(block["input"]),
                }
            for event in (
                {"type": "content_block_start", "index": index, "content_block": start},
                {"type": "content_block_delta", "index": index, "delta": delta},
                {"type": "content_block_stop", "index": index},
            ):
                yield format_named_event(event)

    def write_end(self, reply: ChatReply) -> Iterator[str]:
        """Yield the stop reason and the token counts, then the end of the message."""
        event = {
            "type": "message_delta",
            "delta": _describe_end(reply),
            "usage": _count_usage(reply),
        }
        yield format_named_event(event)
        yield format_named_event({"type": "message_stop"})

    def write_error(self, error: ApiError) -> Iterator[str]:
        """Yield the error."""
        yield format_named_event(describe_error(error))

    def keep(self, reply: ChatReply) -> None:
        """Do nothing: no request of this API refers to an earlier message."""

    def _write_header(self) -> dict[str, Any]:
        return {
            "id": self.name,
            "type": "message",
            "role": "assistant",
            "model": self.request.model,
        }


def describe_error(error: ApiError) -> dict[str, Any]:
    """Return the JSON of an error in Anthropic's form."""
    default = "invalid_request_error" if error.status < 500 else "api_error"
    kind = ERROR_KINDS.get(error.status, default)
    return {"type": "error", "error": {"type": kind, "message": str(error)}}


def _write_blocks(reply: ChatReply) -> list[dict[str, Any]]:
    """Return an answer's blocks: its text and its calls, or one empty text block."""
    message = reply.message
    calls = [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": dict(call.arguments)}
        for call in message.tool_calls
    ]
    text = [{"type": "text", "text": message.text}] if message.text or not calls else []
    return [*text, *calls]


def _describe_end(reply: ChatReply) -> dict[str, str | None]:
    if reply.stop_string is not None and not reply.message.tool_calls:
        return {"stop_reason": "stop_sequence", "stop_sequence": reply.stop_string}
    reason = get_finish_reason(reply.completion, reply.message)
    return {"stop_reason": STOP_REASONS[reason], "stop_sequence": None}


def _count_usage(reply: ChatReply) -> dict[str, int]:
    return {
        "input_tokens": len(reply.prompt),
        "output_tokens": len(reply.completion.tokens),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
    }
