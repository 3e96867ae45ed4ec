"""Serve the OpenAI chat API on the loopback interface, in the generator's event loop.

Each attempt has its own random key, which also identifies its requests. No request is served
without a key.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from ratchet.experience.openai_proxy import schema
from ratchet.experience.openai_proxy.schema import ApiError
from ratchet.experience.openai_proxy.session import AgentAnswer, AgentSession
from ratchet.web.connection import ServerLimits
from ratchet.web.guard import Guard, get_bearer_key
from ratchet.web.server import Server

# grace_s: how long the server waits for responses in flight after the last attempt.
# key_bytes: limits the bodies of one attempt's key, to leave room for those of others.
LIMITS = ServerLimits(grace_s=1.0, key_bytes=2**25)
# The official client retries 409, 429 and 5xx unless this header forbids it. A retry would fail
# again here.
NO_RETRY = {"x-should-retry": "false"}

T = TypeVar("T")


@dataclass
class _RunningServer:
    server: Server
    task: asyncio.Task[None]


class Proxy:
    """The server of all open sessions. It listens only while a session is open."""

    def __init__(self, limits: ServerLimits = LIMITS, ignored: Sequence[str] = ()) -> None:
        self._sessions: dict[str, AgentSession] = {}
        self._running: _RunningServer | None = None
        self._limits = limits
        self._app = make_chat_app(self._sessions.get, limits=limits, ignored=ignored)

    @contextlib.asynccontextmanager
    async def open(self, session: AgentSession) -> AsyncIterator[tuple[str, str]]:
        """Serve a session inside the block, and yield its base URL and key.

        Afterwards the key is refused, and the session's running requests are aborted.
        """
        key = f"rk-{secrets.token_urlsafe(32)}"
        self._sessions[key] = session
        if self._running is None:
            self._running = self._start()
        try:
            yield f"http://127.0.0.1:{self._running.server.address[1]}/v1", key
        finally:
            del self._sessions[key]
            session.close()
            if not self._sessions:
                running, self._running = self._running, None
                running.server.stop()
                await running.task

    def _start(self) -> _RunningServer:
        # The socket listens before the server runs: connections wait instead of being refused.
        server = Server(self._app, socket.create_server(("127.0.0.1", 0)), limits=self._limits)
        return _RunningServer(server, asyncio.get_running_loop().create_task(server.run()))


class ChatHandler(Protocol):
    """The handler of the requests with one key."""

    async def answer(self, request: schema.ChatRequest) -> AgentAnswer: ...
    def deliver(self, answer: AgentAnswer) -> None: ...


def make_chat_app(
    find_handler: Callable[[str], ChatHandler | None],
    *,
    hosts: Collection[str] | None = None,
    limits: ServerLimits = ServerLimits(),
    ignored: Sequence[str] = (),
) -> FastAPI:
    """Return the API as an HTTP application.

    Args:
        find_handler: Returns the handler for a key ("" for requests without one), or None.
        hosts: Hosts that requests may name (see `Guard`); None allows any, for servers that require
            a key.
        limits: Limits of connections and bodies.
        ignored: Fields of requests that have no effect.
    """
    ignored_fields = schema.IgnoredFields(ignored)
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    app.add_middleware(Guard, hosts=hosts, format_error=_format_error, limits=limits)

    def find_request_handler(request: Request) -> ChatHandler:
        handler = find_handler(get_bearer_key(request.headers.raw).decode(errors="replace"))
        if handler is None:
            raise ApiError(
                401, "the API key is wrong, or its attempt is over", code="invalid_api_key"
            )
        return handler

    @app.exception_handler(ApiError)
    async def handle_api_error(request: Request, error: ApiError) -> Response:
        return JSONResponse(error.json(), error.status, NO_RETRY)

    @app.exception_handler(HTTPException)
    async def handle_http_error(request: Request, error: HTTPException) -> Response:
        fault = ApiError(
            error.status_code,
            f"{request.method} {request.url.path}: {error.detail}",
            code="unknown_url",
        )
        return JSONResponse(fault.json(), error.status_code, NO_RETRY)

    @app.exception_handler(ClientDisconnect)
    async def handle_disconnect(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=499)  # no client reads it

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        find_request_handler(request)
        return JSONResponse(schema.list_models())

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        handler = find_request_handler(request)  # the key is checked before the body is read
        body = b"".join([chunk async for chunk in request.stream()])
        chat_request = schema.ChatRequest.read(body, ignored_fields)
        if chat_request.stream:
            return StreamingResponse(
                _stream_events(handler, chat_request), media_type="text/event-stream"
            )
        answer = await _cancel_on_disconnect(request, handler.answer(chat_request))
        handler.deliver(answer)
        return JSONResponse(answer.reply.json(_new_completion_id()))

    return app


def _format_error(status: int, message: str, code: str) -> tuple[str, bytes]:
    return "application/json", json.dumps(ApiError(status, message, code=code).json()).encode()


async def _stream_events(handler: ChatHandler, request: schema.ChatRequest) -> AsyncIterator[str]:
    """Yield the events of a streamed answer.

    The first event is sent at once, so that the answer is cancelled if the client disconnects while
    it is sampled.
    """
    name = _new_completion_id()
    yield schema.format_event(schema.make_chunk(name, {"role": "assistant", "content": ""}))
    try:
        answer = await handler.answer(request)
    except ApiError as error:  # the status has been sent
        yield schema.format_event(error.json())
        return
    options = request.stream_options
    content, *end = answer.reply.chunks(
        name, include_usage=options is not None and options.include_usage
    )
    yield schema.format_event(content)
    # The client may leave, and send its next request, as soon as it has the reason of the end, so
    # the answer becomes part of the attempt before that.
    handler.deliver(answer)
    for chunk in end:
        yield schema.format_event(chunk)
    yield schema.format_event("[DONE]")


def _new_completion_id() -> str:
    return f"chatcmpl-{secrets.token_hex(8)}"


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
