"""The worker process of `ratchet.environments.workers.pool`: plays attempts of one environment in
several threads.

Each thread has its own event loop, so that a blocking call delays only the attempts of its thread.
The main thread reads the driver's frames. The process ends when the driver ends, even if the driver
is killed.
"""

from __future__ import annotations

import asyncio
import copy
import ctypes
import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Mapping
from typing import Any, NoReturn

from ratchet.config.resolve import build, resolve
from ratchet.environments.workers.protocol import HEAD, frame, packed, unpacked
from ratchet.protocols import Environment, HasStopStrings, HasTools
from ratchet.utils import credentials

PR_SET_PDEATHSIG = 1


def main(descriptor: int, driver: int) -> None:
    """Serve the driver's calls; never return.

    The first frame holds the environment's section ("of") and the credentials; the others are calls
    and cancellations.

    Args:
        descriptor: File descriptor of the socket to the driver.
        driver: Process ID of the driver.
    """
    _end_with(driver)
    os.dup2(2, 1)  # an environment's prints must not reach the driver's standard output
    faulthandler.enable()
    connection = socket.socket(fileno=descriptor)
    first = _receive(connection)
    try:
        credentials.offer(first["credentials"])
        server = _Server(connection, build(resolve("played", first["of"])))
    except (Exception, SystemExit):  # user code
        connection.sendall(frame({"error": traceback.format_exc()}))
        _end()
    connection.sendall(frame({"ready": True}))
    while True:
        server.take(_receive(connection))


def _end_with(driver: int) -> None:
    """Let the kernel kill this process when the driver dies, even if an environment holds the GIL.

    On systems other than Linux, the process ends when the connection closes.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != driver:
        _end()


def _end() -> NoReturn:
    """Kill this process and every process in its group, such as those that environments started."""
    os.killpg(0, signal.SIGKILL)
    raise AssertionError("it is dead")


def _receive(connection: socket.socket) -> dict[str, Any]:
    (length,) = HEAD.unpack(_receive_exactly(connection, HEAD.size))
    return json.loads(_receive_exactly(connection, length))


def _receive_exactly(connection: socket.socket, count: int) -> bytes:
    received = bytearray()
    while len(received) < count:
        piece = connection.recv(min(count - len(received), 2**20))
        if not piece:
            _end()
        received += piece
    return bytes(received)


class _Server:
    def __init__(self, connection: socket.socket, environment: Environment) -> None:
        self.environment = environment
        self._connection = connection
        self._sending = threading.Lock()
        self._threads: dict[int, _Thread] = {}

    def take(self, call: dict[str, Any]) -> None:
        if call["thread"] not in self._threads:
            self._threads[call["thread"]] = _Thread(self)
        self._threads[call["thread"]].take(call)

    def send(self, answer: bytes) -> None:
        with self._sending:
            self._connection.sendall(answer)


class _Thread:
    """A thread that plays the attempts the driver assigned to it, each on its own environment."""

    def __init__(self, server: _Server) -> None:
        self._server = server
        self._playing: dict[int, Environment] = {}
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._run, name="attempts", daemon=True).start()

    def _run(self) -> None:
        """Run the thread's event loop, and end the process if the loop ends.

        An environment's task can end the loop, for example by sys.exit. No call would be answered
        after that.
        """
        try:
            self._loop.run_forever()
        finally:
            os._exit(1)

    def take(self, call: dict[str, Any]) -> None:
        """Pass a call or a cancellation to the loop; callable from any thread."""
        self._loop.call_soon_threadsafe(
            self._cancel if call["op"] == "cancel" else self._begin, call
        )

    def _begin(self, call: dict[str, Any]) -> None:
        task = self._loop.create_task(self._answer(call))
        self._calls[call["id"]] = task
        task.add_done_callback(lambda task: self._finish(call["id"], task))

    def _finish(self, call_id: int, task: asyncio.Task[None]) -> None:
        del self._calls[call_id]
        if task.cancelled():  # before it began, so `_answer` has sent nothing
            self._server.send(frame({"id": call_id, "error": "cancelled"}))

    def _cancel(self, call: dict[str, Any]) -> None:
        if call["id"] in self._calls:
            self._calls[call["id"]].cancel()

    async def _answer(self, call: dict[str, Any]) -> None:
        try:
            answer = frame({"id": call["id"], "value": packed(await self._do(call))})
        # Any error of an environment ends here. A cancelled call is answered too, since the driver
        # waits for one answer to each call.
        except BaseException:
            answer = frame({"id": call["id"], "error": traceback.format_exc()})
        self._server.send(answer)

    async def _do(self, call: Mapping[str, Any]) -> dict[str, Any] | None:
        attempt, arguments = call["attempt"], unpacked(call["given"])
        if call["op"] == "close":
            if attempt in self._playing:
                await self._playing.pop(attempt).close()
            return None
        if call["op"] == "reset":
            if attempt not in self._playing:
                self._playing[attempt] = copy.copy(self._server.environment)
            environment = self._playing[attempt]
            value: dict[str, Any] = {"messages": await environment.reset(arguments)}
            if isinstance(environment, HasTools):
                value["tools"] = environment.tools(arguments)
        else:
            environment = self._playing[attempt]
            value = {"step": await environment.step(arguments)}
        return value | (
            {"stops": environment.stop_strings} if isinstance(environment, HasStopStrings) else {}
        )
