"""Shared parts of the kits that check user code.

The parts are calls with a deadline, broken services, and counts of what a process has open.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import inspect
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, TypeVar
from unittest.mock import patch

import psutil

T = TypeVar("T")

POLL_S = 0.02  # interval in seconds at which `run_supervised` polls the check
# A helper process of the standard library. It outlives its use, so it is not counted.
HELPER_COMMAND = "resource_tracker"


class BrokenRule(AssertionError):
    """An error for a rule that the code under test breaks.

    The type tells it apart from an AssertionError that this code raises itself.
    """


def require(condition: bool, message: str | Callable[[], str]) -> None:
    """Raise BrokenRule unless `condition` holds, under `python -O` too.

    Args:
        message: The text of the error, or a function that returns it.
    """
    if not condition:
        raise BrokenRule(message if isinstance(message, str) else message())


class DeadlineCaller:
    """A caller of the code under test. Each call must end within `deadline_s`."""

    def __init__(self, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self.running: tuple[str, float] | None = None  # (name of the call, its start)

    @contextmanager
    def mark_running(self, where: str) -> Iterator[None]:
        """Mark a call as running inside the block, so that `run_supervised` sees it."""
        self.running = where, time.monotonic()
        try:
            yield
        finally:
            self.running = None

    async def __call__(self, where: str, call: Callable[[], Awaitable[T]]) -> T:
        """Return the result of a call. Raises BrokenRule if the call hangs."""
        limit = asyncio.timeout(self.deadline_s)
        try:
            with self.mark_running(where):
                async with limit:
                    result = call()
                    require(inspect.isawaitable(result), f"{where} is not async: `async def`")
                    return await result
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise BrokenRule(
                f"{where} gave nothing within {self.deadline_s:g} s: bound what it waits for"
            ) from error


def run_supervised(check: Callable[[DeadlineCaller], T], deadline_s: float) -> T:
    """Return the result of `check(caller)`, which runs in a thread.

    Raises BrokenRule and abandons the thread if a call neither ends nor can be cancelled.
    Raises what `check` raises.
    """
    caller, future = DeadlineCaller(deadline_s), Future[T]()

    def run() -> None:
        try:
            future.set_result(check(caller))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name="check").start()
    while True:
        with suppress(TimeoutError):
            return future.result(timeout=POLL_S)
        if future.done():  # the TimeoutError came from `check`
            return future.result()
        running = caller.running
        if running is not None and time.monotonic() - running[1] > 2 * deadline_s:
            raise BrokenRule(
                f"{running[0]} still runs {2 * deadline_s:g} s after it began: it blocks the event "
                "loop, or continues after it was cancelled; await what waits, or put it in a "
                "process that can be killed"
            )


@contextmanager
def break_services() -> Iterator[None]:
    """Make opening a connection or starting a process raise OSError inside the block."""

    def refuse(*arguments: Any, **keywords: Any) -> Any:
        raise OSError(errno.EAGAIN, "broken by the check: services and processes are out of reach")

    with ExitStack() as stack:
        for owner, name in (
            (socket.socket, "connect"),
            (socket.socket, "connect_ex"),
            (socket, "getaddrinfo"),
            (subprocess.Popen, "__init__"),
            (os, "fork"),
            (os, "posix_spawn"),
        ):
            stack.enter_context(patch.object(owner, name, refuse))
        yield


def list_children() -> set[int]:
    """Return the ids of this process's children that have not been waited for."""
    pids: set[int] = set()
    for child in psutil.Process().children():
        try:
            is_helper = any(HELPER_COMMAND in argument for argument in child.cmdline())
        except psutil.ZombieProcess:
            is_helper = False
        except psutil.NoSuchProcess:
            continue
        if not is_helper:
            pids.add(child.pid)
    return pids


def kill_processes(processes: set[int]) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def count_open_resources() -> dict[str, int]:
    """Return how many child processes, threads and files this process has open."""
    gc.collect()
    return {
        "processes": len(list_children()),
        "threads": threading.active_count(),
        "files": psutil.Process().num_fds(),
    }
