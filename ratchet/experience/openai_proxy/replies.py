"""Answer conversations with the policy, in the form of the client's API: whole or streamed.

All APIs answer conversations with this module, so that they handle sessions, recorded tokens and
disconnects in the same way. They differ only in their `ReplyFormat`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import Any, Protocol

from ratchet.allowed_tokens import AllowedTokens
from ratchet.experience.openai_proxy import answers
from ratchet.experience.openai_proxy.answers import ChatReply, TokenNames, TokenScores
from ratchet.experience.openai_proxy.handler import RequestHandler
from ratchet.experience.openai_proxy.schema import ChatRequest
from ratchet.experience.openai_proxy.strands import AgentAnswer
from ratchet.experience.openai_proxy.wire import ApiError
from ratchet.types import StopReason


class ReplyFormat(Protocol):
    """The form of one reply in an API. Events are server-sent events, as text."""

    def write_body(self, reply: ChatReply) -> dict[str, Any]:
        """Return the JSON of a whole reply."""
        ...

    def write_opening(self) -> Iterable[str]:
        """Return the events before the answer is sampled."""
        ...

    def write_content(self, reply: ChatReply) -> Iterable[str]:
        """Return the events with the answer's content, without the event that ends it."""
        ...

    def write_end(self, reply: ChatReply) -> Iterable[str]:
        """Return the event that ends the answer, and all events after it."""
        ...

    def write_error(self, error: ApiError) -> Iterable[str]:
        """Return the events of an error that occurs after the opening."""
        ...

    def keep(self, reply: ChatReply) -> None:
        """Store the reply, if later requests may refer to it."""
        ...


def refuse_alternatives_with_images(request: ChatRequest) -> None:
    """Raise ApiError for `top_logprobs` of a conversation with images.

    A stream must be refused before its first event, because the HTTP status goes with it.
    """
    if _count_alternatives(request) and any(message.media for message in request.conversation):
        raise ApiError(
            400,
            "top_logprobs are not computed for a conversation with images: leave them out",
            param="top_logprobs",
            code="unsupported_value",
        )


def _count_alternatives(request: ChatRequest) -> int:
    """Return the number of likeliest tokens per position that a request wants."""
    return (request.top_logprobs or 0) if request.logprobs else 0


async def make_reply(
    handler: RequestHandler, request: ChatRequest
) -> tuple[AgentAnswer, ChatReply]:
    """Return the policy's answer to a conversation, and the reply for the client."""
    n_top = _count_alternatives(request)
    answer = await handler.answer(request)
    completion = answer.completion
    logprobs = None
    if request.logprobs:
        scores = await score_completion(handler, answer, n_top)
        names = make_token_names(handler, request.return_tokens_as_token_ids)
        logprobs = answers.list_logprobs(completion.tokens.tolist(), scores, names)
    stop_string = None
    if completion.stop is StopReason.STOP_STRING:
        text = handler.renderer.tokenizer.decode(completion.tokens.tolist(), skip_special=False)
        stop_string = answers.find_stop_string(text, completion, tuple(request.stop or ()))
    message, prompt = answer.message, answer.prompt
    return answer, ChatReply(request, message, prompt, completion, logprobs, stop_string)


async def stream_reply(
    handler: RequestHandler, request: ChatRequest, form: ReplyFormat
) -> AsyncIterator[str]:
    """Yield the events of a streamed answer.

    The first event is sent before the answer is sampled, so an error of sampling is an event, not a
    status. Starlette cancels the iteration, and so the sampling, when the client disconnects.
    """
    for event in form.write_opening():
        yield event
    try:
        answer, reply = await make_reply(handler, request)
    except ApiError as error:  # an event, because the HTTP status has been sent
        for event in form.write_error(error):
            yield event
        return
    for event in form.write_content(reply):
        yield event
    # The client may disconnect and send its next request as soon as it knows that the answer has
    # ended, so the answer becomes part of the attempt before that event is sent.
    handler.record(answer)
    form.keep(reply)
    for event in form.write_end(reply):
        yield event


async def score_completion(handler: RequestHandler, answer: AgentAnswer, n_top: int) -> TokenScores:
    """Return the recorded log-probabilities of an answer, with `n_top` alternatives each."""
    recorded_scores = TokenScores.from_completion(answer.completion)
    if not n_top or not len(answer.completion.tokens):
        return recorded_scores
    allowed = AllowedTokens.concatenate(
        [(None, len(answer.prompt)), (answer.completion.allowed, len(answer.completion.tokens))]
    )
    scores = await handler.score(
        answer.tokens.tolist(),
        temperature=answer.sampling.temperature,
        n_top=n_top,
        allowed=allowed,
    )
    last_scores = scores.take_last(len(answer.completion.tokens))
    return last_scores.with_logprobs(answer.completion.logprobs)


def make_token_names(handler: RequestHandler, as_ids: bool | None) -> TokenNames:
    """Return the `TokenNames` of a reply: tokens by text or, if `as_ids`, by id."""
    return TokenNames(handler.renderer.tokenizer, bool(as_ids))
