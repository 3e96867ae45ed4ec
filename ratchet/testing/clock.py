"""A clock that jumps: under it code that waits takes no time, and takes the same course every
time."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Jumping(selectors.SelectSelector):
    """now: seconds. Where nothing is there to be done but to wait for a timer, it is that timer's
    time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0 if timeout is not None else None)
        if not events and timeout is not None:
            self.now += max(0.0, timeout)
        return events


class SimulatedLoop(asyncio.SelectorEventLoop):
    """An event loop for code in one thread: results of other threads would come at any time."""

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


def simulate(coroutine: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` under such a clock, which begins at 0; `loop.time()` reads it."""
    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        return runner.run(coroutine)
