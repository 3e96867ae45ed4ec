"""ASGI middleware that checks host names, limits bodies and turns exceptions into responses."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from collections.abc import Callable, Collection, Iterable
from typing import Any

from ratchet.web.bodies import RETRY_S, BodyLimiter, BodyRefused, Message
from ratchet.web.connection import ServerLimits

log = logging.getLogger(__name__)

LOOPBACK = ("127.0.0.1", "localhost", "::1")
ORIGIN_SCHEMES = ("http://", "https://")  # allowed in an Origin header
HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([\w.-]+))(?::[0-9]*)?", re.ASCII)
# Maximum bytes of a response body that are sent at once: each piece has its own write deadline.
MAX_PIECE_BYTES = 2**18

# (path, status, message, code) -> (content type, body)
ErrorFormatter = Callable[[str, int, str, str], tuple[str, bytes]]


def format_plain_error(path: str, status: int, message: str, code: str) -> tuple[str, bytes]:
    """Return an error response's content type and body as plain text."""
    return "text/plain; charset=utf-8", message.encode()


class Guard:
    """An ASGI middleware that refuses foreign hosts and turns exceptions into responses.

    An exception of the application is logged once, under an id that the client gets with status
    500.

    Args:
        app: the application.
        hosts: hosts allowed in the Host and Origin headers of a request; None: any. A server
            without an API key needs them: otherwise a page of another site could send requests
            through the user's browser (DNS rebinding, or a simple POST).
        format_error: turns an error into a content type and a body.
        limits: limits of request bodies.
    """

    def __init__(
        self,
        app: Any,
        *,
        hosts: Collection[str] | None = None,
        format_error: ErrorFormatter = format_plain_error,
        limits: ServerLimits = ServerLimits(),
    ) -> None:
        self.app = app
        self.hosts = hosts
        self.format_error = format_error
        self.bodies = BodyLimiter(limits)

    async def __call__(self, scope: Message, receive: Any, send: Any) -> None:
        has_begun = False

        async def send_in_pieces(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            for piece in _split_body(message):
                await send(piece)

        async def refuse(status: int, message: str, code: str) -> None:
            if not has_begun:
                content_type, body = self.format_error(scope["path"], status, message, code)
                headers = [
                    (b"content-type", content_type.encode()),
                    (b"content-length", str(len(body)).encode()),
                ]
                if code == "busy":
                    headers.append((b"retry-after", str(RETRY_S).encode()))
                await send({"type": "http.response.start", "status": status, "headers": headers})
                await send({"type": "http.response.body", "body": body})

        if self.hosts is not None and (reason := explain_refusal(scope["headers"], self.hosts)):
            await refuse(403, reason, "forbidden_host")
            return
        body = self.bodies.begin(get_api_key(scope["headers"]), receive)
        try:
            await self.app(scope, body, send_in_pieces)
        except asyncio.CancelledError:
            await refuse(503, "the server is stopping", "stopping")
        except BodyRefused as error:
            await refuse(error.status, str(error), error.code)
        # A request whose application fails must not end the server.
        except Exception:
            error_id = secrets.token_hex(4)
            log.exception("request %s failed: %s %s", error_id, scope["method"], scope["path"])
            await refuse(
                500,
                f"the server failed; its log has the reason under {error_id}",
                "internal_error",
            )
        finally:
            body.release()


def get_api_key(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return the bearer key in the first Authorization header, else that in the first x-api-key
    header, as Anthropic's clients send it; b"" if there is none."""
    values: dict[bytes, bytes] = {}
    for name, value in headers:
        values.setdefault(name, value)
    scheme_and_key = values.get(b"authorization", b"").split()
    if len(scheme_and_key) == 2 and scheme_and_key[0].lower() == b"bearer":
        return scheme_and_key[1]
    return values.get(b"x-api-key", b"")


def explain_refusal(headers: Iterable[tuple[bytes, bytes]], hosts: Collection[str]) -> str:
    """Return the reason to refuse a request's Host or Origin; "" if both are among `hosts`."""
    values = [(name, value.decode("latin-1")) for name, value in headers]
    request_hosts = [value for name, value in values if name == b"host"]
    for host in request_hosts or [""]:
        if _parse_host(host) not in hosts:
            return (
                f"the request names the host '{host:.80}', and this server only answers to "
                f"{', '.join(hosts)}"
            )
    for origin in (value for name, value in values if name == b"origin"):
        if (
            not origin.startswith(ORIGIN_SCHEMES)
            or _parse_host(origin.partition("//")[2]) not in hosts
        ):
            return (
                f"the request comes from a page of '{origin:.80}', and a server without an API key "
                "only answers local pages"
            )
    return ""


def _parse_host(address: str) -> str:
    """Return the host of "host:port", in lower case and without brackets; "" if it is invalid."""
    match = HOST.fullmatch(address)
    return (match[1] or match[2]).lower() if match else ""


def _split_body(message: Message) -> Iterable[Message]:
    """Return the message, or several messages with pieces of its body if the body is long."""
    body = message.get("body", b"")
    if len(body) <= MAX_PIECE_BYTES:
        return (message,)
    starts = range(0, len(body), MAX_PIECE_BYTES)
    last = starts[-1]
    return (
        {
            **message,
            "body": body[start : start + MAX_PIECE_BYTES],
            "more_body": start != last or message.get("more_body", False),
        }
        for start in starts
    )
