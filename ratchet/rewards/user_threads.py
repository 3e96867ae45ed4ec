"""Call plain functions of users in threads, so that they do not hold up the event loop.

The executor of `asyncio.to_thread` would have two faults here. It has few threads, so that on a
small machine a call waits for one while its time limit runs. And it waits for its threads at the
end of the event loop, so that a call that hangs would hold up the end of the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import os
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

from ratchet.rewards.deadline import CURRENT_DEADLINE
from ratchet.utils.user_code import (
    end_forked_copies,
    get_qualified_name,
    is_async,
    to_future_error,
)

T = TypeVar("T")
Parameters = ParamSpec("Parameters")

MAX_CALLS = 64  # calls of an event loop that run at once

_SLOTS: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()
# Threads that wait for a call. A reused thread keeps what user code holds per thread, such as
# connections.
_IDLE: deque[_Worker] = deque()
os.register_at_fork(after_in_child=_IDLE.clear)  # a forked process has none of the threads


class _Worker:
    """A thread that runs one job after the other. It ends with the process."""

    def __init__(self) -> None:
        self.jobs: SimpleQueue[Callable[[], None]] = SimpleQueue()
        threading.Thread(target=self._work, daemon=True, name="user code").start()

    def _work(self) -> None:
        while True:
            self.jobs.get()()
            _IDLE.append(self)


async def call_in_thread(
    function: Callable[Parameters, T], *arguments: Parameters.args, **keywords: Parameters.kwargs
) -> T:
    """Call user code in a thread. Raises what it raises, but StopIteration as a RuntimeError.

    The current deadline is paused while MAX_CALLS others run. A cancelled call leaves its thread to
    the function and makes room for another call.
    """
    loop = asyncio.get_running_loop()
    slots = _SLOTS.setdefault(loop, asyncio.Semaphore(MAX_CALLS))
    deadline = CURRENT_DEADLINE.get() if slots.locked() else None
    with contextlib.nullcontext() if deadline is None else deadline.paused():
        await slots.acquire()
    future: asyncio.Future[T] = loop.create_future()
    call = partial(contextvars.copy_context().run, function, *arguments, **keywords)

    def run() -> None:
        try:
            with end_forked_copies(get_qualified_name(function) or "user code"):
                settle = partial(_settle, future.set_result, call())
        except BaseException as error:
            settle = partial(_settle, future.set_exception, to_future_error(error))
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            loop.call_soon_threadsafe(settle)

    try:
        try:
            worker = _IDLE.pop()
        except IndexError:
            worker = _Worker()
        worker.jobs.put(run)
        return await future
    finally:
        slots.release()


def _settle(set_outcome: Callable[[Any], None], outcome: Any) -> None:
    with contextlib.suppress(asyncio.InvalidStateError):  # the caller was cancelled
        set_outcome(outcome)


async def call_user_function(function: Callable[..., Any], **keywords: Any) -> Any:
    """Call user code, in a thread unless it is async, and await a coroutine that it returns.

    A decorated async function is often a plain function that returns a coroutine.
    """
    if is_async(function):
        return await function(**keywords)
    result = await call_in_thread(function, **keywords)
    return await result if inspect.isawaitable(result) else result
