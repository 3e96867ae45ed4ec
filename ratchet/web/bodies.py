"""Limit the size and duration of request bodies.

The bytes of a body count until its request is answered, not only while it is read, because a
request that waits for a slow answer holds memory too.
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
    """The error for a body that exceeds a limit. The rest of the body is not read.

    Attributes:
        status: HTTP status of the response.
        code: Short name of the reason, such as "busy".
    """

    def __init__(self, status: int, message: str, code: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


class BodyLimiter:
    """A counter of the body bytes of unanswered requests, by API key and in total."""

    def __init__(self, limits: ServerLimits = ServerLimits()) -> None:
        self.limits, self.bytes_by_key = limits, Counter[bytes]()

    def begin(self, key: bytes, receive: Receive) -> Body:
        """Return the body of a new request with this API key (b"" for none)."""
        return Body(self, key, receive)


class Body:
    """The ASGI `receive` callable of one request, with limits.

    A call raises BodyRefused if the body is too large or too slow, or if unanswered requests hold
    too many bytes. Call `release` once the request is answered.
    """

    def __init__(self, limiter: BodyLimiter, key: bytes, receive: Receive) -> None:
        self.limiter, self.key, self.size = limiter, key, 0
        self._receive, self._has_more = receive, True
        self._deadline = asyncio.get_running_loop().time() + limiter.limits.body_s

    async def __call__(self) -> Message:
        if not self._has_more:
            return await self._receive()  # waits for the client to disconnect
        limits = self.limiter.limits
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError:
            reason = f"the body did not arrive within {limits.body_s:g} s"
            raise BodyRefused(408, reason, "body_too_slow") from None
        self._has_more = message.get("more_body", False)
        self._count(len(message.get("body", b"")))
        return message

    def release(self) -> None:
        """Stop counting the bytes of the request."""
        self._count(-self.size)
        self._has_more = False

    def _count(self, size: int) -> None:
        """Count further bytes of the request, or fewer if `size` is below 0.

        Raises BodyRefused if the request, its key or the server then has too many.
        """
        limits, bytes_by_key = self.limiter.limits, self.limiter.bytes_by_key
        self.size += size
        bytes_by_key[self.key] += size
        if size <= 0:
            bytes_by_key += Counter()  # drops keys whose count is zero
            return
        if self.size > limits.body_bytes:
            reason = f"the body has more than {limits.body_bytes} bytes"
            raise BodyRefused(413, reason, "body_too_large")
        if bytes_by_key[self.key] > limits.bodies_bytes_per_key:
            limit = limits.bodies_bytes_per_key
            reason = f"unanswered requests with this key hold more than {limit} bytes"
            raise BodyRefused(429, f"{reason}: send the request again later", "busy")
        if bytes_by_key.total() > limits.total_body_bytes:
            reason = f"unanswered requests hold more than {limits.total_body_bytes} bytes"
            raise BodyRefused(503, f"{reason}: send the request again later", "busy")
