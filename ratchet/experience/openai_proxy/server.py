"""Serve the APIs of OpenAI, Anthropic and vLLM in the generator's event loop.

Each attempt has its own random key, which also identifies its requests. No request is served
without a key.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from ratchet.errors import ConfigError
from ratchet.experience.openai_proxy import anthropic
from ratchet.experience.openai_proxy.config import LOCAL_SERVER, AgentServerSettings
from ratchet.experience.openai_proxy.handler import RequestHandler
from ratchet.experience.openai_proxy.routes import Routes
from ratchet.experience.openai_proxy.session import AgentSession
from ratchet.experience.openai_proxy.wire import ApiError, IgnoredFields
from ratchet.web.connection import ServerLimits
from ratchet.web.guard import Guard
from ratchet.web.server import OUT_OF_DESCRIPTORS, Server

# grace_s: how long the server waits for responses in flight after the last attempt.
# bodies_bytes_per_key: maximum bytes of all request bodies that one attempt has in memory.
LIMITS = ServerLimits(grace_s=1.0, bodies_bytes_per_key=2**25)
# The official client retries 409, 429 and 5xx unless this header forbids it. A retry would fail
# again.
NO_RETRY = {"x-should-retry": "false"}

T = TypeVar("T")


@dataclass
class _RunningServer:
    server: Server
    task: asyncio.Task[None]


class Proxy:
    """The server of all open sessions. It listens only while a session is open."""

    def __init__(
        self,
        limits: ServerLimits = LIMITS,
        settings: AgentServerSettings = LOCAL_SERVER,
    ) -> None:
        self._sessions: dict[str, AgentSession] = {}
        self._running: _RunningServer | None = None
        self._limits = limits
        self._settings = settings
        self._app = make_chat_app(self._sessions.get, limits=limits, ignored=settings.ignored)

    @contextlib.asynccontextmanager
    async def open(self, session: AgentSession) -> AsyncIterator[tuple[str, str]]:
        """Serve a session inside the block, and yield its base URL and key.

        Afterwards the key is refused, and the session's running requests are aborted.
        """
        key = f"rk-{secrets.token_urlsafe(32)}"
        if self._running is None:
            self._running = self._start()
        self._sessions[key] = session
        try:
            host = self._settings.public_host or self._settings.host
            url_host = f"[{host}]" if ":" in host else host
            yield f"http://{url_host}:{self._running.server.address[1]}/v1", key
        finally:
            del self._sessions[key]
            session.close()
            if not self._sessions:
                running, self._running = self._running, None
                running.server.stop()
                await running.task

    def _start(self) -> _RunningServer:
        # The socket listens before the server runs: connections wait instead of being refused.
        host = self._settings.host
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            listener = socket.create_server((host, 0), family=family)
        except OSError as error:
            if error.errno in OUT_OF_DESCRIPTORS:
                raise
            raise ConfigError(
                f"agent.host={host} is not an address of this machine ({error.strerror or error}): "
                "set it to 127.0.0.1, or to 0.0.0.0 for all of its addresses"
            ) from error
        server = Server(self._app, listener, limits=self._limits)
        return _RunningServer(server, asyncio.get_running_loop().create_task(server.run()))


def make_chat_app(
    find_handler: Callable[[str], RequestHandler | None],
    *,
    hosts: Collection[str] | None = None,
    limits: ServerLimits = ServerLimits(),
    ignored: Sequence[str] = (),
) -> FastAPI:
    """Return the API as an HTTP application.

    Args:
        find_handler: Returns the handler for a key ("" for requests without one), or None.
        hosts: Accepted values of the Host header (see `Guard`); None accepts any, for servers that
            require a key.
        limits: Limits of connections and bodies.
        ignored: Fields of requests that have no effect.
    """
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    app.add_middleware(Guard, hosts=hosts, format_error=_format_error, limits=limits)
    Routes(find_handler, IgnoredFields(ignored)).add_to(app)

    @app.exception_handler(ApiError)
    async def handle_api_error(request: Request, error: ApiError) -> Response:
        return JSONResponse(_describe_error(request.url.path, error), error.status, NO_RETRY)

    @app.exception_handler(HTTPException)
    async def handle_http_error(request: Request, error: HTTPException) -> Response:
        fault = ApiError(
            error.status_code,
            f"{request.method} {request.url.path}: {error.detail}",
            code="unknown_url",
        )
        return JSONResponse(_describe_error(request.url.path, fault), error.status_code, NO_RETRY)

    @app.exception_handler(ClientDisconnect)
    async def handle_disconnect(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=499)  # no client reads it

    return app


def _format_error(path: str, status: int, message: str, code: str) -> tuple[str, bytes]:
    body = _describe_error(path, ApiError(status, message, code=code))
    return "application/json", json.dumps(body).encode()


def _describe_error(path: str, error: ApiError) -> dict[str, Any]:
    """Return the JSON of an error, in the form of the API that the path belongs to."""
    is_anthropic = path == anthropic.PATH or path.startswith(f"{anthropic.PATH}/")
    return anthropic.describe_error(error) if is_anthropic else error.json()
