"""The worker process of `ratchet.environments.workers.pool`.

It plays attempts of one environment in several threads. Each thread has its own event loop, so that
a blocking call delays only the attempts of its thread. The main thread reads the driver's frames.
The process ends when the driver ends, even if the driver is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
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
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from ratchet.config.resolve import build, resolve
from ratchet.environments.workers.protocol import LENGTH_HEADER, make_frame, pack, unpack
from ratchet.protocols import Environment, HasStopStrings, HasTools
from ratchet.rewards.deadline import CURRENT_DEADLINE
from ratchet.utils import credentials

PR_SET_PDEATHSIG = 1


def main(descriptor: int, driver_pid: int) -> None:
    """Run the driver's calls. This function never returns.

    The first frame has the environment's section and the credentials. All others are calls and
    cancellations.

    Args:
        descriptor: File descriptor of the socket to the driver.
        driver_pid: Process ID of the driver.
    """
    _end_with_driver(driver_pid)
    os.dup2(2, 1)  # an environment's prints must not reach the driver's standard output
    faulthandler.enable()
    connection = socket.socket(fileno=descriptor)
    first_frame = _receive(connection)
    try:
        credentials.set_environment(first_frame["credentials"])
        server = _Server(connection, build(resolve("played", first_frame["section"])))
    except (Exception, SystemExit):  # user code
        connection.sendall(make_frame({"error": traceback.format_exc()}))
        _kill_process_group()
    connection.sendall(make_frame({"ready": True}))
    while True:
        server.handle(_receive(connection))


def _end_with_driver(driver_pid: int) -> None:
    """Let the kernel kill this process when the driver dies, even if an environment holds the GIL.

    On systems other than Linux, the process ends when the connection closes.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != driver_pid:
        _kill_process_group()


def _kill_process_group() -> NoReturn:
    """Kill this process and every process in its group, such as those that environments started."""
    os.killpg(0, signal.SIGKILL)
    raise AssertionError("the process has been killed")


def _receive(connection: socket.socket) -> dict[str, Any]:
    (length,) = LENGTH_HEADER.unpack(_receive_exactly(connection, LENGTH_HEADER.size))
    return json.loads(_receive_exactly(connection, length))


def _receive_exactly(connection: socket.socket, n_bytes: int) -> bytes:
    received = bytearray()
    while len(received) < n_bytes:
        chunk = connection.recv(min(n_bytes - len(received), 2**20))
        if not chunk:
            _kill_process_group()
        received += chunk
    return bytes(received)


class _Server:
    """The environment of this process, its threads, and the connection to the driver."""

    def __init__(self, connection: socket.socket, environment: Environment) -> None:
        self.environment = environment
        self._connection = connection
        self._send_lock = threading.Lock()
        self._threads: dict[int, _AttemptThread] = {}

    def handle(self, call: dict[str, Any]) -> None:
        if call["thread"] not in self._threads:
            self._threads[call["thread"]] = _AttemptThread(self)
        self._threads[call["thread"]].handle(call)

    def send(self, answer: bytes) -> None:
        with self._send_lock:
            self._connection.sendall(answer)


class _DriverDeadline:
    """The driver's deadline for a call. `paused` pauses it in the driver."""

    def __init__(self, seconds: float, call_id: int, server: _Server) -> None:
        self.seconds = seconds
        self._call_id, self._server = call_id, server
        self._pauses = 0

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        self._change_pauses(1)
        try:
            yield
        finally:
            self._change_pauses(-1)

    def _change_pauses(self, change: int) -> None:
        n_before, self._pauses = self._pauses, self._pauses + change
        if not n_before or not self._pauses:
            self._server.send(make_frame({"id": self._call_id, "paused": not n_before}))


class _AttemptThread:
    """A thread with the environment instances that the driver has assigned to it."""

    def __init__(self, server: _Server) -> None:
        self._server = server
        self._instances: dict[int, Environment] = {}
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._run, name="attempts", daemon=True).start()

    def _run(self) -> None:
        """Run the thread's event loop, and end the process if the loop ends.

        An environment can end the loop, for example with sys.exit, and no further call would be
        answered.
        """
        try:
            self._loop.run_forever()
        finally:
            os._exit(1)

    def handle(self, call: dict[str, Any]) -> None:
        """Pass a call or a cancellation to the loop. It may be called from any thread."""
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
            self._server.send(make_frame({"id": call_id, "error": "cancelled"}))

    def _cancel(self, call: dict[str, Any]) -> None:
        if call["id"] in self._calls:
            self._calls[call["id"]].cancel()

    async def _answer(self, call: dict[str, Any]) -> None:
        if call["limit_s"] is not None:
            CURRENT_DEADLINE.set(_DriverDeadline(call["limit_s"], call["id"], self._server))
        try:
            answer = make_frame({"id": call["id"], "value": pack(await self._run_operation(call))})
        # Every error of an environment is sent to the driver. A cancelled call is answered too,
        # because the driver waits for one answer to each call.
        except BaseException:
            answer = make_frame({"id": call["id"], "error": traceback.format_exc()})
        self._server.send(answer)

    async def _run_operation(self, call: Mapping[str, Any]) -> dict[str, Any] | None:
        instance, argument = call["instance"], unpack(call["argument"])
        if call["op"] == "close":
            if instance in self._instances:
                await self._instances.pop(instance).close()
            return None
        if call["op"] == "reset":
            if instance not in self._instances:
                self._instances[instance] = copy.copy(self._server.environment)
            environment = self._instances[instance]
            value: dict[str, Any] = {"messages": await environment.reset(argument)}
            if isinstance(environment, HasTools):
                value["tools"] = environment.tools(argument)
        else:
            environment = self._instances[instance]
            value = {"step": await environment.step(argument)}
        if isinstance(environment, HasStopStrings):
            value["stop_strings"] = environment.stop_strings
        return value
