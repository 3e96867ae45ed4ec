"""Answer the requests of the OpenAI API, and of vLLM's additions to it."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.requests import ClientDisconnect

from ratchet.experience.openai_proxy import answers, token_api
from ratchet.experience.openai_proxy.answers import ChatReply, TokenNames, TokenScores, format_event
from ratchet.experience.openai_proxy.handler import RequestHandler
from ratchet.experience.openai_proxy.schema import ChatRequest
from ratchet.experience.openai_proxy.session import count_max_chars, run_in_thread
from ratchet.experience.openai_proxy.strands import AgentAnswer
from ratchet.experience.openai_proxy.wire import MODEL, ApiError, IgnoredFields, SamplingFields
from ratchet.web.guard import get_bearer_key

T = TypeVar("T")


class Routes:
    """The paths of the API. Each request is answered by the handler of its key.

    Args:
        find_handler: Returns the handler for a key ("" for requests without one), or None.
        ignored: Counts the fields that have no effect.
    """

    def __init__(
        self, find_handler: Callable[[str], RequestHandler | None], ignored: IgnoredFields
    ) -> None:
        self.find_handler = find_handler
        self.ignored = ignored

    def add_to(self, app: FastAPI) -> None:
        """Add the paths to an application."""
        for method, path, endpoint in (
            ("GET", "/v1/models", self.models),
            ("GET", f"/v1/models/{MODEL}", self.model),
            ("GET", "/metrics", self.metrics),
            ("POST", "/v1/chat/completions", self.chat),
            ("POST", "/v1/completions", self.completions),
            ("POST", "/inference/v1/generate", self.generate),
            ("POST", "/tokenize", self.tokenize),
            ("POST", "/detokenize", self.detokenize),
        ):
            app.add_api_route(path, endpoint, methods=[method], response_model=None)

    async def models(self, request: Request) -> Response:
        card = answers.describe_model(self._find_handler(request).max_context)
        return JSONResponse({"object": "list", "data": [card]})

    async def model(self, request: Request) -> Response:
        return JSONResponse(answers.describe_model(self._find_handler(request).max_context))

    async def metrics(self, request: Request) -> Response:
        self._find_handler(request)
        return PlainTextResponse(_format_metrics(self.ignored))

    async def chat(self, request: Request) -> Response:
        handler = self._find_handler(request)  # the key is checked before the body is read
        chat_request = ChatRequest.read(await _read_body(request), self.ignored)
        if chat_request.stream:
            return StreamingResponse(
                _stream_events(handler, chat_request), media_type="text/event-stream"
            )
        answer, reply = await _cancel_on_disconnect(request, _reply(handler, chat_request))
        handler.record(answer)
        return JSONResponse(reply.json(_new_id("chatcmpl")))

    async def completions(self, request: Request) -> Response:
        handler = self._find_handler(request)
        completion_request = token_api.CompletionRequest.read(
            await _read_body(request), self.ignored
        )
        check_text_size(handler, completion_request.list_texts())
        prompts = await run_in_thread(partial(completion_request.list_prompts, handler.renderer))
        completion_request.check_answer_size(prompts, handler.max_context)
        work = complete_prompts(handler, completion_request, prompts)
        completions = await _cancel_on_disconnect(request, work)
        for completion in completions:
            completion.record_in(handler)
        names = _name_tokens(handler, completion_request.return_tokens_as_token_ids)
        write = partial(token_api.write_completions, _new_id("cmpl"), completion_request)
        return await run_in_thread(lambda: JSONResponse(write(completions, names)))

    async def generate(self, request: Request) -> Response:
        handler = self._find_handler(request)
        generate_request = token_api.GenerateRequest.read(await _read_body(request), self.ignored)
        work = complete_prompt(
            handler,
            generate_request.token_ids,
            generate_request.sampling_params,
            n_top=generate_request.sampling_params.logprobs,
        )
        completion = await _cancel_on_disconnect(request, work)
        completion.record_in(handler)
        names = _name_tokens(handler, True)
        write = partial(token_api.write_generated, generate_request, completion, names)
        return await run_in_thread(lambda: JSONResponse(write()))

    async def tokenize(self, request: Request) -> Response:
        handler = self._find_handler(request)
        tokenize_request = token_api.TokenizeRequest.read(await _read_body(request), self.ignored)
        check_text_size(handler, tokenize_request.list_texts())
        tokenize = partial(
            token_api.tokenize, tokenize_request, handler.renderer, handler.max_context
        )
        return await run_in_thread(lambda: JSONResponse(tokenize()))

    async def detokenize(self, request: Request) -> Response:
        handler = self._find_handler(request)
        tokens = token_api.DetokenizeRequest.read(await _read_body(request), self.ignored).tokens
        decode = partial(handler.renderer.tokenizer.decode, tokens, skip_special=False)
        return await run_in_thread(lambda: JSONResponse({"prompt": decode()}))

    def _find_handler(self, request: Request) -> RequestHandler:
        """Return the handler of the request's key. Raises ApiError with status 401."""
        handler = self.find_handler(get_bearer_key(request.headers.raw).decode(errors="replace"))
        if handler is None:
            raise ApiError(
                401, "the API key is wrong, or its attempt is over", code="invalid_api_key"
            )
        return handler


async def _read_body(request: Request) -> bytes:
    return b"".join([chunk async for chunk in request.stream()])


