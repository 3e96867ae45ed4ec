"""Adapt a batched environment to single attempts.

An attempt calls the environment for its own row alone (`step_alone`), or in one call with all other
rows (`RowBarrier`).
"""

from __future__ import annotations

import asyncio
import copy
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

from ratchet.experience.nemo_rl.environment import (
    SCALAR,
    EnvironmentInterface,
    EnvironmentReply,
    step_rows,
)
from ratchet.experience.nemo_rl.specs import MessageLog, as_message
from ratchet.protocols import Environment, Step
from ratchet.types import Message, Split, Task
from ratchet.utils.user_code import is_user_error, to_future_error

Conversation = tuple[MessageLog, Any]  # a conversation and its metadata
StepFunction = Callable[[MessageLog, Any], Awaitable[EnvironmentReply]]
T = TypeVar("T")


class MessageLogDialogue(Environment):
    """The environment of one attempt, which calls a batched environment.

    Attributes:
        step_function: Calls the batched environment with a log and its metadata.
        raw_observations, judges_cut_answers: See `EnvironmentInterface`.
        log: The conversation, in the roles that the environment uses.
        metadata: The metadata after the latest reply.
        stop_strings: The stop strings after the latest reply.
        parts: Sums of the reward's named parts.
    """

    replayable = True

    def __init__(
        self,
        step_function: StepFunction,
        *,
        raw_observations: bool = False,
        judges_cut_answers: bool = False,
    ) -> None:
        self.step_function = step_function
        self.raw_observations = raw_observations
        self.judges_cut_answers = judges_cut_answers
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
        reply = await self._step(message)
        parts = reply.parts or {}
        return Step(
            messages=(as_message(reply.observation),),
            reward=reply.reward,
            done=reply.terminated,
            metrics={_name_metric(name): value for name, value in parts.items()},
        )

    async def reward_cut_attempt(self, messages: Sequence[Message]) -> float | None:
        """Return the reward of an answer that was cut off, or None if it is not to be judged."""
        if not self.judges_cut_answers or messages[-1].role != "assistant":
            return None
        return (await self._step(messages[-1])).reward

    async def _step(self, message: Message) -> EnvironmentReply:
        """Append an answer to the log, call the environment, and keep its reply."""
        self.log.append({"role": "assistant", "content": message.text})
        reply = await self.step_function(self.log, self.metadata)
        self.log.append(reply.observation)
        if reply.metadata is not None:
            self.metadata = reply.metadata
        if reply.stop_strings is not None:
            self.stop_strings = tuple(reply.stop_strings)
        self.parts.update(reply.parts or {})
        return reply


def _name_metric(part: str) -> str:
    return part if part.startswith(f"{SCALAR}/") else f"{SCALAR}/{part}"


async def step_alone(
    environment: EnvironmentInterface[Any], log: MessageLog, metadata: Any
) -> EnvironmentReply:
    """Step one row in its own thread.

    A call that hangs then delays neither the other rows nor the exit of the process.
    """
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

    If the call raises, each row is stepped by itself, so that only rows whose own call raises fail.
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


class _RowRequest(NamedTuple):
    """A request of a row that waits at a `RowBarrier`."""

    row: int
    handle: Hashable
    argument: Any
    future: asyncio.Future[Any]


class RowBarrier(Generic[T]):
    """A barrier of rows that run in lockstep and share their calls.

    A request waits until every remaining row has submitted one. Then each `handle` is called once
    with all of its requests, in the order of the rows. For each request it returns a result, or an
    exception that is then raised in that row.
    """

    def __init__(self, n_rows: int) -> None:
        self.n_remaining = n_rows
        self._waiting: list[_RowRequest] = []

    async def submit(
        self, row: int, handle: Callable[[Sequence[Any]], Sequence[Any]], request: Any
    ) -> Any:
        """Wait for the other rows, and return the result of `handle` for a row's request."""
        future = asyncio.get_running_loop().create_future()
        self._waiting.append(_RowRequest(row, handle, request, future))
        self._answer_if_all_wait()
        return await future

    def leave(self) -> None:
        """Remove a row that has ended."""
        self.n_remaining -= 1
        self._answer_if_all_wait()

    def _answer_if_all_wait(self) -> None:
        """Answer the waiting requests if every remaining row waits."""
        # Rows that were cancelled no longer wait.
        self._waiting = [request for request in self._waiting if not request.future.done()]
        if not self._waiting or len(self._waiting) < self.n_remaining:
            return
        waiting = sorted(self._waiting, key=lambda request: request.row)
        self._waiting = []
        requests_by_handle: dict[Any, list[_RowRequest]] = {}
        for request in waiting:
            requests_by_handle.setdefault(request.handle, []).append(request)
        for requests, results in zip(
            requests_by_handle.values(), _answer_concurrently(requests_by_handle), strict=True
        ):
            for request, result in zip(requests, results, strict=True):
                if isinstance(result, BaseException):
                    _set_exception(request.future, result)
                else:
                    _set_result(request.future, result)


def _answer_concurrently(
    requests_by_handle: Mapping[Any, list[_RowRequest]],
) -> list[Sequence[Any]]:
    """Return the results of each handle. Several handles (one per environment) run in threads."""
    # A single call stays in this thread, whose gradient mode a generator may depend on.
    if len(requests_by_handle) == 1:
        return [_answer_all(*requests_by_handle.items())]
    with ThreadPoolExecutor(max_workers=len(requests_by_handle)) as threads:
        return list(threads.map(_answer_all, requests_by_handle.items()))


def _answer_all(handle_and_requests: tuple[Any, list[_RowRequest]]) -> Sequence[Any]:
    """Call a handle with its requests, and return a result or an exception for each."""
    handle, requests = handle_and_requests
    try:
        return handle([request.argument for request in requests])
    except Exception as error:  # raised again in each row that waits for it
        return [error] * len(requests)


def _set_result(future: asyncio.Future[Any], result: Any) -> None:
    if not future.done():
        future.set_result(result)


def _set_exception(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(to_future_error(error))
