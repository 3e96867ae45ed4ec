"""Play attempts with a model behind an OpenAI-compatible endpoint.

Messages go in and messages come out; the endpoint does not show its tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ratchet.data.formats.media import shorten_reference
from ratchet.errors import DataError
from ratchet.evals.message_player import AttemptFailed, AttemptState, MessagePlayer, Reply
from ratchet.experience.seeds import derive_seed
from ratchet.rewards.llm.http_client import Endpoint, EndpointError
from ratchet.types import TEMPLATE_VARIABLES, Message, Part, Sampling, ToolCall
from ratchet.utils.safe_read import parse_json

# HTTP statuses of a wrong key, address or model: every further request would fail too.
FATAL_STATUSES = (401, 403, 404, 405)
SEED_LIMIT = 2**31  # servers accept only seeds below this
# A trajectory holds some 20 bytes for each token that the server counts.
MAX_ANSWER_TOKENS = 2**22


@dataclass(frozen=True)
class EndpointPlayer(MessagePlayer):
    """A player, like `EpisodePlayer`, whose policy is a model behind an endpoint."""

    endpoint: Endpoint
    """The HTTP client."""
    model: str
    """The model's name at the endpoint."""
    body: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of each request; None removes a key."""
    max_turns: int = 64
    """Number of turns after which an attempt is truncated."""
    history_window: int | None = None
    """Number of past turns in a turn's prompt; None: all turns."""
    timeout_s: float | None = None
    """Seconds for a whole attempt, including the wait for a free slot; None sets no limit."""

    async def answer(
        self,
        state: AttemptState,
        sampling: Sampling,
        turn_index: int,
        stop_strings: tuple[str, ...],
    ) -> Reply:
        """Return the endpoint's message.

        Raises AttemptFailed if the endpoint gives no usable answer, EndpointError if it would
        refuse every request.
        """
        body = self._build_request(state, sampling, turn_index, stop_strings)
        try:
            choice = self._read_choice(state, await self.endpoint.post(body))
        except DataError as error:
            raise AttemptFailed("endpoint", str(error)) from error
        except EndpointError as error:
            if error.status in FATAL_STATUSES:
                raise
            raise AttemptFailed("endpoint", str(error)) from error
        message, n_malformed = read_message(choice["message"])
        return Reply(message, n_malformed, choice.get("finish_reason") == "length")

    def _build_request(
        self,
        state: AttemptState,
        sampling: Sampling,
        turn_index: int,
        stop_strings: tuple[str, ...],
    ) -> dict[str, Any]:
        if state.environment.raw_observations:
            raise DataError(
                f"{type(state.environment).__name__} has raw observations, which the messages of "
                "an API can't hold: evaluate a run or a model directory instead"
            )
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [format_message(message) for message in state.prompt],
            "temperature": sampling.temperature,
            "max_tokens": sampling.max_new_tokens,
            "seed": derive_seed(sampling.seed, turn_index) % SEED_LIMIT,
        }
        defaults = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
        body |= {
            key: getattr(sampling, key)
            for key, default in defaults.items()
            if getattr(sampling, key) != default
        }
        if (structured := sampling.structured) is not None:
            body["structured_outputs"] = {structured.kind: structured.value}  # vLLM's field
        if stop_strings:
            body["stop"] = list(stop_strings)
        if variables := state.task.meta.get(TEMPLATE_VARIABLES):
            body["chat_template_kwargs"] = dict(variables)
        if state.tools is not None:
            body["tools"] = [dict(tool) for tool in state.tools]
        return {key: value for key, value in {**body, **self.body}.items() if value is not None}

    def _read_choice(self, state: AttemptState, answer: Any) -> Mapping[str, Any]:
        """Return the first choice of an answer, and count its tokens.

        Raises:
            DataError: The answer has no message, or the server withheld it.
        """
        try:
            choice = answer["choices"][0]
            message, usage = choice["message"], answer.get("usage") or {}
            has_message = (
                message["role"] == "assistant"
                and isinstance(message.get("content") or "", str)
                and isinstance(message.get("tool_calls") or [], list)
            )
            n_tokens = int(usage.get("completion_tokens") or 0)
        except (LookupError, TypeError, AttributeError, ValueError, OverflowError):
            choice, has_message, n_tokens = {}, False, 0
        if not has_message:
            raise DataError(
                f"{self.endpoint.url} answered without a message: {json.dumps(answer)[:300]}"
            )
        if choice.get("finish_reason") == "content_filter":
            raise DataError(f"{self.endpoint.url} withheld its answer (content_filter)")
        if not 0 <= n_tokens <= MAX_ANSWER_TOKENS:
            raise DataError(
                f"{self.endpoint.url} counts {n_tokens!s:.20} completion_tokens, which no answer "
                "has"
            )
        state.n_tokens += n_tokens
        return choice


def format_message(message: Message) -> dict[str, Any]:
    """Return a message in the format of the API.

    Raises DataError for audio, video, and images that are not in the message or on the web.
    """
    content: Any = message.text
    if message.media and not isinstance(message.content, str):
        content = [_format_part(part) for part in message.content]
    fields: dict[str, Any] = {"role": message.role, "content": content}
    if message.tool_calls:
        fields["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments))},
            }
            for call in message.tool_calls
        ]
    return (
        fields if message.tool_call_id is None else {**fields, "tool_call_id": message.tool_call_id}
    )


def _format_part(part: Part) -> dict[str, Any]:
    if part.type == "text":
        return {"type": "text", "text": part.value}
    if part.type != "image" or not part.value.startswith(("data:", "https://", "http://")):
        raise DataError(
            f"a message has the {part.type} {shorten_reference(part.value)}, and only images in "
            "`data:` or web addresses are sent to an endpoint: evaluate a model directory instead"
        )
    return {"type": "image_url", "image_url": {"url": part.value}}


def read_message(fields: Mapping[str, Any]) -> tuple[Message, int]:
    """Return the assistant message of a choice, and the number of malformed tool calls in it.

    Malformed calls are appended to the message's text as JSON.
    """
    text = fields.get("content") or ""
    calls = []
    n_malformed = 0
    for call in fields.get("tool_calls") or ():
        try:
            name = call["function"]["name"]
            arguments = parse_json(call["function"]["arguments"] or "{}")
            if not isinstance(arguments, dict):
                raise ValueError(arguments)
            calls.append(ToolCall(str(call["id"]), str(name), arguments))
        except (AttributeError, LookupError, TypeError, ValueError):
            n_malformed += 1
            text += json.dumps(call)
    return Message("assistant", text, tuple(calls)), n_malformed


def get_completions_url(url: str) -> str:
    """Return the URL of chat completions under the base URL of an API, such as http://host/v1."""
    return f"{url.rstrip('/')}/chat/completions"


def is_endpoint(target: str) -> bool:
    """True if a target of `ratchet eval` is the URL of an endpoint."""
    return target.startswith(("http://", "https://"))
