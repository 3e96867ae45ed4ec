"""One conversation with a batched environment, as the environment of one attempt; and ways to ask:
each row for itself, or all rows that wait, in one call.
"""

from __future__ import annotations

import asyncio
import copy
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

from ratchet.errors import DataError
from ratchet.experience.nemo_rl.environment import SCALAR, EnvironmentInterface, Reply, step_rows
from ratchet.experience.nemo_rl.specs import MessageLog, as_message
from ratchet.protocols import Step
from ratchet.types import Message, Split, Task

Question = tuple[MessageLog, Any]  # a conversation and its metadata
Ask = Callable[[MessageLog, Any], Awaitable[Reply]]
T = TypeVar("T")


class Dialogue:
    """The environment of one attempt over `ask`. `log`: what was said, in the roles that the
    environment uses; `metadata`, `stop_strings`, `parts` (sums of the reward's named parts) are as
    the last answer left them."""

    replayable = True

    def __init__(self, ask: Ask) -> None:
        self.ask = ask
        self.begin([], None, None)

    def begin(
        self, log: Sequence[Mapping[str, Any]], metadata: Any, stop_strings: Sequence[str] | None
    ) -> None:
        self.log: MessageLog = [
            {"role": entry["role"], "content": entry["content"]} for entry in log
        ]
        self.metadata = copy.deepcopy(metadata)
        self.stop_strings = tuple(stop_strings or ())
        self.parts: Counter[str] = Counter()

    def tasks(self, split: Split, *, seed: int, start: int = 0) -> Iterator[Task]:
        """None: it answers in a conversation that somebody else began."""
        return iter(())

    def demonstration(self, task: Task) -> Sequence[Message]:
        raise DataError("a batched environment shows no solutions")

    async def reset(self, task: Task) -> Sequence[Message]:
        return task.messages

    async def step(self, message: Message) -> Step:
        self.log.append({"role": "assistant", "content": message.text})
        reply = await self.ask(self.log, self.metadata)
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
            metrics={_metric(name): value for name, value in parts.items()},
        )

    async def close(self) -> None:
        return None


def _metric(part: str) -> str:
    return part if part.startswith(f"{SCALAR}/") else f"{SCALAR}/{part}"


async def ask_alone(
    environment: EnvironmentInterface[Any], log: MessageLog, metadata: Any
) -> Reply:
    """In a thread of its own, so that one that hangs holds up nobody, not even the end of the
    program."""
    (reply,) = await in_thread(partial(step_rows, environment, [log], [metadata]))
    return reply


async def in_thread(call: Callable[[], T]) -> T:
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def work() -> None:
        try:
            result = call()
        except BaseException as error:  # handed over to who waits, whatever it is
            deliver(partial(_fail, done, error))
        else:
            deliver(partial(_finish, done, result))

    def deliver(answer: Callable[[], None]) -> None:
        if not loop.is_closed():  # nobody waits any more for a call that outlived its run
            loop.call_soon_threadsafe(answer)

    threading.Thread(target=work, name="environment step", daemon=True).start()
    return await done


def step_each(
    environment: EnvironmentInterface[Any], questions: Sequence[Question]
) -> list[Reply | BaseException]:
    """One call for all. Where it raises, each row is asked alone, so that only those fail that
    would have failed alone."""
    try:
        return list(
            step_rows(
                environment, [log for log, _ in questions], [metadata for _, metadata in questions]
            )
        )
    except (Exception, SystemExit) as error:  # the episode boundary: it may be anybody's code
        if len(questions) == 1:
            return [error]
    return [found for question in questions for found in step_each(environment, [question])]


class Meeting(Generic[T]):
    """Rows that go in step: a question waits until every row that is still there waits too; then
    each `handle` gets all questions that were put to it, in one call, in the order of the rows.

    A handle returns an answer, or an exception to raise, for each question.
    """

    def __init__(self, rows: int) -> None:
        self.present = rows
        self._waiting: list[tuple[int, Hashable, Any, asyncio.Future[Any]]] = []

    async def ask(
        self, row: int, handle: Callable[[Sequence[Any]], Sequence[Any]], question: Any
    ) -> Any:
        answer = asyncio.get_running_loop().create_future()
        self._waiting.append((row, handle, question, answer))
        self._when_all_wait()
        return await answer

    def leave(self) -> None:
        """A row has ended."""
        self.present -= 1
        self._when_all_wait()

    def _when_all_wait(self) -> None:
        # a row may have been cancelled
        self._waiting = [entry for entry in self._waiting if not entry[3].done()]
        if not self._waiting or len(self._waiting) < self.present:
            return
        waiting, self._waiting = sorted(self._waiting, key=lambda entry: entry[0]), []
        by_handle: dict[Any, list[tuple[Any, asyncio.Future[Any]]]] = {}
        for _, handle, question, answer in waiting:
            by_handle.setdefault(handle, []).append((question, answer))
        for handle, entries in by_handle.items():
            try:
                found = handle([question for question, _ in entries])
            except Exception as error:  # raised again in each row that waits for it
                found = [error] * len(entries)
            for (_, answer), result in zip(entries, found, strict=True):
                if isinstance(result, BaseException):
                    _fail(answer, result)
                else:
                    _finish(answer, result)


def _finish(future: asyncio.Future[Any], result: Any) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
