"""Limit the size and duration of request bodies.

A body counts until its request is answered, not only while it is read, because requests that wait
for a slow answer hold memory too.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from ratchet.web.connection import ServerLimits

RETRY_S = 5  # seconds after which a client may repeat a refused request

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]


class BodyRefused(Exception):
    """Raised for a body that exceeds a limit, and is not read to its end.

    status: HTTP status of the answer.
    """

    def __init__(self, status: int, message: str, code: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


class BodyReader:
    """A counter of the body bytes of unanswered requests, by key and in total."""

    def __init__(self, limits: ServerLimits = ServerLimits()) -> None:
        self.limits, self.held = limits, Counter[bytes]()

    def begin(self, key: bytes, receive: Receive) -> Body:
        """Return the body of a new request with this key (b"" for none)."""
        return Body(self, key, receive)


class Body:
    """The ASGI `receive` of one request. Call `release` once the request is answered.

    A call raises BodyRefused if the body is too large or too slow, or if unanswered requests hold
    too many bytes.
    """

    def __init__(self, bodies: BodyReader, key: bytes, receive: Receive) -> None:
        self.bodies, self.key, self.size = bodies, key, 0
        self._receive, self._has_more = receive, True
        self._deadline = asyncio.get_running_loop().time() + bodies.limits.body_s

    async def __call__(self) -> Message:
        if not self._has_more:
            return await self._receive()  # waits for the client to leave
        limits = self.bodies.limits
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError:
            late = f"the body was not here after {limits.body_s:g} s"
            raise BodyRefused(408, late, "body_too_slow") from None
        self._has_more = message.get("more_body", False)
        self._count(len(message.get("body", b"")))
        return message

    def release(self) -> None:
        """Stop counting the bytes of the request."""
        self._count(-self.size)
        self._has_more = False

    def _count(self, size: int) -> None:
        limits, held = self.bodies.limits, self.bodies.held
        self.size += size
        held[self.key] += size
        if size <= 0:
            held += Counter()  # drops keys that hold nothing
            return
        if self.size > limits.body_bytes:
            reason = f"the body has more than {limits.body_bytes} bytes"
            raise BodyRefused(413, reason, "body_too_large")
        if held[self.key] > limits.key_bytes:
            reason = (
                "requests of this key that wait for an answer have more than "
                f"{limits.key_bytes} bytes"
            )
            raise BodyRefused(429, f"{reason}: ask again later", "busy")
        if held.total() > limits.bodies_bytes:
            reason = f"requests that wait for an answer have more than {limits.bodies_bytes} bytes"
            raise BodyRefused(503, f"{reason}: ask again later", "busy")
