"""Write the JSON of answers: chat completions, text completions, and completions of token ids.

Sources: the API reference of OpenAI; the fields that vLLM 0.32 adds to it (`token_ids`,
`prompt_token_ids`, tokens named "token_id:N"), and its /inference/v1/generate.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ratchet.data.chat.tokenizer import Tokenizer
from ratchet.experience.openai_proxy.schema import ChatRequest
from ratchet.experience.openai_proxy.wire import MODEL, ApiError
from ratchet.types import Completion, Message, StopReason


@dataclass(frozen=True)
class TokenScores:
    """Log-probabilities of the tokens of a text.

    T = tokens, K = likeliest tokens of each position.
    """

    logprobs: NDArray[np.float32]
    """float32 [T], of each token given the tokens before it; NaN for a text's first token."""
    top_ids: NDArray[np.int64]
    """int64 [T, K], the likeliest tokens of each position."""
    top_logprobs: NDArray[np.float32]
    """float32 [T, K]."""

    @classmethod
    def from_completion(cls, completion: Completion) -> TokenScores:
        """Return the recorded log-probabilities of sampled tokens, without alternatives."""
        shape = (len(completion.tokens), 0)
        return cls(completion.logprobs, np.zeros(shape, np.int64), np.zeros(shape, np.float32))

    def take_last(self, count: int) -> TokenScores:
        """Return the scores of the last `count` tokens."""
        start = len(self.logprobs) - count
        return TokenScores(self.logprobs[start:], self.top_ids[start:], self.top_logprobs[start:])

    def followed_by(self, scores: TokenScores) -> TokenScores:
        """Return these scores followed by `scores`, which has the same K."""
        return TokenScores(
            np.concatenate([self.logprobs, scores.logprobs]),
            np.concatenate([self.top_ids, scores.top_ids]),
            np.concatenate([self.top_logprobs, scores.top_logprobs]),
        )

    def with_logprobs(self, logprobs: NDArray[np.float32]) -> TokenScores:
        """Return a copy with other log-probabilities of the tokens, and the same alternatives."""
        return TokenScores(logprobs, self.top_ids, self.top_logprobs)


@dataclass(frozen=True)
class TokenNames:
    """The names of tokens in an answer: their text, or "token_id:N"."""

    tokenizer: Tokenizer
    as_ids: bool
    _texts: dict[int, str] = field(default_factory=dict)  # cache, as alternatives often recur

    def __call__(self, token: int) -> str:
        return f"token_id:{token}" if self.as_ids else self.decode(token)

    def decode(self, token: int) -> str:
        text = self._texts.get(token)
        if text is None:
            text = self._texts[token] = self.tokenizer.decode([token], skip_special=False)
        return text


def get_finish_reason(completion: Completion, message: Message | None = None) -> str:
    """Return the API's name for the end of an answer."""
    if not completion.stop.finished:
        return "length"
    return "tool_calls" if message is not None and message.tool_calls else "stop"


def get_usage(n_prompt_tokens: int, n_sampled_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": n_prompt_tokens,
        "completion_tokens": n_sampled_tokens,
        "total_tokens": n_prompt_tokens + n_sampled_tokens,
    }


def list_logprobs(
    tokens: Sequence[int], scores: TokenScores, names: TokenNames
) -> list[dict[str, Any]]:
    """Return the entry of each token in `logprobs.content`, special tokens included."""
    entries = []
    for position, token in enumerate(tokens):
        top_tokens = zip(
            scores.top_ids[position].tolist(), scores.top_logprobs[position].tolist(), strict=True
        )
        entries.append(
            {
                **_describe_token(token, float(scores.logprobs[position]), names),
                "top_logprobs": [
                    _describe_token(top_token, logprob, names) for top_token, logprob in top_tokens
                ],
            }
        )
    return entries


def _describe_token(token: int, logprob: float, names: TokenNames) -> dict[str, Any]:
    text = names.decode(token)
    return {
        "token": names(token),
        "bytes": list(text.encode("utf-8", "replace")),
        "logprob": logprob,
    }


# --- chat completions