def check_text_size(handler: RequestHandler, texts: Sequence[str]) -> None:
    """Raise ApiError for a text far longer than the context, which would take long to tokenize."""
    longest = max(map(len, texts), default=0)
    limit = count_max_chars(handler.renderer, handler.max_context)
    if longest > limit:
        raise ApiError(
            400,
            f"a text has {longest} characters, and a context of {handler.max_context} tokens takes "
            f"at most {limit}",
            param="prompt",
            code="context_length_exceeded",
        )


async def _reply(handler: RequestHandler, request: ChatRequest) -> tuple[AgentAnswer, ChatReply]:
    """Return the policy's answer to a conversation, and the reply for the client."""
    answer = await handler.answer(request)
    completion = answer.completion
    logprobs = None
    if request.logprobs:
        scores = await _score_completion(handler, answer, request.top_logprobs or 0)
        names = _name_tokens(handler, request.return_tokens_as_token_ids)
        logprobs = answers.list_logprobs(completion.tokens.tolist(), scores, names)
    return answer, ChatReply(request, answer.message, answer.prompt, completion, logprobs)


async def _score_completion(
    handler: RequestHandler, answer: AgentAnswer, n_top: int
) -> TokenScores:
    """Return the recorded log-probabilities of an answer, with alternatives if any are wanted."""
    recorded_scores = TokenScores.from_completion(answer.completion)
    if not n_top or not len(answer.completion.tokens):
        return recorded_scores
    scores = await handler.score(
        answer.tokens.tolist(), temperature=answer.sampling.temperature, n_top=n_top
    )
    last_scores = scores.take_last(len(answer.completion.tokens))
    return last_scores.with_logprobs(answer.completion.logprobs)


async def complete_prompt(
    handler: RequestHandler,
    prompt: Sequence[int],
    request: SamplingFields,
    *,
    n_top: int | None,
    echo: bool = False,
) -> token_api.TokenCompletion:
    """Return the completion of a prompt.

    Args:
        n_top: Number of likeliest tokens per position; None for no log-probabilities.
        echo: True to return the log-probabilities of the prompt's tokens too. They are those of the
            model, at temperature 1.

    Raises:
        ApiError: The request is refused.
    """
    scores = None
    if echo and n_top is not None:
        scores = await handler.score(prompt, temperature=1.0, n_top=n_top)
    if request.max_new_tokens == 0:  # the prompt is scored alone
        return token_api.TokenCompletion(prompt, None, scores)
    answer = await handler.complete(prompt, request, n_top=n_top or 0)
    if n_top is not None:
        completion_scores = await _score_completion(handler, answer, n_top)
        scores = completion_scores if scores is None else scores.followed_by(completion_scores)
    return token_api.TokenCompletion(prompt, answer, scores)


async def complete_prompts(
    handler: RequestHandler,
    request: token_api.CompletionRequest,
    prompts: Sequence[Sequence[int]],
) -> list[token_api.TokenCompletion]:
    """Return the completions of all prompts of a request, sampled together.

    Raises:
        ApiError: One of them is refused. The others are then aborted.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(
                    complete_prompt(
                        handler, prompt, request, n_top=request.logprobs, echo=bool(request.echo)
                    )
                )
                for prompt in prompts
            ]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


def _name_tokens(handler: RequestHandler, as_ids: bool | None) -> TokenNames:
    return TokenNames(handler.renderer.tokenizer, bool(as_ids))


def _format_metrics(ignored: IgnoredFields) -> str:
    """Return the counts of ignored fields in the text format of Prometheus."""
    lines = [
        "# HELP ratchet_ignored_fields_total Requests with a field that has no effect.",
        "# TYPE ratchet_ignored_fields_total counter",
    ]
    for name, count in sorted(ignored.counts.items()):
        label = json.dumps(name, ensure_ascii=True)
        lines.append(f"ratchet_ignored_fields_total{{field={label}}} {count}")
    return "\n".join(lines) + "\n"


async def _stream_events(handler: RequestHandler, request: ChatRequest) -> AsyncIterator[str]:
    """Yield the events of a streamed answer.

    The first event is sent before the answer is sampled, so an error of sampling is an event, not a
    status. Starlette cancels the iteration, and so the sampling, when the client disconnects.
    """
    name = _new_id("chatcmpl")
    opening_delta = {"role": "assistant", "content": ""}
    yield format_event(answers.make_chunk(name, opening_delta, model=request.model))
    try:
        answer, reply = await _reply(handler, request)
    except ApiError as error:  # the status has been sent
        yield format_event(error.json())
        return
    options = request.stream_options
    content, *end = reply.chunks(name, include_usage=options is not None and options.include_usage)
    yield format_event(content)
    # The client may disconnect and send its next request as soon as it has `finish_reason`, so the
    # answer becomes part of the attempt before that chunk is sent.
    handler.record(answer)
    for chunk in end:
        yield format_event(chunk)
    yield format_event("[DONE]")


def _new_id(kind: str) -> str:
    return f"{kind}-{secrets.token_hex(8)}"


async def _cancel_on_disconnect(request: Request, coroutine: Coroutine[Any, Any, T]) -> T:
    """Return the result of `coroutine`, which is cancelled when the client disconnects.

    Raises:
        ClientDisconnect: The client has disconnected.
    """
    task = asyncio.ensure_future(coroutine)
    disconnect = asyncio.ensure_future(_wait_for_disconnect(request))
    try:
        await asyncio.wait({task, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        disconnect.cancel()


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
