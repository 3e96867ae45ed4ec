"""Call plain functions of users in threads, so that they do not hold up the event loop.

The executor of `asyncio.to_thread` would have two faults here. It has few threads, so that on a
small machine a call waits for one while its time limit runs. And under plain `asyncio.run`, as in a
caller's own program, it is waited for at the end of the event loop, so that a call that hangs would
hold up that end.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import os
from collections.abc import Callable
from functools import cache, partial
from typing import Any, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

from ratchet.executors.event_loop import AbandonableThreads
from ratchet.rewards.deadline import CURRENT_DEADLINE
from ratchet.utils.user_code import (
    get_qualified_name,
    guard_process,
    is_async,
    to_future_error,
)

T = TypeVar("T")
Parameters = ParamSpec("Parameters")

MAX_CALLS = 64  # calls of an event loop that run at once

_SLOTS: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


@cache
def _get_threads() -> AbandonableThreads:
    """Return the threads of this process. They end with it, whatever they run."""
    return AbandonableThreads(MAX_CALLS)


os.register_at_fork(after_in_child=_get_threads.cache_clear)  # a forked process has no such threads


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
    call = partial(contextvars.copy_context().run, function, *arguments, **keywords)

    def run() -> T:
        with guard_process(get_qualified_name(function) or "user code"):
            try:
                return call()
            except StopIteration as error:
                raise to_future_error(error) from error

    try:
        return await loop.run_in_executor(_get_threads(), run)
    finally:
        slots.release()


async def call_user_function(function: Callable[..., Any], **keywords: Any) -> Any:
    """Call user code, in a thread unless it is async, and await a coroutine that it returns.

    A decorated async function is often a plain function that returns a coroutine.
    """
    if is_async(function):
        return await function(**keywords)
    result = await call_in_thread(function, **keywords)
    return await result if inspect.isawaitable(result) else result
