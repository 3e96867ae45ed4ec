"""A simulated clock: waiting takes no real time, and every run has the same order of events."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _JumpingSelector(selectors.SelectSelector):
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
        self._selector_clock = _JumpingSelector()
        super().__init__(self._selector_clock)

    def time(self) -> float:
        return self._selector_clock.now


def simulate(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine like `asyncio.run`, with simulated time from 0 on (`loop.time()`)."""
    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        return runner.run(coroutine)
