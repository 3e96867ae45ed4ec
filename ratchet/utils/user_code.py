"""Await user code so that nothing that it raises can end the run."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


class UserCodeFailed(Exception):
    """An error in user code. Its text is the traceback, or the fault of the returned value."""


def is_user_error(error: BaseException) -> bool:
    """False for a Ctrl-C and for a cancellation of the current task; True for all else.

    SystemExit is an error of user code too, and so is what derives from BaseException alone, as
    panics of libraries in Rust do.
    """
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        return task is None or not task.cancelling()
    return not isinstance(error, KeyboardInterrupt | GeneratorExit)


async def run_guarded(call: Callable[[], Awaitable[T]]) -> T:
    """Await user code, and raise UserCodeFailed for anything that it raises.

    A coroutine that becomes a task of its own must be guarded inside: an event loop does not keep a
    task's SystemExit for who awaits it, but ends.

    A cancellation of the current task is raised unchanged.
    """
    try:
        return await call()
    except UserCodeFailed:
        raise
    except BaseException as error:
        if not is_user_error(error):
            raise
        raise UserCodeFailed(traceback.format_exc()) from error
