"""Read requests of the OpenAI chat API.

Sources: the API reference of OpenAI's chat completions, the fields of its Python client, and those
that vLLM adds (`return_token_ids`, `return_tokens_as_token_ids`, `stop_token_ids`).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic_core import from_json

from ratchet.data.chat.thinking import escape_marks
from ratchet.data.chat.tool_call_grammar import CallRules
from ratchet.experience.openai_proxy.content import Content, check_image_role, read_content
from ratchet.experience.openai_proxy.structured import ResponseFormat, read_format
from ratchet.experience.openai_proxy.wire import (
    JsonValueBudget,
    SamplingFields,
    WireModel,
    explain_first_error,
)
from ratchet.types import Message, ToolCall

# Variables of a chat template that the conversation sets.
CONVERSATION_VARIABLES = ("messages", "tools", "add_generation_prompt", "bos_token", "eos_token")
MAX_MESSAGES = 2048  # per request, as in OpenAI's API
MAX_TOOLS = 128  # per request, as in OpenAI's API
MAX_METADATA = 16  # entries per request
MAX_TOP_LOGPROBS = 20  # as in OpenAI's API


def parse_arguments(text: Any, info: ValidationInfo) -> Any:
    """Parse the arguments of a call, which are JSON text inside JSON."""
    if isinstance(text, str) and isinstance(info.context, JsonValueBudget):
        info.context.take(text.encode())
    try:
        # This parser limits the nesting depth.
        arguments = from_json(text or "{}") if isinstance(text, str) else None
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        raise ValueError("must be the text of a JSON object")
    return arguments


Arguments = Annotated[dict[str, Any], BeforeValidator(parse_arguments)]


class _Function(WireModel):
    name: str
    arguments: Arguments


class ChatCall(WireModel):
    """A tool call in a message of the assistant."""

    id: str
    type: Literal["function"] = "function"
    function: _Function

    @classmethod
    def from_values(cls, id: str, name: str, arguments: dict[str, Any]) -> ChatCall:
        """Return a call with arguments that are parsed already."""
        function = _Function.model_construct(name=name, arguments=arguments)
        return cls(id=id, function=function)


class EchoedModel(WireModel):
    """A part of a conversation, which a client may send back with unknown fields.

    Unknown fields must be null.
    """

    model_config = ConfigDict(extra="allow", strict=True)

    @model_validator(mode="after")
    def _refuse_unknown_fields(self) -> Self:
        for name, value in (self.model_extra or {}).items():
            if value is not None:
                raise ValueError(f"the field '{name:.40}' of {self._describe()} is not known")
        return self

    def _describe(self) -> str:
        # Messages have no `type`.
        return f"a part of type '{getattr(self, 'type', 'message')!s:.40}'"


class ChatMessage(EchoedModel):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[Content, PlainValidator(partial(read_content, kinds=("text",)))] = ""
    tool_calls: Annotated[list[ChatCall], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    # Fields of the client's message objects, present when it sends them back.
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None

    @model_validator(mode="after")
    def _check_image_role(self) -> Self:
        check_image_role(self.role, self.content)
        return self

    def _describe(self) -> str:
        return "a message"

    def to_message(self) -> Message:
        calls = tuple(
            ToolCall(call.id, call.function.name, call.function.arguments)
            for call in self.tool_calls or ()
        )
        return Message(
            "system" if self.role == "developer" else self.role,
            self.content,
            calls,
            self.tool_call_id,
        )


def write_thinking(thinking: str) -> str:
    """Return reasoning in the tags with which reasoning models write it before an answer."""
    return f"<think>\n{escape_marks(thinking)}\n</think>\n\n" if thinking else ""


class _FunctionSchema(WireModel):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChatTool(WireModel):
    """A tool that the policy may call."""

    type: Literal["function"]
    function: _FunctionSchema


def make_chat_tool(
    name: str,
    description: str | None,
    parameters: dict[str, Any] | None,
    *,
    strict: bool | None = None,
) -> ChatTool:
    """Return a tool of another API as one of chat completions."""
    schema = _FunctionSchema(
        name=name, description=description, parameters=parameters, strict=strict
    )
    return ChatTool(type="function", function=schema)


class StreamOptions(WireModel):
    """Options of a streamed answer."""

    include_usage: bool = False


class _FunctionName(WireModel):
    name: str


class NamedTool(WireModel):
    """The choice of a tool that must be called."""

    type: Literal["function"]
    function: _FunctionName

    @classmethod
    def from_name(cls, name: str) -> NamedTool:
        return cls(type="function", function=_FunctionName(name=name))


ToolChoice = Literal["auto", "none", "required"] | NamedTool


def _check_entry_count(metadata: Any) -> Any:
    """Refuse too many entries with a single error, which takes less time than one per entry."""
    if isinstance(metadata, dict) and len(metadata) > MAX_METADATA:
        raise ValueError(f"has {len(metadata)} entries: give {MAX_METADATA} at most")
    return metadata


def _check_variables(variables: dict[str, Any]) -> dict[str, Any]:
    """Refuse variables that the conversation itself gives the chat template."""
    for name in CONVERSATION_VARIABLES:
        if name in variables:
            raise ValueError(f"'{name}' comes from the request itself")
    return variables


Metadata = Annotated[dict[str, str], BeforeValidator(_check_entry_count)]


class ChatRequest(SamplingFields):
    """A validated request for a chat completion."""

    messages: Annotated[
        list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    ]
    tools: Annotated[list[ChatTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: Literal[True] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    return_token_ids: bool | None = None
    """Return the ids of the prompt and of the answer too."""
    return_tokens_as_token_ids: bool | None = None
    """Name tokens in `logprobs` "token_id:N", not by their text."""
    skip_special_tokens: Literal[True] | None = None
    chat_template_kwargs: Annotated[dict[str, Any], AfterValidator(_check_variables)] | None = None
    """Variables of the chat template, which hold for this request."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    # These are accepted without effect, because they change no token.
    user: str | None = None
    metadata: Metadata | None = None
    store: bool | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None

    @classmethod
    def from_fields(cls, fields: SamplingFields, **others: Any) -> ChatRequest:
        """Return the request of another API as one for a chat completion.

        Args:
            fields: The request, for its model and its sampling parameters.
            others: Further fields.

        Raises:
            ApiError: 400 for invalid fields.
        """
        values = {name: getattr(fields, name) for name in SamplingFields.model_fields} | others
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise explain_first_error(error) from None

    @property
    def conversation(self) -> tuple[Message, ...]:
        return tuple(message.to_message() for message in self.messages)

    @property
    def offered_tools(self) -> tuple[Mapping[str, Any], ...] | None:
        """The tools as chat templates read them; None if none may be called."""
        if not self.tools or self.tool_choice == "none":
            return None
        return tuple(
            tool.model_dump(exclude_none=True, exclude={"function": {"strict"}})
            for tool in self.tools
        )

    def find_call_rules(self) -> CallRules | None:
        """Return the rules of tool calls; None if the model may call or not, with any arguments.

        If a request has tools and a format, the answer consists of calls or follows the format. A
        forced call takes precedence over the format.
        """
        tools = self.offered_tools or ()
        if isinstance(self.tool_choice, NamedTool):
            name = self.tool_choice.function.name
            return CallRules(tools, is_forced=True, forced_name=name)
        if self.tool_choice == "required":
            return CallRules(tools, is_forced=True)
        strict_names = [tool.function.name for tool in self.tools or () if tool.function.strict]
        answer = read_format(self.response_format)
        if not tools or not (strict_names or answer):
            return None
        return CallRules(tools, strict_names, answer_schema=answer["json"] if answer else None)

    def list_grammars(self) -> dict[str, Mapping[str, Any]]:
        grammars = super().list_grammars()
        answer = read_format(self.response_format)
        if answer is not None and not self.offered_tools:
            grammars["response_format"] = answer
        return grammars

    @property
    def max_new_tokens(self) -> int | None:
        limits = [
            max_new_tokens
            for max_new_tokens in (self.max_tokens, self.max_completion_tokens)
            if max_new_tokens is not None
        ]
        return min(limits) if limits else None
