"""Requests and answers of the APIs whose prompts are texts or token ids.

- /v1/completions: OpenAI's text completions, with prompts of text or token ids, `echo`, and
  `max_tokens` 0 to get only a prompt's log-probabilities.
- /inference/v1/generate: vLLM's completions of token ids.
- /tokenize and /detokenize: vLLM's tokenization of a text or a conversation.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from ratchet.data.chat.renderer import Renderer
from ratchet.errors import RatchetError
from ratchet.experience.openai_proxy.answers import (
    TokenNames,
    TokenScores,
    cut_at_stop_string,
    format_event,
    get_finish_reason,
    get_usage,
    list_logprobs,
    make_header,
)
from ratchet.experience.openai_proxy.handler import RequestHandler
from ratchet.experience.openai_proxy.rendering import render_prompt
from ratchet.experience.openai_proxy.schema import (
    MAX_MESSAGES,
    MAX_TOOLS,
    ChatMessage,
    ChatTool,
    StreamOptions,
)
from ratchet.experience.openai_proxy.strands import AgentAnswer
from ratchet.experience.openai_proxy.structured import ResponseFormat, read_format
from ratchet.experience.openai_proxy.wire import (
    MAX_TOKEN_VALUES,
    ApiError,
    IgnoredFields,
    SamplingFields,
    WireRequest,
)
from ratchet.types import Completion, StopReason

DEFAULT_MAX_TOKENS = 16  # of a text completion, as in OpenAI's API
MAX_PROMPTS = 512  # per request
MAX_COMPLETION_LOGPROBS = 20
# Maximum number of log-probabilities in the answer to one request, alternatives included. Each
# takes about 50 bytes.
MAX_LOGPROB_ENTRIES = 2**20

NO_COMPLETION = Completion(
    np.zeros(0, np.int64),
    np.zeros(0, np.float32),
    np.zeros(0, np.float32),
    np.zeros(0, np.int32),
    StopReason.LENGTH,
)

TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class CompletionRequest(SamplingFields):
    """A validated request for text completions."""

    max_values = MAX_TOKEN_VALUES

    prompt: (
        str
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)]
        | Annotated[
            list[Annotated[list[TokenId], Field(min_length=1)]],
            Field(min_length=1, max_length=MAX_PROMPTS),
        ]
    )
    """Text, token ids, or a list of either. Each gets a completion of its own."""
    echo: bool | None = None
    """Put the prompt before its completion, in text and `logprobs`."""
    logprobs: Annotated[int, Field(ge=0, le=MAX_COMPLETION_LOGPROBS)] | None = None
    """Number of likeliest tokens per position; 0: only the log-probability of each token itself;
    None: no log-probabilities."""
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    add_special_tokens: bool | None = None
    skip_special_tokens: bool | None = None
    response_format: ResponseFormat | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None

    @property
    def max_new_tokens(self) -> int:
        return DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens

    def list_grammars(self) -> dict[str, Mapping[str, Any]]:
        grammars = super().list_grammars()
        if (grammar := read_format(self.response_format)) is not None:
            grammars["response_format"] = grammar
        return grammars

    def list_texts(self) -> list[str]:
        """Return the prompts that are text."""
        prompts: Any = [self.prompt] if isinstance(self.prompt, str) else self.prompt
        return [prompt for prompt in prompts if isinstance(prompt, str)]

    def list_prompts(self, renderer: Renderer) -> list[list[int]]:
        """Return the token ids of each prompt.

        Raises:
            ApiError: 400 for an empty prompt.
        """
        is_single = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        prompts: Any = [self.prompt] if is_single else self.prompt
        token_lists = [
            encode_text(renderer, prompt, add_special=self.add_special_tokens is not False)
            if isinstance(prompt, str)
            else prompt
            for prompt in prompts
        ]
        if not all(token_lists):
            raise ApiError(
                400, "prompt: a prompt has no tokens", param="prompt", code="invalid_value"
            )
        return token_lists

    def check_answer_size(self, prompts: Sequence[Sequence[int]], max_context: int) -> None:
        """Raise ApiError if the answer would have too many log-probabilities."""
        if self.logprobs is None:
            return
        n_new = min(self.max_new_tokens, max_context)
        shown_tokens = sum(n_new + (len(tokens) if self.echo else 0) for tokens in prompts)
        n_entries = shown_tokens * (1 + self.logprobs)
        if n_entries > MAX_LOGPROB_ENTRIES:
            raise ApiError(
                400,
                f"the answer may have {n_entries:,} log-probabilities, but at most "
                f"{MAX_LOGPROB_ENTRIES:,} are allowed: send fewer prompts, or lower logprobs or "
                "max_tokens",
                param="logprobs",
                code="invalid_value",
            )


class GenerateSampling(SamplingFields):
    """The sampling parameters of /inference/v1/generate."""

    logprobs: Annotated[int, Field(ge=0, le=MAX_COMPLETION_LOGPROBS)] | None = None
    skip_special_tokens: bool | None = None  # no effect: answers are only token ids


class GenerateRequest(WireRequest):
    """A validated request of /inference/v1/generate: a completion of token ids."""

    max_values = MAX_TOKEN_VALUES

    request_id: str | None = None
    token_ids: Annotated[list[TokenId], Field(min_length=1)]
    sampling_params: GenerateSampling
    return_token_ids: bool | None = None
    stream: Literal[False] | None = None

    def check_unknown_fields(self, ignored: IgnoredFields) -> None:
        for name in ("features", "content_parts"):
            if (self.model_extra or {}).get(name):
                raise ApiError(
                    400, f"{name}: this endpoint takes text only", param=name, code="invalid_value"
                )
        super().check_unknown_fields(ignored)
        self.sampling_params.check_unknown_fields(ignored)


class TokenizeRequest(WireRequest):
    """A request for the token ids of a text, or of a conversation with the generation prompt."""

    prompt: str | None = None
    add_special_tokens: bool = True
    messages: (
        Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
        | None
    ) = None
    tools: Annotated[list[ChatTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    return_token_strs: bool | None = None

    def list_texts(self) -> list[str]:
        """Return the texts that must fit the context: the joined messages, and the prompt."""
        messages = [message.to_message() for message in self.messages or ()]
        return ["".join(message.text for message in messages), self.prompt or ""]


class DetokenizeRequest(WireRequest):
    """A request for the text of token ids."""

    max_values = MAX_TOKEN_VALUES

    tokens: list[TokenId]


@dataclass(frozen=True)
class TokenCompletion:
    """A completion of a prompt of token ids."""

    prompt: Sequence[int]
    answer: AgentAnswer | None
    """The sampled completion; None if the prompt was only scored."""
    scores: TokenScores | None = None
    """Log-probabilities of the completion's tokens, after those of the prompt's tokens if the
    prompt is echoed; None if none were requested."""

    @property
    def completion(self) -> Completion:
        return NO_COMPLETION if self.answer is None else self.answer.completion

    def record_in(self, handler: RequestHandler) -> None:
        """Make the completion part of the attempt, once it goes to the client."""
        if self.answer is not None:
            handler.record(self.answer)


def encode_text(renderer: Renderer, text: str, *, add_special: bool) -> list[int]:
    """Return the token ids of a text, after BOS if the tokenizer adds it and `add_special`.

    Special tokens in the text are read as such: the text is a rendered prompt.
    """
    tokenizer = renderer.tokenizer
    bos_id = tokenizer.bos_id if add_special and tokenizer.adds_bos else None
    try:
        return [*(() if bos_id is None else (bos_id,)), *tokenizer.encode(text, allow_special=True)]
    except RatchetError as error:
        raise ApiError(400, str(error), param="prompt", code="invalid_value") from error


def write_completions(
    name: str, request: CompletionRequest, completions: Sequence[TokenCompletion], names: TokenNames
) -> dict[str, Any]:
    """Return the response body of /v1/completions."""
    return {
        **make_header(name, "text_completion", request.model),
        "choices": [
            _write_text_choice(index, request, completion, names)
            for index, completion in enumerate(completions)
        ],
        "usage": _count_usage(completions),
    }


def list_completion_events(
    name: str, request: CompletionRequest, completions: Sequence[TokenCompletion], names: TokenNames
) -> list[str]:
    """Return the events of a stream of /v1/completions: one with the whole text of each choice.

    All prompts are sampled before the first event, so an error has its own HTTP status.
    """
    header = make_header(name, "text_completion", request.model)
    choices = [
        [_write_text_choice(index, request, completion, names)]
        for index, completion in enumerate(completions)
    ]
    events = [format_event({**header, "choices": choice}) for choice in choices]
    if request.stream_options is not None and request.stream_options.include_usage:
        events.append(format_event({**header, "choices": [], "usage": _count_usage(completions)}))
    return [*events, format_event("[DONE]")]


def _count_usage(completions: Sequence[TokenCompletion]) -> dict[str, int]:
    return get_usage(
        sum(len(completion.prompt) for completion in completions),
        sum(len(completion.completion.tokens) for completion in completions),
    )


def _write_text_choice(
    index: int, request: CompletionRequest, result: TokenCompletion, names: TokenNames
) -> dict[str, Any]:
    sampled = result.completion.tokens.tolist()
    skip_special = request.skip_special_tokens is not False
    decode = names.tokenizer.decode
    text = cut_at_stop_string(
        decode(sampled, skip_special=skip_special), result.completion, tuple(request.stop or ())
    )
    prompt_text = decode(list(result.prompt), skip_special=skip_special) if request.echo else ""
    shown_tokens = [*result.prompt, *sampled] if request.echo else sampled
    choice: dict[str, Any] = {
        "index": index,
        "text": prompt_text + text,
        "finish_reason": get_finish_reason(result.completion),
        "logprobs": None
        if result.scores is None
        else _write_text_logprobs(shown_tokens, result.scores, names),
    }
    if request.return_token_ids:
        choice |= {"token_ids": sampled, "prompt_token_ids": list(result.prompt)}
    return choice


def _write_text_logprobs(
    tokens: Sequence[int], scores: TokenScores, names: TokenNames
) -> dict[str, Any]:
    """Return the `logprobs` of a text completion. The first token of a text has none."""
    pieces = [names.decode(token) for token in tokens]
    offsets = [0]
    for piece in pieces[:-1]:
        offsets.append(offsets[-1] + len(piece))
    logprobs = [None if value != value else value for value in scores.logprobs.tolist()]
    top_logprobs = []
    for token, logprob, ids, values in zip(
        tokens, logprobs, scores.top_ids.tolist(), scores.top_logprobs.tolist(), strict=True
    ):
        alternatives = {names(top): value for top, value in zip(ids, values, strict=True)}
        if logprob is not None:
            alternatives[names(token)] = logprob
        top_logprobs.append(alternatives if ids and logprob is not None else None)
    return {
        "tokens": [names(token) for token in tokens],
        "token_logprobs": logprobs,
        "top_logprobs": top_logprobs,
        "text_offset": offsets,
    }


def write_generated(
    request: GenerateRequest, result: TokenCompletion, names: TokenNames
) -> dict[str, Any]:
    """Return the response body of /inference/v1/generate."""
    tokens = result.completion.tokens.tolist()
    choice = {
        "index": 0,
        "token_ids": tokens,
        "finish_reason": get_finish_reason(result.completion),
        "logprobs": None
        if result.scores is None
        else {"content": list_logprobs(tokens, result.scores, names)},
    }
    prompt_ids = {"prompt_token_ids": list(result.prompt)} if request.return_token_ids else {}
    return {
        "request_id": request.request_id or secrets.token_hex(8),
        "model": request.model,
        "choices": [choice],
        "prompt_logprobs": None,
        "usage": get_usage(len(result.prompt), len(tokens)),
        **prompt_ids,
    }


def tokenize(request: TokenizeRequest, renderer: Renderer, max_context: int) -> dict[str, Any]:
    """Return the response body of /tokenize.

    Raises:
        ApiError: 400 unless the request has either a text or messages that can be rendered.
    """
    if (request.prompt is None) == (request.messages is None):
        raise ApiError(400, "give either prompt or messages", param="prompt", code="invalid_value")
    if request.messages is None:
        tokens = encode_text(renderer, request.prompt or "", add_special=request.add_special_tokens)
    else:
        messages = [message.to_message() for message in request.messages]
        tools = [tool.model_dump(exclude_none=True) for tool in request.tools or ()]
        try:
            tokens = render_prompt(renderer, messages, tools or None, None).tokens.tolist()
        except RatchetError as error:
            raise ApiError(400, str(error), param="messages", code="invalid_value") from error
    body = {"count": len(tokens), "max_model_len": max_context, "tokens": list(tokens)}
    if request.return_token_strs:
        names = TokenNames(renderer.tokenizer, as_ids=False)
        body["token_strs"] = [names(token) for token in tokens]
    return body
