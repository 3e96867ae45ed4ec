"""Limits of one connection and of all connections together.

A connection that keeps the server waiting has a deadline, and is the first to be closed when there
are too many. HTTP is handled by uvicorn with its h11 protocol. Uvicorn has no deadline for a
request's head or for a client that does not read, and it does not bound the number of connections.
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
class ServerLimits:
    """The limits of a server. Times are in seconds, sizes in bytes."""

    # Connections open at the same time; fewer if the process may not open as many descriptors.
    connections: int = 512
    # Time from the connection, or from the last response, to the end of the next request's head.
    head_s: float = 10.0
    # Time from the head of a request to the end of its body.
    body_s: float = 60.0
    # Time within which a client must read part of the data waiting to be sent to it.
    write_s: float = 30.0
    # Size of a request's head.
    head_bytes: int = 2**14
    # Size of a request's body.
    body_bytes: int = 2**23
    # Total size of the bodies of all unanswered requests: with 512 connections, half a MiB for each
    # on average.
    total_body_bytes: int = 2**28
    # Size of the bodies of unanswered requests with the same key (Authorization).
    bodies_bytes_per_key: int = 2**28
    # Time for responses that are being sent when the server stops.
    grace_s: float = 5.0


class Connections:
    """The open connections of one server, and those that wait for their client.

    A connection waits for its client while its next request is incomplete. At `limit` connections,
    a new connection replaces the one that has waited longest. If none waits, because every request
    is being answered, the new connection stays in the kernel's queue instead.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.open: set[GuardedProtocol] = set()
        # Used as an ordered set: a dictionary keeps the order in which connections began to wait.
        self.waiting: dict[GuardedProtocol, None] = {}
        self.can_accept = asyncio.Event()
        self.can_accept.set()

    def mark_waiting(self, connection: GuardedProtocol) -> None:
        """Record that this connection now waits for its client."""
        self.open.add(connection)
        self.waiting.pop(connection, None)
        self.waiting[connection] = None
        self._update()

    def mark_answering(self, connection: GuardedProtocol) -> None:
        """Record that this connection's request is complete and being answered."""
        self.waiting.pop(connection, None)
        self._update()

    def remove(self, connection: GuardedProtocol) -> None:
        """Forget a closed connection."""
        self.open.discard(connection)
        self.waiting.pop(connection, None)
        self._update()

    def make_room(self) -> None:
        """Drop the longest-waiting connections until one more fits."""
        while len(self.open) >= self.limit and self.waiting:
            self.drop_oldest()

    def drop_oldest(self) -> None:
        """Drop the longest-waiting connection, if any waits."""
        if self.waiting:
            connection = next(iter(self.waiting))
            self.remove(connection)
            connection.drop("there are too many connections")

    def _update(self) -> None:
        if self.waiting or len(self.open) < self.limit:
            self.can_accept.set()
        else:
            self.can_accept.clear()


class StrictConnection(h11.Connection):
    """An h11 connection that refuses requests of ambiguous length (RFC 9112, 6.1).

    This prevents request smuggling: otherwise a proxy and this server may disagree on where the
    body ends, and this server would parse the rest of the body as another request.
    """

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            names = [name for name, _ in event.headers]
            if b"transfer-encoding" in names and (
                b"content-length" in names or event.http_version < b"1.1"
            ):
                raise h11.RemoteProtocolError(
                    "the body has both a length and chunks, or is chunked in HTTP/1.0"
                )
        return event


class GuardedProtocol(H11Protocol):
    """Uvicorn's protocol for one connection, with the deadlines of `limits`."""

    def __init__(
        self,
        config: uvicorn.Config,
        state: ServerState,
        connections: Connections,
        limits: ServerLimits,
    ) -> None:
        super().__init__(config, state, {}, asyncio.get_running_loop())
        self.logger: Any = QuietLogger(self.logger, {})
        self.conn = StrictConnection(h11.SERVER, limits.head_bytes)
        self._connections = connections
        self._limits = limits
        self._deadline: asyncio.TimerHandle | None = None
        self._write_deadline: asyncio.TimerHandle | None = None
        self._unsent_bytes = 0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._wait_for_client(self._limits.head_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_deadline()
        self._unset_keepalive_if_required()
        self.resume_writing()
        self._connections.remove(self)
        super().connection_lost(exc)

    def handle_events(self) -> None:
        previous_cycle = self.cycle
        super().handle_events()
        if self.cycle is None or self.cycle.response_complete:
            return
        if not self.cycle.more_body:
            self._cancel_deadline()
            self._connections.mark_answering(self)
        elif self.cycle is not previous_cycle:
            # Applications that read the body hold it to `body_s` themselves (`Body` in bodies.py).
            # This later deadline is for applications that don't read the body.
            self._wait_for_client(2 * self._limits.body_s)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # False if one packet held several requests, and the next one has begun by now.
        if self.cycle.response_complete:
            self._wait_for_client(self._limits.head_s)

    def send_400_response(self, msg: str) -> None:
        # End the request for the application too.
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        # If a response has begun, h11 allows no second one.
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

    def drop(self, reason: str) -> None:
        """Close the connection at once; unsent data is lost."""
        log.debug("a connection from %s is closed: %s", self.client, reason)
        self.transport.abort()

    def _wait_for_client(self, seconds: float) -> None:
        self._connections.mark_waiting(self)
        self._set_deadline(seconds)

    def _set_deadline(self, seconds: float) -> None:
        self._cancel_deadline()
        self._unsent_bytes = self.transport.get_write_buffer_size()
        self._deadline = self.loop.call_later(seconds, self._expire)

    def _expire(self) -> None:
        unsent_bytes = self.transport.get_write_buffer_size()
        if 0 < unsent_bytes < self._unsent_bytes:
            # The client is still reading the end of the last response.
            self._set_deadline(self._limits.head_s)
        else:
            self.drop("its request did not come")

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class QuietLogger(logging.LoggerAdapter[logging.Logger]):
    """A logger for uvicorn that lowers records about clients to DEBUG; exceptions stay errors."""

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
