"""Run the agent of an attempt: an async function, a plain function, or a program."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, cast

from ratchet.executors.env_vars import inherit_environment
from ratchet.experience.openai_proxy.config import CommandConfig
from ratchet.types import Task
from ratchet.utils.user_code import is_async, to_future_error

MAX_OUTPUT = 2**20  # bytes kept from the end of stdout, and as many from stderr
# Longest wait for stdout and stderr to close after the agent's process group has ended: a process
# that left the group may keep them open.
GRACE_S = 1.0
MAX_ERROR_CHARS = 2000  # an error message quotes this much of the end of stderr


# (task, base URL, API key) -> any result; rewards read it in `Trajectory.extras["result"]`.
Agent = Callable[[Task, str, str], Any]


async def run_agent(agent: Agent, task: Task, base_url: str, api_key: str) -> Any:
    """Run the agent and return its result.

    A plain function runs in its own thread, so that attempts do not wait for each other.
    """
    if is_async(agent):
        return await agent(task, base_url, api_key)
    return await _run_in_thread(lambda: agent(task, base_url, api_key))


def _run_in_thread(call: Callable[[], Any]) -> Awaitable[Any]:
    """Run a call in a daemon thread.

    A thread can't be stopped: after a cancellation it continues until its next request is refused.
    It does not delay the exit of the process.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def set_if_pending(setter: Callable[[Any], None], value: Any) -> None:
        if not future.done():
            setter(value)

    def work() -> None:
        try:
            result, setter = call(), future.set_result
        # Every exception goes to the awaiting code, where the episode boundary handles it.
        except BaseException as error:
            result = to_future_error(error)
            setter = future.set_exception
        with suppress(RuntimeError):  # the event loop is closed
            loop.call_soon_threadsafe(set_if_pending, setter, result)

    threading.Thread(target=work, daemon=True, name="agent").start()
    return future


class CommandAgent:
    """A program that plays an attempt.

    It reads the task from its standard input, as the JSON {"id", "messages", "tag", "seed"}.
    OPENAI_BASE_URL and OPENAI_API_KEY are set, as OpenAI clients expect, and ANTHROPIC_BASE_URL and
    ANTHROPIC_API_KEY, as Anthropic's do. Its standard output is the result.

    When it ends or is cancelled, its whole process group is killed. An exit status other than 0
    raises RuntimeError.
    """

    def __init__(self, config: CommandConfig) -> None:
        self.command = config.command
        self.directory = config.directory

    async def __call__(self, task: Task, base_url: str, api_key: str) -> str:
        transport, program = await asyncio.get_running_loop().subprocess_exec(
            _Program,
            *self.command,
            cwd=self.directory,
            env=inherit_environment(
                OPENAI_BASE_URL=base_url,
                OPENAI_API_KEY=api_key,
                # Clients of Anthropic add /v1 themselves.
                ANTHROPIC_BASE_URL=base_url.removesuffix("/v1"),
                ANTHROPIC_API_KEY=api_key,
            ),
            start_new_session=True,
        )
        try:
            _write_input(transport, _describe_task(task))
            await program.exited
            # Child processes that still run would hold the outputs open.
            _kill_group(transport.get_pid())
            await asyncio.wait({program.outputs_closed}, timeout=GRACE_S)
        finally:
            _kill_group(transport.get_pid())
            transport.close()
        if status := transport.get_returncode():
            error_output = program.tails[2].decode("utf-8", "replace")
            raise RuntimeError(
                f"{self.command[0]} ended with status {status}: {error_output[-MAX_ERROR_CHARS:]}"
            )
        return program.tails[1].decode("utf-8", "replace")


class _Program(asyncio.SubprocessProtocol):
    """The protocol of a program's process.

    `exited` is done when the program has ended, even if its children still run. `outputs_closed` is
    done when no process holds its outputs open.
    """

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.exited: asyncio.Future[None] = loop.create_future()
        self.outputs_closed: asyncio.Future[None] = loop.create_future()
        self.tails = {1: bytearray(), 2: bytearray()}  # by file descriptor: stdout and stderr

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        tail = self.tails[fd]
        tail += data
        del tail[:-MAX_OUTPUT]

    def process_exited(self) -> None:
        if not self.exited.done():
            self.exited.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.outputs_closed.done():
            self.outputs_closed.set_result(None)


def _kill_group(process_group: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process_group, signal.SIGKILL)


def _describe_task(task: Task) -> bytes:
    """Return the task's JSON, without the answer and other data for judging."""
    messages = [{"role": message.role, "content": message.text} for message in task.messages]
    return json.dumps(
        {"id": task.id, "messages": messages, "tag": task.tag, "seed": task.seed}
    ).encode()


def _write_input(transport: asyncio.SubprocessTransport, data: bytes) -> None:
    """Write to the program's standard input. It is not an error if the program does not read it."""
    pipe = cast(asyncio.WriteTransport, transport.get_pipe_transport(0))
    pipe.write(data)
    pipe.close()
