"""Read and write the JSON of the OpenAI chat API: requests, answers, chunks and errors.

A parameter that could change tokens is never ignored silently. It is refused by name if the policy
can't follow it, or if it would make the recorded tokens useless for training.

Sources: the API reference of OpenAI's chat completions, and the fields of its Python client.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator
from pydantic_core import from_json

from ratchet.errors import SamplingError
from ratchet.types import Completion, Message, Sampling, StopReason, ToolCall

log = logging.getLogger(__name__)

MODEL = "policy"  # the only model that is served
MAX_MESSAGES = 2048  # per request, as in OpenAI's API
MAX_TOOLS = 128  # per request, as in OpenAI's API
MAX_STOP_CHARS = 1024  # of a stop string
MAX_METADATA = 16  # entries per request
MAX_PATH_CHARS = 200  # of an invalid field's path, which holds keys of the request
# Maximum number of JSON values in a request, arguments of calls included. Each value takes about a
# hundred bytes, and a microsecond in which no other request is answered. Without this limit a body
# of 8 MiB could hold four million.
MAX_VALUES = 2**16


class ApiError(Exception):
    """An error response of the API. `param` is the faulty part of the request."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    def json(self) -> dict[str, Any]:
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = kinds.get(
            self.status, "invalid_request_error" if self.status < 500 else "server_error"
        )
        return {
            "error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        }


# --- requests


class JsonValueBudget:
    """The budget of JSON values of one request."""

    def __init__(self, max_values: int = MAX_VALUES) -> None:
        self.max_values = self.remaining = max_values

    def take(self, text: bytes) -> None:
        """Subtract the number of values in a JSON text from the budget, without parsing the text.

        Raises:
            ValueError: The text has more values than the budget has left.
        """
        # Backslashes occur only in strings. Once escapes are removed, each quote begins or ends a
        # string.
        text = text.replace(rb"\\", b"").replace(rb"\"", b"")
        # A value has at most four quotes: two if it is a string, and two of its key.
        if text.count(b'"') <= 4 * self.remaining:
            outside = b"".join(text.split(b'"')[::2])
            self.remaining -= sum(outside.count(mark) for mark in (b",", b"[", b"{"))
            if self.remaining >= 0:
                return
        self.remaining = 0
        raise ValueError(f"the request holds more than {self.max_values} values of JSON")


class IgnoredFields:
    """The fields of requests that have no effect, although they might change tokens.

    The first request with one is logged.
    """

    def __init__(self, names: Sequence[str] = ()) -> None:
        self.names = frozenset(names)
        self._logged: set[str] = set()

    def remove(self, body: bytes) -> bytes:
        """Return the body without these fields."""
        if not self.names:
            return body
        try:
            request = from_json(body)
        except ValueError:
            return body  # validation refuses it
        if not isinstance(request, dict) or self.names.isdisjoint(request):
            return body
        for name in sorted(self.names.intersection(request)):
            value = request.pop(name)
            if name not in self._logged:
                self._logged.add(name)
                log.warning(
                    "agent.ignore: a request has %s=%.100s, which has no effect. Further requests "
                    "with %s are not logged",
                    name,
                    json.dumps(value),
                    name,
                )
        return json.dumps(request).encode()


class _StrictModel(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Function(_StrictModel):
    name: str
    arguments: dict[str, Any]

    @field_validator("arguments", mode="before")
    @classmethod
    def _parse_arguments(cls, text: Any, info: ValidationInfo) -> Any:
        """Parse the arguments, which are JSON text inside JSON."""
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


class _Call(_StrictModel):
    id: str
    type: Literal["function"] = "function"
    function: _Function


class _Message(_StrictModel):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str = ""
    tool_calls: Annotated[list[_Call], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    # Fields of the client's message objects, present when it sends them back.
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _join_text_parts(cls, content: Any) -> Any:
        if content is None or isinstance(content, str):
            return content or ""
        if not isinstance(content, list):
            raise ValueError("must be text, or a list of text parts")
        for part in content:
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            if kind != "text" or not isinstance(part.get("text"), str):
                raise ValueError(
                    f"a part of type '{kind!s:.40}' can't be read: this endpoint takes text only"
                )
        return "".join(part["text"] for part in content)

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


class _FunctionSchema(_StrictModel):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Literal[False] | None = None  # sampling is never constrained


class _Tool(_StrictModel):
    type: Literal["function"]
    function: _FunctionSchema


class _StreamOptions(_StrictModel):
    include_usage: bool = False


class _ResponseFormat(_StrictModel):
    type: Literal["text"]


Zero = Annotated[float, Field(ge=0, le=0)]
Stop = Annotated[str, Field(max_length=MAX_STOP_CHARS)]


class ChatRequest(_StrictModel):
    """A validated request for a chat completion."""

    model: str
    messages: Annotated[
        list[_Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    ]
    tools: Annotated[list[_Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: Literal[True] | None = None
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    stop: Annotated[list[Stop], Field(max_length=4)] | None = None
    seed: int | None = None
    n: Literal[1] | None = None
    logprobs: bool | None = None
    top_logprobs: Literal[0] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    response_format: _ResponseFormat | None = None
    presence_penalty: Zero | None = None
    frequency_penalty: Zero | None = None
    # These are accepted without effect, because they change no token.
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _wrap_single(cls, stop: Any) -> Any:
        return [stop] if isinstance(stop, str) else stop

    @field_validator("metadata", mode="before")
    @classmethod
    def _check_entry_count(cls, metadata: Any) -> Any:
        """Refuse too many entries with a single error, which takes less time than one per entry."""
        if isinstance(metadata, dict) and len(metadata) > MAX_METADATA:
            raise ValueError(f"has {len(metadata)} entries: give {MAX_METADATA} at most")
        return metadata

    @classmethod
    def read(cls, body: bytes, ignored: IgnoredFields | None = None) -> ChatRequest:
        """Parse a request body, without the fields that are ignored.

        Raises:
            ApiError: 400 for an invalid body, 404 for another model.
        """
        budget = JsonValueBudget()
        try:
            budget.take(body)
        except ValueError as error:
            raise ApiError(400, f"the body: {error}", code="invalid_value") from None
        try:
            body = body if ignored is None else ignored.remove(body)
            request = cls.model_validate_json(body, context=budget)
        except ValidationError as error:
            first_error = error.errors(
                include_url=False, include_context=False, include_input=False
            )[0]
            path = ".".join(map(str, first_error["loc"]))[:MAX_PATH_CHARS] or None
            hint = REFUSAL_REASONS.get(str(first_error["loc"][0]), "") if first_error["loc"] else ""
            message = f"{path or 'the body'}: {first_error['msg']}{hint}"
            raise ApiError(400, message, param=path, code="invalid_value") from None
        if request.model != MODEL:
            raise ApiError(
                404,
                f"there is no model '{request.model:.80}', only '{MODEL}'",
                param="model",
                code="model_not_found",
            )
        return request

    @property
    def conversation(self) -> tuple[Message, ...]:
        return tuple(message.to_message() for message in self.messages)

    @property
    def offered_tools(self) -> tuple[Mapping[str, Any], ...] | None:
        """The tools as chat templates read them; None if none may be called."""
        if not self.tools or self.tool_choice == "none":
            return None
        return tuple(tool.model_dump(exclude_none=True) for tool in self.tools)

    @property
    def max_new_tokens(self) -> int | None:
        """The maximum number of tokens of the answer, if the request sets one."""
        limits = [
            max_new_tokens
            for max_new_tokens in (self.max_tokens, self.max_completion_tokens)
            if max_new_tokens is not None
        ]
        return min(limits) if limits else None


REFUSAL_REASONS = {
    "n": "; send one request for each answer",
    "tool_choice": "; sampling can't be forced to make a call",
    "parallel_tool_calls": "; sampling can't be limited to a single call",
    "top_logprobs": "; only the sampled token's own logprob is recorded",
    "response_format": "; sampling is never constrained",
    "presence_penalty": "; the learner could not reproduce its logprobs",
    "frequency_penalty": "; the learner could not reproduce its logprobs",
}


def apply_sampling(sampling: Sampling, **changes: Any) -> Sampling:
    """Return the sampling with the changes of a request.

    Raises:
        ApiError: 400 with the field's name, if the values are invalid.
    """
    try:
        return replace(sampling, **changes)
    except SamplingError as error:
        raise ApiError(400, str(error), param=error.field, code="invalid_value") from None


# --- answers


@dataclass(frozen=True, slots=True)
class ChatReply:
    """The content of a response.

    Attributes:
        prompt_tokens: Number of tokens that the policy read.
        pieces: The text of each token, if logprobs were requested.
    """

    message: Message
    completion: Completion
    prompt_tokens: int
    pieces: tuple[str, ...] | None = None

    def json(self, name: str) -> dict[str, Any]:
        """Return the response body."""
        choice = {
            "index": 0,
            "message": self._to_json_message(),
            "finish_reason": self._get_finish_reason(),
            "logprobs": self._to_json_logprobs(),
        }
        return {
            **_make_header(name, "chat.completion"),
            "choices": [choice],
            "usage": self._to_json_usage(),
        }

    def chunks(self, name: str, *, include_usage: bool) -> Iterator[dict[str, Any]]:
        """Yield the chunks after the opening one: the whole answer, its end, and usage if
        requested."""
        message = self._to_json_message()
        delta: dict[str, Any] = {"content": message["content"] or ""}
        if calls := message.get("tool_calls"):
            delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(calls)]
        yield make_chunk(name, delta, logprobs=self._to_json_logprobs())
        yield make_chunk(name, {}, reason=self._get_finish_reason())
        if include_usage:
            yield {
                **_make_header(name, "chat.completion.chunk"),
                "choices": [],
                "usage": self._to_json_usage(),
            }

    def _to_json_message(self) -> dict[str, Any]:
        calls = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments))},
            }
            for call in self.message.tool_calls
        ]
        text = self.message.text
        fields = {"role": "assistant", "content": text or (None if calls else ""), "refusal": None}
        return {**fields, "tool_calls": calls} if calls else fields

    def _get_finish_reason(self) -> str:
        if not self.completion.stop.finished:
            return "length"
        return "tool_calls" if self.message.tool_calls else "stop"

    def _to_json_logprobs(self) -> dict[str, Any] | None:
        """Return the logprobs of every sampled token, including end-of-turn tokens that the text
        omits."""
        if self.pieces is None:
            return None
        values = self.completion.logprobs.tolist()
        tokens = [
            {
                "token": text,
                "bytes": list(text.encode("utf-8", "replace")),
                "logprob": logprob,
                "top_logprobs": [],
            }
            for text, logprob in zip(self.pieces, values, strict=True)
        ]
        return {"content": tokens, "refusal": None}

    def _to_json_usage(self) -> dict[str, int]:
        sampled = len(self.completion.tokens)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": sampled,
            "total_tokens": self.prompt_tokens + sampled,
        }


def make_chunk(
    name: str, delta: Mapping[str, Any], *, reason: str | None = None, logprobs: Any = None
) -> dict[str, Any]:
    """Return a chunk of a streamed answer."""
    choice = {"index": 0, "delta": delta, "finish_reason": reason, "logprobs": logprobs}
    return {**_make_header(name, "chat.completion.chunk"), "choices": [choice]}


def _make_header(name: str, kind: str) -> dict[str, Any]:
    return {"id": name, "object": kind, "created": int(time.time()), "model": MODEL}


def list_models() -> dict[str, Any]:
    """Return the list of models."""
    return {
        "object": "list",
        "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "ratchet"}],
    }


def format_event(data: Mapping[str, Any] | str) -> str:
    """Return one server-sent event."""
    return f"data: {data if isinstance(data, str) else json.dumps(data)}\n\n"


def cut_at_stop_string(text: str, completion: Completion, stop: tuple[str, ...]) -> str:
    """Return the text before the requested stop string, as the API does."""
    if completion.stop is not StopReason.STOP_STRING:
        return text
    positions = [position for string in stop if (position := text.find(string)) >= 0]
    return text[: min(positions)] if positions else text
