"""Answer the requests of OpenAI's and Anthropic's APIs, and of vLLM's additions."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.requests import ClientDisconnect

from ratchet.data.render_thread import run_in_thread
from ratchet.experience.openai_proxy import answers, token_api
from ratchet.experience.openai_proxy.answers import ChatFormat
from ratchet.experience.openai_proxy.anthropic import (
    PATH,
    CountTokensRequest,
    MessagesFormat,
    MessagesRequest,
)
from ratchet.experience.openai_proxy.handler import RequestHandler
from ratchet.experience.openai_proxy.rendering import count_max_chars
from ratchet.experience.openai_proxy.replies import (
    ReplyFormat,
    make_reply,
    make_token_names,
    refuse_alternatives_with_images,
    score_completion,
    stream_reply,
)
from ratchet.experience.openai_proxy.responses_api.format import ResponsesFormat
from ratchet.experience.openai_proxy.responses_api.request import ResponsesRequest
from ratchet.experience.openai_proxy.responses_api.store import StoredResponse
from ratchet.experience.openai_proxy.schema import ChatMessage, ChatRequest
from ratchet.experience.openai_proxy.wire import MODEL, ApiError, IgnoredFields, SamplingFields
from ratchet.web.guard import get_api_key

# Tokens of the different prompts of one request that are with the generator at once. With more, the
# next request of another client waits longer; with fewer, the generator's batches are small.
MAX_TOKENS_AT_ONCE = 2**16
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
            ("POST", PATH, self.messages),
            ("POST", f"{PATH}/count_tokens", self.count_tokens),
            ("POST", "/v1/responses", self.responses),
            ("GET", "/v1/responses/{name}", self.response),
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
        form = ChatFormat(chat_request, _new_id("chatcmpl"))
        return await _respond(request, handler, chat_request, form)

    async def messages(self, request: Request) -> Response:
        handler = self._find_handler(request)
        chat_request = MessagesRequest.read(await _read_body(request), self.ignored).to_chat()
        form = MessagesFormat(chat_request, _new_id("msg", "_"))
        return await _respond(request, handler, chat_request, form)

    async def count_tokens(self, request: Request) -> Response:
        handler = self._find_handler(request)
        chat_request = CountTokensRequest.read(await _read_body(request), self.ignored).to_chat()
        count = await _cancel_on_disconnect(request, handler.count_prompt(chat_request))
        return JSONResponse({"input_tokens": count})

    async def responses(self, request: Request) -> Response:
        handler = self._find_handler(request)
        responses_request = ResponsesRequest.read(await _read_body(request), self.ignored)
        conversation: list[ChatMessage] = []
        if (name := responses_request.previous_response_id) is not None:
            conversation = _find_response(handler, name, status=400).read_messages()
        conversation = [*conversation, *responses_request.list_messages()]
        chat_request = responses_request.to_chat(conversation)
        form = ResponsesFormat(
            responses_request, conversation, _new_id("resp", "_"), handler.responses
        )
        return await _respond(request, handler, chat_request, form)

    async def response(self, request: Request, name: str) -> Response:
        stored = _find_response(self._find_handler(request), name, status=404)
        return Response(stored.body, media_type="application/json")

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
        names = make_token_names(handler, completion_request.return_tokens_as_token_ids)
        name = _new_id("cmpl")
        if completion_request.stream:
            list_events = partial(token_api.list_completion_events, name, completion_request)
            events = await run_in_thread(lambda: list_events(completions, names))
            return StreamingResponse(iter(events), media_type="text/event-stream")
        write = partial(token_api.write_completions, name, completion_request)
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
        names = make_token_names(handler, True)
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
        handler = self.find_handler(get_api_key(request.headers.raw).decode(errors="replace"))
        if handler is None:
            raise ApiError(
                401, "the API key is wrong, or its attempt is over", code="invalid_api_key"
            )
        return handler


def _find_response(handler: RequestHandler, name: str, *, status: int) -> StoredResponse:
    """Return a response of this key. Raises ApiError with `status` if it is not stored."""
    stored = handler.responses.get(name)
    if stored is None:
        raise ApiError(
            status,
            f"there is no response '{name:.80}': it was made with another key or with store=false, "
            "or it has been dropped, as only the latest are kept. Send all items as input",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    return stored


async def _respond(
    request: Request, handler: RequestHandler, chat_request: ChatRequest, form: ReplyFormat
) -> Response:
    """Return the policy's answer to a conversation, whole or as a stream."""
    refuse_alternatives_with_images(chat_request)
    if chat_request.stream:
        events = stream_reply(handler, chat_request, form)
        return StreamingResponse(events, media_type="text/event-stream")
    answer, reply = await _cancel_on_disconnect(request, make_reply(handler, chat_request))
    handler.record(answer)
    form.keep(reply)
    return JSONResponse(form.write_body(reply))


async def _read_body(request: Request) -> bytes:
    return b"".join([chunk async for chunk in request.stream()])


def check_text_size(handler: RequestHandler, texts: Sequence[str]) -> None:
    """Raise ApiError for a text far longer than the context, which would take long to tokenize."""
    longest = max(map(len, texts), default=0)
    limit = count_max_chars(handler.renderer, handler.max_context)
    if longest > limit:
        raise ApiError(
            400,
            f"a text has {longest} characters, but a context of {handler.max_context} tokens takes "
            f"at most {limit}",
            param="prompt",
            code="context_length_exceeded",
        )


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
    if request.max_new_tokens == 0:  # the request only scores the prompt
        return token_api.TokenCompletion(prompt, None, scores)
    answer = await handler.complete(prompt, request, n_top=n_top or 0)
    if n_top is not None:
        completion_scores = await score_completion(handler, answer, n_top)
        scores = completion_scores if scores is None else scores.followed_by(completion_scores)
    return token_api.TokenCompletion(prompt, answer, scores)


async def complete_prompts(
    handler: RequestHandler,
    request: token_api.CompletionRequest,
    prompts: Sequence[Sequence[int]],
) -> list[token_api.TokenCompletion]:
    """Return the completions of all prompts of a request.

    Equal prompts are sampled together, and different ones up to MAX_TOKENS_AT_ONCE.

    Raises:
        ApiError: A prompt is refused. The completions of the other prompts are then aborted.
    """
    free_places = asyncio.Semaphore(max(1, MAX_TOKENS_AT_ONCE // max(map(len, prompts))))

    async def complete(prompt: Sequence[int], count: int) -> Iterator[token_api.TokenCompletion]:
        async with free_places, asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(
                    complete_prompt(
                        handler, prompt, request, n_top=request.logprobs, echo=bool(request.echo)
                    )
                )
                for _ in range(count)
            ]
        return iter([task.result() for task in tasks])

    counts = Counter(map(tuple, prompts))
    try:
        async with asyncio.TaskGroup() as group:
            tasks = {
                prompt: group.create_task(complete(prompt, count))
                for prompt, count in counts.items()
            }
    except ExceptionGroup as errors:
        error: Exception = errors
        while isinstance(error, ExceptionGroup):
            error = error.exceptions[0]
        raise error from None
    return [next(tasks[tuple(prompt)].result()) for prompt in prompts]


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


def _new_id(kind: str, separator: str = "-") -> str:
    return f"{kind}{separator}{secrets.token_hex(16)}"


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
