"""The activity of a run: the time in which its components generate or train, and spans for traces.

A process has one table, as it has one for waits (`ratchet.observe.stall_report`), because the
components that work have no reference to those that report.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

Listener = Callable[[str, str, float, float], None]  # track, name, beginning, end
_NULL_CONTEXT = nullcontext()


class Activity:
    """The table of activity.

    Attributes:
        span_listener: Called with each part that has ended, if not None.
        attempt_listener: Called with each attempt that has ended, if not None.
        attempts_left: Number of further attempts that are reported.
        clock: Returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.span_listener: Listener | None = None
        self.attempt_listener: Listener | None = None
        self.attempts_left = 0
        self._busy_s, self._n_working, self._since = 0.0, 0, 0.0

    @property
    def busy_s(self) -> float:
        """Return the seconds so far in which at least one component worked."""
        return self._busy_s + (self.clock() - self._since if self._n_working else 0.0)

    def begin(self) -> None:
        if not self._n_working:
            self._since = self.clock()
        self._n_working += 1

    def end(self) -> None:
        self._n_working -= 1
        if not self._n_working:
            self._busy_s += self.clock() - self._since

    @contextmanager
    def work(self, track: str, name: str) -> Iterator[None]:
        """Mark the block as generating or training."""
        self.begin()
        try:
            with self.span(track, name):
                yield
        finally:
            self.end()

    def span(self, track: str, name: str) -> AbstractContextManager[None]:
        """Mark the block as a part of the run. Parts of one track nest, or follow each other."""
        return (
            _NULL_CONTEXT
            if self.span_listener is None
            else self._report(self.span_listener, track, name)
        )

    def attempt(self, group: str, number: int) -> AbstractContextManager[None]:
        """Mark the block as an attempt; attempts overlap."""
        if self.attempt_listener is None or not self.attempts_left:
            return _NULL_CONTEXT
        self.attempts_left -= 1
        return self._report(self.attempt_listener, group, str(number))

    @contextmanager
    def _report(self, listener: Listener, track: str, name: str) -> Iterator[None]:
        start = self.clock()
        try:
            yield
        finally:
            listener(track, name, start, self.clock())


ACTIVITY = Activity()
