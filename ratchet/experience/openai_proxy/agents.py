"""What plays an attempt from outside: an asynchronous function, a plain one, or a program."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import signal
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, cast

from ratchet.executors.env_vars import inherited
from ratchet.experience.openai_proxy.config import CommandConfig
from ratchet.types import Task

# bytes that are kept of what a program writes to each of its two outputs, the last ones
MAX_OUTPUT = 2**20
GRACE_S = 1.0  # for outputs that a process outside of the program's group still holds
TAIL = 2000  # characters of its errors in a failure


# (task, base URL, API key) -> anything: the rewards find it in `Trajectory.extras["result"]`.
Agent = Callable[[Task, str, str], Any]


async def ask(agent: Agent, task: Task, base_url: str, api_key: str) -> Any:
    """What the agent gives. A plain function runs in a thread of its own: no attempt waits for
    another."""
    if inspect.iscoroutinefunction(agent) or inspect.iscoroutinefunction(
        getattr(agent, "__call__", None)
    ):  # noqa: B004
        return await agent(task, base_url, api_key)
    return await _in_thread(lambda: agent(task, base_url, api_key))


def _in_thread(call: Callable[[], Any]) -> Awaitable[Any]:
    """A thread can't be stopped: one that is given up goes on until its next request is refused,
    and holds up no exit."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()

    def settle(setter: Callable[[Any], None], value: Any) -> None:
        if not done.done():
            setter(value)

    def run() -> None:
        try:
            result, setter = call(), done.set_result
        except BaseException as error:  # whoever awaits it decides: the episode boundary is there
            # A future takes no StopIteration.
            result, setter = (
                (RuntimeError("StopIteration") if isinstance(error, StopIteration) else error),
                done.set_exception,
            )
        with suppress(RuntimeError):  # the loop has gone
            loop.call_soon_threadsafe(settle, setter, result)

    threading.Thread(target=run, daemon=True, name="agent").start()
    return done


class Command:
    """A program that finds the server as the official clients do, in OPENAI_BASE_URL and
    OPENAI_API_KEY, and the task on its standard input: {"id", "messages", "tag", "seed"} as JSON.
    Its result is what it writes to its standard output.

    Raises RuntimeError for an exit status other than 0. When it ends, or is given up, all that it
    started in its process group is killed.
    """

    def __init__(self, config: CommandConfig) -> None:
        self.command, self.directory = config.command, config.directory

    async def __call__(self, task: Task, base_url: str, api_key: str) -> str:
        transport, program = await asyncio.get_running_loop().subprocess_exec(
            _Program,
            *self.command,
            cwd=self.directory,
            env=inherited(OPENAI_BASE_URL=base_url, OPENAI_API_KEY=api_key),
            start_new_session=True,
        )
        try:
            _feed(transport, _described(task))
            await program.exited
            _kill_group(transport.get_pid())  # what it leaves behind would hold its outputs open
            await asyncio.wait({program.read}, timeout=GRACE_S)
        finally:
            _kill_group(transport.get_pid())
            transport.close()
        if status := transport.get_returncode():
            complaint = program.tails[2].decode("utf-8", "replace")
            raise RuntimeError(f"{self.command[0]} ended with status {status}: {complaint[-TAIL:]}")
        return program.tails[1].decode("utf-8", "replace")


class _Program(asyncio.SubprocessProtocol):
    """`exited`: the program has ended, whatever its children do. `read`: nobody holds its outputs
    any more."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.exited: asyncio.Future[None] = loop.create_future()
        self.read: asyncio.Future[None] = loop.create_future()
        self.tails = {1: bytearray(), 2: bytearray()}

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        tail = self.tails[fd]
        tail += data
        del tail[:-MAX_OUTPUT]

    def process_exited(self) -> None:
        if not self.exited.done():
            self.exited.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.read.done():
            self.read.set_result(None)


def _kill_group(leader: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def _described(task: Task) -> bytes:
    """Not the answer, nor what else judges an attempt."""
    messages = [{"role": message.role, "content": message.text} for message in task.messages]
    return json.dumps(
        {"id": task.id, "messages": messages, "tag": task.tag, "seed": task.seed}
    ).encode()


def _feed(transport: asyncio.SubprocessTransport, data: bytes) -> None:
    """A program need not read it."""
    pipe = cast(asyncio.WriteTransport, transport.get_pipe_transport(0))
    pipe.write(data)
    pipe.close()
