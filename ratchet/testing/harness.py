"""The base of the kits for user code: calls with a deadline, services that break, and open
resources of a process."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

T = TypeVar("T")

PROC = Path("/proc")  # absent outside of Linux, where nothing is counted and nothing is killed
LOOKS_S = 0.02
# the standard library's own process, which outlives its user
HELPER = b"resource_tracker"


class BrokenRule(AssertionError):
    """An error of a kit, not to be taken for an assertion of the code that it checks."""


def require(rule: bool, broken: str) -> None:
    """An assertion that `python -O` keeps."""
    if not rule:
        raise BrokenRule(broken)


class Calls:
    """Calls of the code that is checked; each has `deadline_s`."""

    def __init__(self, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self.running: tuple[str, float] | None = None  # (what, since when)

    @contextmanager
    def of(self, where: str) -> Iterator[None]:
        """Marks what runs now, for `supervised` to see."""
        self.running = where, time.monotonic()
        try:
            yield
        finally:
            self.running = None

    async def __call__(self, where: str, call: Callable[[], Awaitable[T]]) -> T:
        """Raises BrokenRule where it hangs, and what it raises."""
        limit = asyncio.timeout(self.deadline_s)
        try:
            with self.of(where):
                async with limit:
                    return await call()
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise BrokenRule(
                f"{where} gave nothing within {self.deadline_s:g} s: bound what it waits for"
            ) from error


def supervised(check: Callable[[Calls], T], deadline_s: float) -> T:
    """`check(calls)` in a thread that is given up where a call neither ends nor gives way: it is
    then left behind.

    Raises BrokenRule there, and whatever `check` raises."""
    calls, future = Calls(deadline_s), Future[T]()

    def run() -> None:
        try:
            future.set_result(check(calls))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name="check").start()
    while True:
        with suppress(TimeoutError):
            return future.result(timeout=LOOKS_S)
        if future.done():  # a TimeoutError of its own
            return future.result()
        running = calls.running
        if running is not None and time.monotonic() - running[1] > 2 * deadline_s:
            raise BrokenRule(
                f"{running[0]} does not give way {2 * deadline_s:g} s after it began: it blocks "
                "the event loop, or goes on "
                "after it was cancelled; await what waits, or put it in a process that can be "
                "killed"
            )


@contextmanager
def broken_services() -> Iterator[None]:
    """Make every attempt to open a connection or start a process raise OSError, inside the
    block."""

    def refuse(*arguments: Any, **named: Any) -> Any:
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


def children() -> set[int]:
    """Processes that this one has begun and not yet buried."""
    pids: set[int] = set()
    for status in PROC.glob("[0-9]*/stat"):
        with suppress(OSError):
            name, _, rest = status.read_text(encoding="utf-8", errors="replace").rpartition(")")
            if (
                int(rest.split()[1]) == os.getpid()
                and HELPER not in (status.parent / "cmdline").read_bytes()
            ):
                pids.add(int(name.split(" ", 1)[0]))
    return pids


def kill(processes: set[int]) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def held() -> dict[str, int]:
    """Return what this process has open now."""
    gc.collect()
    files = PROC / "self" / "fd"
    return {
        "processes": len(children()),
        "threads": threading.active_count(),
        "files": len(os.listdir(files)) if files.exists() else 0,
    }
