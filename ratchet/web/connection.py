"""Limits of one connection and of all together. A connection that keeps the server waiting has a
deadline, and is the first to go when there are too many.

The HTTP itself is uvicorn's (its protocol on h11), which has no deadline for a request's head or
for a client that does not read, and does not bound how many connections are open.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Limits:
    """What a server allows. Times are in seconds, sizes in bytes."""

    # Open at the same time; fewer where the process may not have as many descriptors.
    connections: int = 512
    # From the connection, or from the last answer, to the end of the next request's head.
    head_s: float = 10.0
    # From the head of a request to the end of its body.
    body_s: float = 60.0
    # In which a client must read some of what waits to be sent to it.
    write_s: float = 30.0
    # Of a request's head.
    head_bytes: int = 2**14
    # Of a request's body.
    body_bytes: int = 2**23
    # Of the bodies of all requests that are not answered yet: half a MiB for each connection.
    bodies_bytes: int = 2**28
    # Of those with the same key (Authorization).
    key_bytes: int = 2**28
    # For answers that are on their way when the server stops.
    grace_s: float = 5.0


class Connections:
    """The connections of one server, and which of them keep it waiting.

    A connection waits for its client while its next request is not there whole. With `most`
    connections, a new one takes the place of the one that has waited longest; where all others have
    their requests answered, the new one waits in the kernel's queue instead.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.open: set[GuardedProtocol] = set()
        # The keys alone count; a dictionary keeps the order in which they began to wait.
        self.waiting: dict[GuardedProtocol, None] = {}
        self.has_room = asyncio.Event()
        self.has_room.set()

    def wait(self, connection: GuardedProtocol) -> None:
        """Note that the server waits for this connection's client from now on."""
        self.open.add(connection)
        self.waiting.pop(connection, None)
        self.waiting[connection] = None
        self._update()

    def answer(self, connection: GuardedProtocol) -> None:
        """Note that this connection's request is there whole."""
        self.waiting.pop(connection, None)
        self._update()

    def leave(self, connection: GuardedProtocol) -> None:
        """Forget a connection that is closed."""
        self.open.discard(connection)
        self.waiting.pop(connection, None)
        self._update()

    def make_room(self) -> None:
        """Drop the connections that have waited longest until one more fits."""
        while len(self.open) >= self.most and self.waiting:
            self.drop_oldest()

    def drop_oldest(self) -> None:
        """Drop the connection that has waited longest, if any waits."""
        if self.waiting:
            connection = next(iter(self.waiting))
            self.leave(connection)
            connection.drop("there are too many connections")

    def _update(self) -> None:
        if self.waiting or len(self.open) < self.most:
            self.has_room.set()
        else:
            self.has_room.clear()


class Framed(h11.Connection):
    """h11 that refuses requests whose end a proxy in front may see elsewhere (RFC 9112, 6.1).

    What one of the two reads as the rest of a body would be another request for the other.
    """

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            names = [name for name, _ in event.headers]
            if b"transfer-encoding" in names and (
                b"content-length" in names or event.http_version < b"1.1"
            ):
                raise h11.RemoteProtocolError("a body of two lengths, or chunked in HTTP/1.0")
        return event


class GuardedProtocol(H11Protocol):
    """One connection: uvicorn's, within `limits`."""

    def __init__(
        self, config: uvicorn.Config, state: ServerState, connections: Connections, limits: Limits
    ) -> None:
        super().__init__(config, state, {}, asyncio.get_running_loop())
        self.logger: Any = Quiet(self.logger, {})
        self.conn = Framed(h11.SERVER, limits.head_bytes)
        self._connections, self._limits = connections, limits
        self._deadline: asyncio.TimerHandle | None = None
        self._write_deadline: asyncio.TimerHandle | None = None
        self._unsent = 0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._wait(self._limits.head_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_deadline()
        self._unset_keepalive_if_required()
        self.resume_writing()
        self._connections.leave(self)
        super().connection_lost(exc)

    def handle_events(self) -> None:
        cycle = self.cycle
        super().handle_events()
        if self.cycle is None or self.cycle.response_complete:
            return
        if not self.cycle.more_body:
            self._cancel_deadline()
            self._connections.answer(self)
        elif self.cycle is not cycle:
            # The application refuses a body that is late, with an answer. This deadline is for one
            # that does not read it.
            self._wait(2 * self._limits.body_s)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # Of several requests in one packet the next may have begun by now.
        if self.cycle.response_complete:
            self._wait(self._limits.head_s)

    def send_400_response(self, msg: str) -> None:
        # The request that this ends is over for the application too.
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        # Where an answer has begun, h11 allows no second one.
        try:
            super().send_400_response(msg)
        except h11.LocalProtocolError:
            self.transport.abort()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._write_deadline is None:
            self._write_deadline = self.loop.call_later(
                self._limits.write_s, self.drop, "its client does not read"
            )

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_deadline is not None:
            self._write_deadline.cancel()
            self._write_deadline = None

    def shutdown(self) -> None:
        with suppress(h11.LocalProtocolError):
            super().shutdown()

    def drop(self, why: str) -> None:
        """Close the connection at once; what was not sent is lost."""
        log.debug("a connection from %s is closed: %s", self.client, why)
        self.transport.abort()

    def _wait(self, seconds: float) -> None:
        self._connections.wait(self)
        self._arm(seconds)

    def _arm(self, seconds: float) -> None:
        self._cancel_deadline()
        self._unsent = self.transport.get_write_buffer_size()
        self._deadline = self.loop.call_later(seconds, self._expire)

    def _expire(self) -> None:
        unsent = self.transport.get_write_buffer_size()
        if 0 < unsent < self._unsent:
            # The end of the last answer is still being read.
            self._arm(self._limits.head_s)
        else:
            self.drop("its request did not come")

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class Quiet(logging.LoggerAdapter[logging.Logger]):
    """uvicorn's log, in which what a client does is worth a line of debugging at most. Only
    exceptions are errors."""

    @property
    def level(self) -> int:
        return self.logger.level

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        error = kwargs.get("exc_info")
        super().log(level if error is not None else min(level, logging.DEBUG), msg, *args, **kwargs)

    def process(
        self, msg: Any, kwargs: MutableMapping[str, Any]
    ) -> tuple[Any, MutableMapping[str, Any]]:
        return msg, kwargs
