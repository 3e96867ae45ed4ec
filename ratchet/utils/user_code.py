"""Await user code so that nothing that it raises can end the run."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import os
import traceback
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextvars import ContextVar
from typing import Any, NoReturn, TypeVar

from ratchet.utils.process_settings import restore_settings

T = TypeVar("T")

log = logging.getLogger(__name__)

STOP_S = 5.0  # longest wait for the end of user code that is cancelled
KEPT_CHARS = 50_000  # of the beginning and of the end of a traceback


class UserCodeFailed(Exception):
    """An error in user code. Its text is the traceback, or says why a returned value is wrong."""


def get_qualified_name(function: Callable[..., Any]) -> str:
    """Return the qualified name of a function; "" for a callable that has none."""
    # A partial function or a callable object has no name.
    return getattr(function, "__qualname__", "")


def is_async(function: Callable[..., Any]) -> bool:
    """True if a call returns a coroutine: an async function, or an object with async `__call__`."""
    if inspect.iscoroutinefunction(function):
        return True
    return inspect.iscoroutinefunction(type(function).__call__)


def is_user_error(error: BaseException) -> bool:
    """False for Ctrl-C and a cancellation of the current task; True for all else.

    SystemExit counts as an error of user code. So does an exception derived directly from
    BaseException, such as a panic of a Rust library. So does GeneratorExit: code that awaits user
    code asks `is_closing` first.
    """
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        return task is None or not task.cancelling()
    return not isinstance(error, KeyboardInterrupt)


def is_closing(error: BaseException, task: asyncio.Task[Any] | None) -> bool:
    """True if a GeneratorExit closes the coroutines of a task from outside, as at a run's end.

    False if code that the task runs raised it.

    task: What `get_current_task` returned where the coroutine began.
    """
    return isinstance(error, GeneratorExit) and (task is None or get_current_task() is not task)


def get_current_task() -> asyncio.Task[Any] | None:
    """Return the running task; None outside of tasks and event loops."""
    try:
        return asyncio.current_task()
    except RuntimeError:  # no running event loop
        return None


def format_user_error() -> str:
    """Return the traceback of the exception that is being handled.

    The middle of a very long one is left out: its message may be a model's answer, and each failed
    attempt keeps the text.
    """
    text = traceback.format_exc()
    if len(text) <= 2 * KEPT_CHARS:
        return text
    left_out = len(text) - 2 * KEPT_CHARS
    return f"{text[:KEPT_CHARS]}\n... {left_out:,} characters ...\n{text[-KEPT_CHARS:]}"


def to_future_error(error: BaseException) -> BaseException:
    """Return an error that a future accepts: a RuntimeError in place of a StopIteration.

    A future refuses StopIteration, so code that awaits it would wait without end.
    """
    if not isinstance(error, StopIteration):
        return error
    replacement = RuntimeError("StopIteration left a function, as of `next` without a default")
    replacement.__cause__ = error
    return replacement


class guard_process:
    """Protect the process from user code that runs within the context.

    Settings of the process that it changes are restored (`restore_settings`). A process that it
    forks and in which it returns or raises ends: it is a copy of the whole run, which would train
    too, and write into the same files.

    Args:
        code: The name of the user code, for the message.
    """

    __slots__ = ("code", "owner")

    def __init__(self, code: str) -> None:
        self.code = code
        self.owner = os.getpid()

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        if os.getpid() != self.owner:
            _end_forked_copy(self.code)
        restore_settings(self.code)


def _end_forked_copy(code: str) -> NoReturn:
    message = (
        f"{code} forked process {os.getpid()} and returned in it, so that process ends here: "
        "let it end by os._exit, or use subprocess or multiprocessing\n"
    )
    with contextlib.suppress(OSError):
        os.write(2, message.encode("utf-8", "replace"))
    os._exit(1)  # exit handlers and open files are the run's


@contextlib.contextmanager
def fail_early_exits() -> Generator[None]:
    """Turn the status of os._exit(0) in this process into 1 within the context.

    User code that calls it ends the whole command, and status 0 would say that a run is finished or
    a check passed. Forked processes keep their status.
    """
    owner, leave = os.getpid(), os._exit

    def leave_as_failure(status: int) -> NoReturn:
        if os.getpid() == owner and status % 256 == 0:
            caller = traceback.extract_stack(limit=2)[0]
            message = (
                f"{caller.filename}:{caller.lineno} called os._exit({status}) before the command's "
                "end, so the exit status is 1: raise an error there, or return, instead\n"
            )
            with contextlib.suppress(OSError):
                os.write(2, message.encode("utf-8", "replace"))
            status = 1
        leave(status)

    os._exit = leave_as_failure
    try:
        yield
    finally:
        os._exit = leave


async def await_method(result: Awaitable[T], owner: object, name: str) -> T:
    """Await what the method `name` of `owner`, which is user code, returned.

    Raises UserCodeFailed if the method is not async.
    """
    if not inspect.isawaitable(result):
        method = f"{type(owner).__name__}.{name}"
        raise UserCodeFailed(f"{method} is not async. Write `async def {name}`")
    return await result


# True where user code runs. Tasks that it starts, as by asyncio.gather, inherit it.
_RUNS_USER_CODE: ContextVar[bool] = ContextVar("runs_user_code", default=False)


class _UserCoroutine(Coroutine[Any, Any, T]):
    """A coroutine of user code whose SystemExit is a RuntimeError.

    A SystemExit that leaves a task stops the event loop, and with it the run.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, T]) -> None:
        self._coroutine = coroutine

    def send(self, value: Any) -> Any:
        with _exits_as_errors():
            return self._coroutine.send(value)

    def throw(self, *error: Any) -> Any:
        with _exits_as_errors():
            return self._coroutine.throw(*error)

    def close(self) -> None:
        with _exits_as_errors():
            self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, T]:
        return self._coroutine.__await__()

    def __repr__(self) -> str:
        return repr(self._coroutine)

    # asyncio, anyio and inspect read cr_running, __qualname__ and others.
    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_coroutine"), name)


