"""The OpenAI chat API on this machine's loopback, in the event loop of the generator. Each attempt
has a random key of its own, which is also what tells its requests from those of others; there is no
way in without one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Collection, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from ratchet.experience.openai_proxy import schema
from ratchet.experience.openai_proxy.schema import ApiError
from ratchet.experience.openai_proxy.session import Answer, Session
from ratchet.web.connection import Limits
from ratchet.web.guard import Guard, bearer_key
from ratchet.web.server import Server

# Answers that are on their way when the last attempt ends are not waited for longer than a second.
# What one attempt asks leaves room for what others ask.
LIMITS = Limits(grace_s=1.0, key_bytes=2**25)
# The official client repeats what fails with 409, 429 or 5xx, unless it is told not to: here it
# would fail again.
NO_RETRY = {"x-should-retry": "false"}

T = TypeVar("T")


@dataclass
class _Serving:
    server: Server
    task: asyncio.Task[None]


class Proxy:
    """Serves the sessions that are open. It listens only while there is one."""

    def __init__(self, limits: Limits = LIMITS) -> None:
        self._sessions: dict[str, Session] = {}
        self._serving: _Serving | None = None
        self._limits = limits
        self._app = chat_app(self._sessions.get, limits=limits)

    @contextlib.asynccontextmanager
    async def open(self, session: Session) -> AsyncIterator[tuple[str, str]]:
        """(base URL, key) of the session; afterwards the key opens nothing, and what the session
        had running is aborted."""
        key = f"rk-{secrets.token_urlsafe(32)}"
        self._sessions[key] = session
        if self._serving is None:
            self._serving = self._start()
        try:
            yield f"http://127.0.0.1:{self._serving.server.address[1]}/v1", key
        finally:
            del self._sessions[key]
            session.close()
            if not self._sessions:
                serving, self._serving = self._serving, None
                serving.server.stop()
                await serving.task

    def _start(self) -> _Serving:
        # From here on connections wait instead of being refused.
        server = Server(self._app, socket.create_server(("127.0.0.1", 0)), limits=self._limits)
        return _Serving(server, asyncio.get_running_loop().create_task(server.run()))


class Answers(Protocol):
    """Who answers the requests with one key."""

    async def answer(self, request: schema.Request) -> Answer: ...
    def deliver(self, answer: Answer) -> None: ...


def chat_app(
    find: Callable[[str], Answers | None],
    *,
    names: Collection[str] | None = None,
    limits: Limits = Limits(),
) -> FastAPI:
    """Return the API over HTTP.

    find: gives what answers to a key ("" where a request has none), or None.
    names: hosts that requests may name (see `Guard`); None: any, for servers that want a key.
    """
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    app.add_middleware(Guard, names=names, form=_error_body, limits=limits)

    def session_of(request: Request) -> Answers:
        session = find(bearer_key(request.headers.raw).decode(errors="replace"))
        if session is None:
            raise ApiError(
                401, "the API key is wrong, or its attempt is over", code="invalid_api_key"
            )
        return session

    @app.exception_handler(ApiError)
    async def refused(request: Request, error: ApiError) -> Response:
        return JSONResponse(error.json(), error.status, NO_RETRY)

    @app.exception_handler(HTTPException)
    async def unknown(request: Request, error: HTTPException) -> Response:
        fault = ApiError(
            error.status_code,
            f"{request.method} {request.url.path}: {error.detail}",
            code="unknown_url",
        )
        return JSONResponse(fault.json(), error.status_code, NO_RETRY)

    @app.exception_handler(ClientDisconnect)
    async def gone(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=499)  # no client reads it

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        session_of(request)
        return JSONResponse(schema.models())

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        session = session_of(request)  # before a byte of the body is read
        asked = schema.Request.read(b"".join([part async for part in request.stream()]))
        if asked.stream:
            return StreamingResponse(_events(session, asked), media_type="text/event-stream")
        answer = await _unless_gone(request, session.answer(asked))
        session.deliver(answer)
        return JSONResponse(answer.reply.json(_name()))

    return app


def _error_body(status: int, message: str, code: str) -> tuple[str, bytes]:
    return "application/json", json.dumps(ApiError(status, message, code=code).json()).encode()


async def _events(session: Answers, asked: schema.Request) -> AsyncIterator[str]:
    """Begins at once, so that a client can leave while its answer is sampled. It is cancelled where
    one does."""
    name = _name()
    yield schema.event(schema.chunk(name, {"role": "assistant", "content": ""}))
    try:
        answer = await session.answer(asked)
    except ApiError as error:  # the status has been sent
        yield schema.event(error.json())
        return
    options = asked.stream_options
    chunks = list(
        answer.reply.chunks(name, include_usage=options is not None and options.include_usage)
    )
    for chunk in chunks[:-1]:
        yield schema.event(chunk)
    session.deliver(answer)  # before the last of it: a client may ask again as soon as it has that
    yield schema.event(chunks[-1])
    yield schema.event("[DONE]")


def _name() -> str:
    return f"chatcmpl-{secrets.token_hex(8)}"


async def _unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client leaves. Raises ClientDisconnect
    then."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_departure(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        gone.cancel()


async def _departure(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
