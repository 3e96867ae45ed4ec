"""Serve an ASGI application on a bound socket, in the caller's event loop or in a thread."""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import socket
import threading
from contextlib import suppress
from typing import Any

import psutil
import uvicorn
from uvicorn.server import ServerState

from ratchet.web.access_log import make_log_config
from ratchet.web.connection import Connections, GuardedProtocol, ServerLimits

log = logging.getLogger(__name__)

BACKLOG = 2048
RETRY_S = 0.1  # pause after the system refused a descriptor
OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
MIN_CONNECTIONS = 8  # even if fewer descriptors are free


class Server:
    """An HTTP server that runs until `stop`.

    It accepts one connection after another, and only while it has room: asyncio's own accept loop
    would spin at full speed when the process has no descriptor left.

    Args:
        access_log: True to log one line for each request, in uvicorn's format. A line that
            would wait for the reader of a full pipe is dropped.
    """

    def __init__(
        self,
        app: Any,
        listener: socket.socket,
        *,
        limits: ServerLimits = ServerLimits(),
        access_log: bool = False,
    ) -> None:
        self.limits = limits
        self.n_accepted = 0
        self.n_refused = 0  # connections that the system failed to accept
        self._listener = listener
        self._state = ServerState()
        self._stop_event = asyncio.Event()
        self._connections = Connections(min(limits.connections, count_free_descriptors() // 2))
        logs: dict[str, Any] = (
            {"log_level": "info", "log_config": make_log_config()}
            if access_log
            else {"log_config": None, "access_log": False}
        )
        self._config = uvicorn.Config(
            app,
            http="h11",
            ws="none",
            lifespan="off",
            proxy_headers=False,
            h11_max_incomplete_event_size=limits.head_bytes,
            timeout_keep_alive=int(limits.head_s) + 1,
            **logs,
        )

    @property
    def address(self) -> tuple[str, int]:
        """Return the host and port of the socket."""
        return self._listener.getsockname()[:2]

    def stop(self) -> None:
        """End `run` after the responses in progress. Call it in the server's event loop."""
        self._stop_event.set()

    async def run(self) -> None:
        """Accept connections until `stop`, then close the socket and all connections."""
        self._config.load()
        self._listener.setblocking(False)
        self._listener.listen(BACKLOG)
        accept_task = asyncio.ensure_future(self._accept())
        stop_task = asyncio.ensure_future(self._stop_event.wait())
        try:
            await asyncio.wait({accept_task, stop_task}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            # An exception of `_accept` is raised below: a server that accepts no more connections
            # must not keep running.
            results = await _cancel(accept_task, stop_task)
            self._listener.close()
            await self._close()
        if isinstance(results[0], Exception):
            raise results[0]

    async def _accept(self) -> None:
        """Accept connections until cancelled, each as soon as the limit allows it."""
        loop = asyncio.get_running_loop()
        while True:
            await self._connections.can_accept.wait()
            try:
                connection, _ = await loop.sock_accept(self._listener)
            except OSError as error:
                self.n_refused += 1
                if error.errno in OUT_OF_DESCRIPTORS:
                    self._connections.drop_oldest()
                    await asyncio.sleep(RETRY_S)
                continue
            self.n_accepted += 1
            # At the limit, drop the longest-waiting connection for the new one.
            self._connections.make_room()
            with suppress(OSError):
                # Head and body are two writes. On a connection that is kept, the second would wait
                # some 40 ms for the client's acknowledgement of the first. asyncio sets this only
                # on sockets that name the protocol, which `socket.create_server` does not.
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                await loop.connect_accepted_socket(self._make_protocol, connection)

    def _make_protocol(self) -> GuardedProtocol:
        return GuardedProtocol(self._config, self._state, self._connections, self.limits)

    async def _close(self) -> None:
        for connection in list(self._connections.open):
            connection.shutdown()
        if self._state.tasks:
            await asyncio.wait(list(self._state.tasks), timeout=self.limits.grace_s)
        await _cancel(*self._state.tasks)
        for connection in list(self._connections.open):
            connection.drop("the server stops")
        # Transports close in the next round of the event loop.
        await asyncio.sleep(0)


class ServerThread:
    """A server in its own thread and event loop, for callers that have no loop."""

    def __init__(
        self, app: Any, listener: socket.socket, *, limits: ServerLimits = ServerLimits()
    ) -> None:
        self._server = Server(app, listener, limits=limits)
        self.address = self._server.address
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True, name="http")
        self._thread.start()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._server.run())

    def close(self) -> None:
        """Stop the server and wait for its end."""
        with suppress(RuntimeError):  # the server has ended already and its loop is closed
            self._loop.call_soon_threadsafe(self._server.stop)
        self._thread.join()


def count_free_descriptors() -> int:
    """Return the number of file descriptors that this process may still open.

    The minimum is twice `MIN_CONNECTIONS`.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return 2**20
    return max(limit - psutil.Process().num_fds(), 2 * MIN_CONNECTIONS)


async def _cancel(*tasks: asyncio.Future[Any]) -> list[Any]:
    for task in tasks:
        task.cancel()
    return await asyncio.gather(*tasks, return_exceptions=True)
