"""Adapt a batched environment to single attempts.

An attempt calls the environment for its own row alone, or for all waiting rows at once.
"""

from __future__ import annotations

import asyncio
import copy
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

from ratchet.experience.nemo_rl.environment import (
    SCALAR,
    EnvironmentInterface,
    EnvironmentReply,
    step_rows,
)
from ratchet.experience.nemo_rl.specs import MessageLog, as_message
from ratchet.protocols import Environment, Step
from ratchet.types import Message, Split, Task
from ratchet.utils.user_code import is_user_error

Conversation = tuple[MessageLog, Any]  # a conversation and its metadata
StepFunction = Callable[[MessageLog, Any], Awaitable[EnvironmentReply]]
T = TypeVar("T")


class MessageLogDialogue(Environment):
    """The environment of one attempt, which calls a batched environment.

    Attributes:
        step_function: Calls the batched environment with a log and its metadata.
        log: The conversation, in the roles that the environment uses.
        metadata: The metadata after the latest reply.
        stop_strings: The stop strings after the latest reply.
        parts: Sums of the reward's named parts.
    """

    replayable = True

    def __init__(self, step_function: StepFunction) -> None:
        self.step_function = step_function
        self.begin([], None, None)

    def begin(
        self, log: Sequence[Mapping[str, Any]], metadata: Any, stop_strings: Sequence[str] | None
    ) -> None:
        """Start a conversation."""
        self.log: MessageLog = [
            {"role": entry["role"], "content": entry["content"]} for entry in log
        ]
        self.metadata = copy.deepcopy(metadata)
        self.stop_strings = tuple(stop_strings or ())
        self.parts: Counter[str] = Counter()

    def tasks(self, split: Split, *, seed: int, start: int = 0) -> Iterator[Task]:
        """Return no tasks: the conversations come from a batch."""
        return iter(())

    async def reset(self, task: Task) -> Sequence[Message]:
        return task.messages

    async def step(self, message: Message) -> Step:
        self.log.append({"role": "assistant", "content": message.text})
        reply = await self.step_function(self.log, self.metadata)
        self.log.append(reply.observation)
        if reply.metadata is not None:
            self.metadata = reply.metadata
        if reply.stop_strings is not None:
            self.stop_strings = tuple(reply.stop_strings)
        parts = reply.parts or {}
        self.parts.update(parts)
        return Step(
            messages=(as_message(reply.observation),),
            reward=reply.reward,
            done=reply.terminated,
            metrics={_name_metric(name): value for name, value in parts.items()},
        )


def _name_metric(part: str) -> str:
    return part if part.startswith(f"{SCALAR}/") else f"{SCALAR}/{part}"


async def step_alone(
    environment: EnvironmentInterface[Any], log: MessageLog, metadata: Any
) -> EnvironmentReply:
    """Step one row in its own thread, so that a hanging call delays neither others nor the exit."""
    (reply,) = await run_in_thread(partial(step_rows, environment, [log], [metadata]))
    return reply


async def run_in_thread(call: Callable[[], T]) -> T:
    """Run a call in a daemon thread and return its result."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def work() -> None:
        try:
            result = call()
        except BaseException as error:  # every exception is raised where the call is awaited
            deliver(partial(_set_exception, future, error))
        else:
            deliver(partial(_set_result, future, result))

    def deliver(set_outcome: Callable[[], None]) -> None:
        # The call may outlive the run that awaited it.
        if not loop.is_closed():
            loop.call_soon_threadsafe(set_outcome)

    threading.Thread(target=work, name="environment step", daemon=True).start()
    return await future


def step_each(
    environment: EnvironmentInterface[Any], conversations: Sequence[Conversation]
) -> list[EnvironmentReply | BaseException]:
    """Step all rows in one call, and return a reply or an exception for each.

    If the call raises, each row is stepped alone, so that only rows that raise alone fail.
    """
    try:
        return list(
            step_rows(
                environment,
                [log for log, _ in conversations],
                [metadata for _, metadata in conversations],
            )
        )
    except BaseException as error:  # the episode boundary: this is user code
        if not is_user_error(error):
            raise
        if len(conversations) == 1:
            return [error]
    return [
        reply for conversation in conversations for reply in step_each(environment, [conversation])
    ]


class RowBarrier(Generic[T]):
    """A barrier of rows that run in lockstep and share their calls.

    A request waits until every remaining row has submitted one. Then each `handle` is called once
    with all of its requests, in the order of the rows. It returns a result for each request, or an
    exception to raise there.
    """

    def __init__(self, n_rows: int) -> None:
        self.n_remaining = n_rows
        self._waiting: list[tuple[int, Hashable, Any, asyncio.Future[Any]]] = []

    async def submit(
        self, row: int, handle: Callable[[Sequence[Any]], Sequence[Any]], request: Any
    ) -> Any:
        """Wait for the other rows, and return the result of `handle` for a row's request."""
        future = asyncio.get_running_loop().create_future()
        self._waiting.append((row, handle, request, future))
        self._answer_if_all_wait()
        return await future

    def leave(self) -> None:
        """Remove a row that has ended."""
        self.n_remaining -= 1
        self._answer_if_all_wait()

    def _answer_if_all_wait(self) -> None:
        # Rows that were cancelled no longer wait.
        self._waiting = [entry for entry in self._waiting if not entry[3].done()]
        if not self._waiting or len(self._waiting) < self.n_remaining:
            return
        entries, self._waiting = sorted(self._waiting, key=lambda entry: entry[0]), []
        requests_by_handle: dict[Any, list[tuple[Any, asyncio.Future[Any]]]] = {}
        for _, handle, request, future in entries:
            requests_by_handle.setdefault(handle, []).append((request, future))
        for handle, entries in requests_by_handle.items():
            try:
                results = handle([request for request, _ in entries])
            except Exception as error:  # raised again in each row that waits for it
                results = [error] * len(entries)
            for (_, future), result in zip(entries, results, strict=True):
                if isinstance(result, BaseException):
                    _set_exception(future, result)
                else:
                    _set_result(future, result)


def _set_result(future: asyncio.Future[Any], result: Any) -> None:
    if not future.done():
        future.set_result(result)


def _set_exception(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
