"""A simulated clock, with which waiting takes no real time and every run goes the same way."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Jumping(selectors.SelectSelector):
    """A selector that advances `now` (seconds) to the next timer if nothing else is ready."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0 if timeout is not None else None)
        if not events and timeout is not None:
            self.now += max(0.0, timeout)
        return events


class SimulatedLoop(asyncio.SelectorEventLoop):
    """An event loop with simulated time, for code in one thread.

    Results of other threads would arrive at arbitrary simulated times.
    """

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


def simulate(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine like `asyncio.run`, with simulated time from 0 on (`loop.time()`)."""
    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        return runner.run(coroutine)
