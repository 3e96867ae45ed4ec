"""Read requests of OpenAI's Responses API as chat requests.

A request has the same prompt tokens as the same conversation in chat completions: a message of
the assistant and the function calls after it are one message, a `function_call_output` is a message
of the tool, and reasoning stands before the answer within <think> marks.

Sources: OpenAI's API reference, and the types of its Python client 3.57.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PlainValidator, field_validator, model_validator

from ratchet.experience.openai_proxy.content import (
    Content,
    check_image_role,
    join_text_parts,
    read_content,
)
from ratchet.experience.openai_proxy.schema import (
    MAX_MESSAGES,
    MAX_TOOLS,
    MAX_TOP_LOGPROBS,
    Arguments,
    ChatCall,
    ChatMessage,
    ChatRequest,
    ChatTool,
    EchoedModel,
    Metadata,
    NamedTool,
    make_chat_tool,
    write_thinking,
)
from ratchet.experience.openai_proxy.structured import FlatFormat, nest_format
from ratchet.experience.openai_proxy.wire import SamplingFields, WireModel

ITEM_TYPES = ("message", "function_call", "function_call_output", "reasoning")
TEXT_TYPES = ("input_text", "output_text", "text")
LOGPROBS = "message.output_text.logprobs"  # a value of `include`


class _Item(EchoedModel):
    # Fields of output items, which a client keeps when it sends an earlier response's items.
    id: str | None = None
    status: str | None = None


class _MessageItem(_Item):
    type: Literal["message"]
    role: Literal["user", "assistant", "system", "developer"]
    content: Annotated[Content, PlainValidator(partial(read_content, kinds=TEXT_TYPES))] = ""
    phase: str | None = None

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else ""

    @model_validator(mode="after")
    def _check_image_role(self) -> Self:
        check_image_role(self.role, self.content)
        return self


class _CallItem(_Item):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: Arguments
    caller: dict[str, Any] | None = None


class _OutputItem(_Item):
    type: Literal["function_call_output"]
    call_id: str
    output: Annotated[Content, PlainValidator(partial(read_content, kinds=TEXT_TYPES))]


class _ReasoningItem(_Item):
    """Reasoning. Its text is read, or its summary if it has no text."""

    type: Literal["reasoning"]
    content: str = ""
    summary: str = ""
    encrypted_content: None = None

    @property
    def text(self) -> str:
        return self.content or self.summary

    @field_validator("content", "summary", mode="before")
    @classmethod
    def _join_text_parts(cls, content: Any) -> Any:
        return join_text_parts(content, ("reasoning_text", "summary_text", "text"))


Item = Annotated[
    _MessageItem | _CallItem | _OutputItem | _ReasoningItem, Field(discriminator="type")
]

# The items that together make one message of the assistant.
_TurnItem = _MessageItem | _CallItem | _ReasoningItem


class _FunctionTool(EchoedModel):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: Literal[False] | None = None

    def to_chat(self) -> ChatTool:
        return make_chat_tool(self.name, self.description, self.parameters, strict=self.strict)


class _NamedTool(WireModel):
    type: Literal["function"]
    name: str


class _TextConfig(WireModel):
    format: FlatFormat | None = None
    verbosity: Literal["medium"] | None = None


class _Reasoning(WireModel):
    effort: None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponsesRequest(SamplingFields):
    """A request for a response."""

    input: Annotated[list[Item], Field(max_length=MAX_MESSAGES, fail_fast=True)]
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: Annotated[list[_FunctionTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["auto", "none", "required"] | _NamedTool | None = None
    parallel_tool_calls: Literal[True] | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    include: list[str] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    store: bool | None = None
    stream: bool | None = None
    metadata: Metadata | None = None
    # These would change tokens in ways that are not supported, so only values without effect pass.
    text: _TextConfig | None = None
    reasoning: _Reasoning | None = None
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    conversation: None = None
    prompt: None = None
    context_management: Annotated[list[Any], Field(max_length=0)] | None = None
    # These are accepted without effect, because they change no token.
    stream_options: dict[str, Any] | None = None
    max_tool_calls: int | None = None  # it counts calls of OpenAI's own tools
    user: str | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None

    @field_validator("input", mode="before")
    @classmethod
    def _list_items(cls, value: Any) -> Any:
        """Return the items, each with a type: clients may leave out the type of a message."""
        if isinstance(value, str):
            return [{"type": "message", "role": "user", "content": value}]
        if not isinstance(value, list):
            raise ValueError("must be text, or a list of items")
        items = []
        for item in value:
            is_object = isinstance(item, dict)
            kind = item.get("type", "message") if is_object else type(item).__name__
            if kind not in ITEM_TYPES:
                raise ValueError(
                    f"an item of type '{kind!s:.40}' can't be read: this endpoint takes "
                    f"{', '.join(ITEM_TYPES)}"
                )
            items.append({**item, "type": kind})
        return items

    @field_validator("tools", mode="before")
    @classmethod
    def _refuse_hosted_tools(cls, tools: Any) -> Any:
        for tool in tools if isinstance(tools, list) else ():
            kind = tool.get("type") if isinstance(tool, dict) else type(tool).__name__
            if kind != "function":
                raise ValueError(
                    f"a tool of type '{kind!s:.40}' can't be offered: this endpoint takes "
                    "functions, which the client runs"
                )
        return tools

    @property
    def stores(self) -> bool:
        """True if later requests may continue from the response."""
        return self.store is not False

    def list_messages(self) -> list[ChatMessage]:
        """Return the messages of `input`."""
        messages: list[ChatMessage] = []
        turn: list[_TurnItem] = []
        for item in self.input:
            if turn and not _continues(turn, item):
                messages.append(_join_turn(turn))
                turn = []
            if isinstance(item, _OutputItem):
                messages.append(
                    ChatMessage(role="tool", content=item.output, tool_call_id=item.call_id)
                )
            elif isinstance(item, _MessageItem) and item.role != "assistant":
                messages.append(ChatMessage(role=item.role, content=item.content))
            elif not isinstance(item, _ReasoningItem) or item.text:
                turn.append(item)
        return [*messages, _join_turn(turn)] if turn else messages

    def to_chat(self, conversation: Sequence[ChatMessage]) -> ChatRequest:
        """Return the request for a chat completion.

        Args:
            conversation: The messages so far, those of an earlier response included. They lack the
                instructions.

        Raises:
            ApiError: 400 for a conversation that can't be answered.
        """
        system = (
            [ChatMessage(role="system", content=self.instructions)] if self.instructions else []
        )
        choice = self.tool_choice
        limits = [limit for limit in (self.max_tokens, self.max_output_tokens) if limit is not None]
        return ChatRequest.from_fields(
            self,
            messages=[*system, *conversation],
            tools=None if self.tools is None else [tool.to_chat() for tool in self.tools],
            tool_choice=NamedTool.from_name(choice.name)
            if isinstance(choice, _NamedTool)
            else choice,
            response_format=nest_format(None if self.text is None else self.text.format),
            max_completion_tokens=min(limits, default=None),
            logprobs=LOGPROBS in (self.include or ()) or self.top_logprobs is not None or None,
            top_logprobs=self.top_logprobs,
            stream=self.stream,
        )


def _continues(turn: Sequence[_TurnItem], item: _Item) -> bool:
    """True if `item` belongs to the same message of the assistant as the items of `turn`.

    A function call always belongs to it. Text or reasoning belongs to it only directly after
    reasoning.
    """
    if isinstance(item, _CallItem):
        return True
    is_assistant = isinstance(item, _ReasoningItem) or (
        isinstance(item, _MessageItem) and item.role == "assistant"
    )
    return is_assistant and isinstance(turn[-1], _ReasoningItem)


def _join_turn(turn: Sequence[_TurnItem]) -> ChatMessage:
    """Return the message of the assistant that the items of `turn` make."""
    reasoning = "".join(item.text for item in turn if isinstance(item, _ReasoningItem))
    text = "".join(item.text for item in turn if isinstance(item, _MessageItem))
    calls = [
        ChatCall.from_values(item.call_id, item.name, item.arguments)
        for item in turn
        if isinstance(item, _CallItem)
    ]
    return ChatMessage(
        role="assistant", content=write_thinking(reasoning) + text, tool_calls=calls or None
    )
