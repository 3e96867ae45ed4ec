"""Wall-clock limits on playing and judging, paused while a sandboxed program runs.

A program has limits of its own, and a program that exceeds them is a wrong answer. Waiting for the
sandbox, or for a slow program, must not fail the attempt.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Iterator, Sequence
from contextvars import ContextVar, Token
from types import TracebackType
from typing import Protocol, TypeGuard, TypeVar

from ratchet.sandbox import Limits, Result, Sandbox

T = TypeVar("T")
# The innermost deadline of the running asyncio task; None without a deadline.
CURRENT_DEADLINE: ContextVar[Pausable | None] = ContextVar("deadline", default=None)
# An answer's programs may take this multiple of the deadline, in case the machine is busy.
WALL_PER_LIMIT = 3


class Pausable(Protocol):
    """A wall-clock limit of `seconds` that can be paused."""

    seconds: float

    def paused(self) -> contextlib.AbstractContextManager[None]: ...


class Deadline:
    """An `asyncio.timeout` that can be paused.

    A pause also pauses the outer deadline, because a tool's call is a part of an attempt.

    Args:
        seconds: Wall-clock seconds, without pauses.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._timeout = asyncio.timeout(seconds)
        self._outer: Pausable | None = None
        self._token: Token[Pausable | None] | None = None
        self._pauses, self._remaining_s = 0, seconds

    async def __aenter__(self) -> Deadline:
        await self._timeout.__aenter__()
        self._outer = CURRENT_DEADLINE.get()
        self._token = CURRENT_DEADLINE.set(self)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        if self._token is not None:
            CURRENT_DEADLINE.reset(self._token)
        return await self._timeout.__aexit__(kind, error, trace)

    def expired(self) -> bool:
        return self._timeout.expired()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Pause the deadline until all blocks that pause it have ended."""
        loop = asyncio.get_running_loop()
        if not self._pauses:
            when = self._timeout.when()
            self._remaining_s = math.inf if when is None else when - loop.time()
            self._reschedule(None)
        self._pauses += 1
        try:
            with contextlib.nullcontext() if self._outer is None else self._outer.paused():
                yield
        finally:
            self._pauses -= 1
            if not self._pauses and math.isfinite(self._remaining_s):
                self._reschedule(loop.time() + self._remaining_s)

    def _reschedule(self, when: float | None) -> None:
        with contextlib.suppress(RuntimeError):  # it has expired, or its block has ended
            self._timeout.reschedule(when)


class RemotePause:
    """A pause of the current deadline on behalf of another process.

    A pause belongs to the event loop in which it is created. Any thread may call `set`, but only a
    callback of the loop may call `apply`.
    """

    def __init__(self) -> None:
        self._deadline = CURRENT_DEADLINE.get()
        self._loop = asyncio.get_running_loop()
        self._pause: contextlib.AbstractContextManager[None] | None = None

    @property
    def seconds(self) -> float | None:
        return None if self._deadline is None else self._deadline.seconds

    def set(self, paused: bool) -> None:
        self._loop.call_soon_threadsafe(self.apply, paused)

    def apply(self, paused: bool) -> None:
        if paused and self._pause is None and self._deadline is not None:
            self._pause = self._deadline.paused()
            self._pause.__enter__()
        elif not paused and self._pause is not None:
            pause, self._pause = self._pause, None
            pause.__exit__(None, None, None)


class ProgramRunner:
    """A runner of one answer's programs, with a limit on their total time.

    Args:
        sandbox: The sandbox in which the programs run.
        limit_s: Seconds for all programs, by the sandbox's clock. The current deadline, if there is
            one, may lower the limit.
    """

    def __init__(self, sandbox: Sandbox, limit_s: float = math.inf) -> None:
        self.sandbox = sandbox
        self._deadline = CURRENT_DEADLINE.get()
        self.remaining_s = (
            limit_s
            if self._deadline is None
            else min(limit_s, WALL_PER_LIMIT * self._deadline.seconds)
        )

    @property
    def has_expired(self) -> bool:
        return self.remaining_s <= 0

    async def run(self, program: str | Sequence[str], stdin: bytes, limits: Limits) -> Result:
        """Run a program while the deadline is paused. Raise SandboxError if the sandbox failed."""
        with contextlib.nullcontext() if self._deadline is None else self._deadline.paused():
            result = await self.sandbox.run(program, stdin, limits)
        self.remaining_s -= result.seconds
        return result


def can_share(work: asyncio.Future[T] | None) -> TypeGuard[asyncio.Future[T]]:
    """True if work of this event loop is pending or has a result."""
    return (
        work is not None
        and work.get_loop() is asyncio.get_running_loop()
        and not work.cancelled()
        and not (work.done() and work.exception() is not None)
    )


async def wait_for_shared(work: asyncio.Future[T]) -> T:
    """Return the result of sandboxed work that several answers wait for.

    The deadline is paused, as while the answer's own programs run. A cancelled caller does not
    cancel the work.
    """
    deadline = CURRENT_DEADLINE.get()
    with contextlib.nullcontext() if deadline is None else deadline.paused():
        return await asyncio.shield(work)


class NoLimit:
    """A deadline that is never reached.

    Entering and leaving it takes a quarter of the time of `asyncio.timeout(None)`.
    """

    async def __aenter__(self) -> NoLimit:
        return self

    async def __aexit__(self, *exception_info: object) -> None:
        return None

    def expired(self) -> bool:
        return False


NO_LIMIT = NoLimit()


def limit_time(seconds: float | None) -> Deadline | NoLimit:
    """Return a timeout that pauses while a judged program runs, or `NO_LIMIT` for None."""
    return NO_LIMIT if seconds is None else Deadline(seconds)