@dataclass(frozen=True, slots=True)
class ChatReply:
    """The content of a chat completion."""

    request: ChatRequest
    message: Message
    prompt: NDArray[np.int64]
    """int64, the tokens that the policy read."""
    completion: Completion
    logprobs: list[dict[str, Any]] | None = None
    """The entries of the sampled tokens, if they were requested."""
    stop_string: str | None = None
    """The requested stop string that ended the answer, if one did."""


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """The form of a chat completion, whose id is `name`."""

    request: ChatRequest
    name: str

    def write_body(self, reply: ChatReply) -> dict[str, Any]:
        """Return the response body."""
        choice = {
            "index": 0,
            "message": _write_message(reply.message),
            "finish_reason": get_finish_reason(reply.completion, reply.message),
            "logprobs": _write_logprobs(reply),
            **self._get_token_ids(reply),
        }
        return {
            **make_header(self.name, "chat.completion", self.request.model),
            "choices": [choice],
            "usage": _count_usage(reply),
            **self._get_prompt_ids(reply),
        }

    def write_opening(self) -> Iterator[str]:
        """Yield the chunk that opens the message."""
        opening_delta = {"role": "assistant", "content": ""}
        yield format_event(make_chunk(self.name, opening_delta, model=self.request.model))

    def write_content(self, reply: ChatReply) -> Iterator[str]:
        """Yield the whole answer as one chunk."""
        message = _write_message(reply.message)
        delta: dict[str, Any] = {"content": message["content"] or ""}
        if calls := message.get("tool_calls"):
            delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(calls)]
        chunk = make_chunk(
            self.name, delta, model=self.request.model, logprobs=_write_logprobs(reply)
        )
        chunk["choices"][0] |= self._get_token_ids(reply)
        yield format_event(chunk | self._get_prompt_ids(reply))

    def write_end(self, reply: ChatReply) -> Iterator[str]:
        """Yield the finish reason, and the usage if requested."""
        reason = get_finish_reason(reply.completion, reply.message)
        yield format_event(make_chunk(self.name, {}, model=self.request.model, reason=reason))
        options = self.request.stream_options
        if options is not None and options.include_usage:
            header = make_header(self.name, "chat.completion.chunk", self.request.model)
            yield format_event({**header, "choices": [], "usage": _count_usage(reply)})
        yield format_event("[DONE]")

    def write_error(self, error: ApiError) -> Iterator[str]:
        """Yield the error."""
        yield format_event(error.json())

    def keep(self, reply: ChatReply) -> None:
        """Do nothing: no request refers to an earlier chat completion."""

    def _get_token_ids(self, reply: ChatReply) -> dict[str, list[int]]:
        if not self.request.return_token_ids:
            return {}
        return {"token_ids": reply.completion.tokens.tolist()}

    def _get_prompt_ids(self, reply: ChatReply) -> dict[str, list[int]]:
        return {"prompt_token_ids": reply.prompt.tolist()} if self.request.return_token_ids else {}


def _write_message(message: Message) -> dict[str, Any]:
    calls = [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": write_arguments(call.arguments)},
        }
        for call in message.tool_calls
    ]
    text = message.text
    fields = {"role": "assistant", "content": text or (None if calls else ""), "refusal": None}
    return {**fields, "tool_calls": calls} if calls else fields


def write_arguments(arguments: Mapping[str, Any]) -> str:
    """Return the arguments of a call as JSON text."""
    return json.dumps(dict(arguments))


def _write_logprobs(reply: ChatReply) -> dict[str, Any] | None:
    return None if reply.logprobs is None else {"content": reply.logprobs, "refusal": None}


def _count_usage(reply: ChatReply) -> dict[str, int]:
    return get_usage(len(reply.prompt), len(reply.completion.tokens))


def make_chunk(
    name: str,
    delta: Mapping[str, Any],
    *,
    model: str = MODEL,
    reason: str | None = None,
    logprobs: Any = None,
) -> dict[str, Any]:
    """Return a chunk of a streamed answer."""
    choice = {"index": 0, "delta": delta, "finish_reason": reason, "logprobs": logprobs}
    return {**make_header(name, "chat.completion.chunk", model), "choices": [choice]}


def make_header(name: str, kind: str, model: str) -> dict[str, Any]:
    return {"id": name, "object": kind, "created": int(time.time()), "model": model}


def describe_model(max_context: int) -> dict[str, Any]:
    """Return the card of the served model."""
    return {
        "id": MODEL,
        "object": "model",
        "created": 0,
        "owned_by": "ratchet",
        "max_model_len": max_context,
    }


def format_event(data: Mapping[str, Any] | str) -> str:
    """Return one server-sent event without a name."""
    return f"data: {data if isinstance(data, str) else json.dumps(data)}\n\n"


def format_named_event(data: Mapping[str, Any]) -> str:
    """Return one server-sent event, named after its `type`."""
    return f"event: {data['type']}\n{format_event(data)}"


def cut_at_stop_string(text: str, completion: Completion, stop: tuple[str, ...]) -> str:
    """Return the text before the requested stop string, as the API does."""
    string = find_stop_string(text, completion, stop)
    return text if string is None else text[: text.find(string)]


def find_stop_string(text: str, completion: Completion, stop: tuple[str, ...]) -> str | None:
    """Return the requested stop string that ended a text, if one did."""
    if completion.stop is not StopReason.STOP_STRING:
        return None
    return min((string for string in stop if string in text), key=text.find, default=None)
