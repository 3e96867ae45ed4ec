"""The worker process of `ratchet.environments.workers.pool`.

It plays attempts of one environment in several threads. Each thread has its own event loop, so that
a blocking call delays only the attempts of its thread. The main thread reads the driver's frames.
The process ends when the driver ends, even if the driver is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import faulthandler
import os
import threading
import traceback
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from ratchet.config.resolve import resolve
from ratchet.data.codec import from_plain
from ratchet.environments.build import build_environment
from ratchet.environments.workers.protocol import pack
from ratchet.processes.frames import Connection, Frame, FrameKind
from ratchet.protocols import Environment
from ratchet.rewards.deadline import CURRENT_DEADLINE
from ratchet.utils import credentials
from ratchet.utils.user_code import await_method, guard_process


def serve(connection: Connection) -> NoReturn:
    """Run the driver's calls.

    The first frame has the environment's section and the credentials. All others are calls and
    cancellations.
    """
    faulthandler.enable()
    setup = connection.receive().parcel.load_json()
    credentials.set_environment(setup["credentials"])
    server = _Server(connection, build_environment(resolve("worker_environment", setup["section"])))
    connection.send(FrameKind.HELLO)
    while True:
        server.handle(connection.receive())


class _Server:
    """The environment of this process, its threads, and the connection to the driver."""

    def __init__(self, connection: Connection, environment: Environment) -> None:
        self.environment = environment
        self.connection = connection
        self._threads: dict[int, _AttemptThread] = {}

    def handle(self, frame: Frame) -> None:
        call = frame.parcel.load_json()
        if call["thread"] not in self._threads:
            self._threads[call["thread"]] = _AttemptThread(self)
        self._threads[call["thread"]].handle(frame.kind, frame.number, call)


class _DriverDeadline:
    """The driver's deadline for a call. `paused` pauses it in the driver."""

    def __init__(self, seconds: float, call_id: int, connection: Connection) -> None:
        self.seconds = seconds
        self._call_id, self._connection = call_id, connection
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
            self._connection.send(FrameKind.PAUSE, self._call_id, pack(not n_before))


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

    def handle(self, kind: FrameKind, call_id: int, call: Mapping[str, Any]) -> None:
        """Pass a call or a cancellation to the loop. Any thread may call this."""
        if kind is FrameKind.CANCEL:
            self._loop.call_soon_threadsafe(self._cancel, call_id)
        else:
            self._loop.call_soon_threadsafe(self._begin, call_id, call)

    def _begin(self, call_id: int, call: Mapping[str, Any]) -> None:
        task = self._loop.create_task(self._answer(call_id, call))
        self._calls[call_id] = task
        task.add_done_callback(lambda task: self._finish(call_id, task))

    def _finish(self, call_id: int, task: asyncio.Task[None]) -> None:
        del self._calls[call_id]
        if task.cancelled():  # before it began, so `_answer` has sent nothing
            self._server.connection.send(FrameKind.RAISED, call_id, pack("cancelled"))

    def _cancel(self, call_id: int) -> None:
        if call_id in self._calls:
            self._calls[call_id].cancel()

    async def _answer(self, call_id: int, call: Mapping[str, Any]) -> None:
        connection = self._server.connection
        if call["limit_s"] is not None:
            CURRENT_DEADLINE.set(_DriverDeadline(call["limit_s"], call_id, connection))
        try:
            kind = FrameKind.RESULT
            with guard_process("the environment"):
                value = await self._run_operation(call)
            answer = pack(value)
        # Every error of an environment is sent to the driver. A cancelled call is answered too,
        # because the driver waits for one answer to each call.
        except BaseException:
            kind, answer = FrameKind.RAISED, pack(traceback.format_exc())
        connection.send(kind, call_id, answer)

    async def _run_operation(self, call: Mapping[str, Any]) -> dict[str, Any] | None:
        instance, argument = call["instance"], from_plain(call["argument"])
        if call["op"] == "close":
            if instance in self._instances:
                await self._instances.pop(instance).close()
            return None
        if call["op"] == "reward_cut_attempt":
            return {"reward": await self._instances[instance].reward_cut_attempt(argument)}
        if call["op"] == "reset":
            if instance not in self._instances:
                self._instances[instance] = copy.copy(self._server.environment)
            environment = self._instances[instance]
            value: dict[str, Any] = {
                "messages": await await_method(environment.reset(argument), environment, "reset")
            }
            if environment.has_tools:
                value["tools"] = environment.tools(argument)
        else:
            environment = self._instances[instance]
            value = {"step": await await_method(environment.step(argument), environment, "step")}
        value["stop_strings"] = environment.stop_strings
        return value