@contextlib.contextmanager
def _exits_as_errors() -> Generator[None]:
    try:
        yield
    except SystemExit as error:
        raise RuntimeError(f"SystemExit({error.code!r:.200}) left a task") from error


def _make_task(
    loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any
) -> asyncio.Task[Any]:
    """Return a task of a coroutine: the event loop calls this for every task."""
    if _RUNS_USER_CODE.get():
        coroutine = _UserCoroutine(coroutine)
    return asyncio.Task(coroutine, loop=loop, **options)


async def run_guarded(call: Callable[[], Awaitable[T]]) -> T:
    """Await user code, and raise UserCodeFailed for anything that it raises.

    If user code runs as its own task, call run_guarded inside that task: a SystemExit that leaves a
    task stops the event loop instead of reaching the awaiting code. In tasks that user code starts
    it is a RuntimeError.

    A cancellation of the current task is raised unchanged. A process that user code forks and that
    comes back here ends.
    """
    task = get_current_task()
    loop = asyncio.get_running_loop()
    if loop.get_task_factory() is None:
        loop.set_task_factory(_make_task)
    before = _RUNS_USER_CODE.set(True)
    try:
        with guard_process("user code"):
            result = await call()
        if task in _LEFT_BEHIND:
            raise asyncio.CancelledError
        return result
    except UserCodeFailed:
        raise
    except BaseException as error:
        if not is_user_error(error) or is_closing(error, task):
            raise
        text = format_user_error()
        # An exception that user code keeps and raises again gathers the frames of every attempt.
        raise UserCodeFailed(text) from error.with_traceback(None)
    finally:
        with contextlib.suppress(ValueError):  # it is closed from outside, in another context
            _RUNS_USER_CODE.reset(before)


_LEFT_BEHIND = weakref.WeakSet[asyncio.Task[Any]]()  # tasks that `leave_when_cancelled` gave up


async def leave_when_cancelled(work: Coroutine[Any, Any, T]) -> T:
    """Await user code in a task of its own, which is left behind if it can't be cancelled.

    Code that retries may catch its cancellation and go on. If the caller is cancelled, as by a
    time limit, it waits at most STOP_S for the end of the work. Work that is left behind ends when
    its call of `run_guarded` returns.
    """
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task})
    except asyncio.CancelledError:
        task.cancel()
        try:
            await asyncio.wait({task}, timeout=STOP_S)
        finally:  # it may be cancelled again
            if not task.done():
                _LEFT_BEHIND.add(task)
        if not task.done():
            log.warning(
                "code that catches its cancellation is left behind: %r. Let it raise "
                "asyncio.CancelledError",
                task.get_coro(),
            )
        elif not task.cancelled():
            task.exception()  # read, so that asyncio does not log it
        raise
    return task.result()
