"""What a run is busy with: in which seconds somebody generated or trained, and when each part of it
began and ended.

One table for the process, as of waits (`ratchet.observe.stall_report`): those that work are far
from those that want to know.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

Listener = Callable[[str, str, float, float], None]  # track, name, beginning, end
_NOTHING = nullcontext()


class Activity:
    """listener: is told of each part that has ended, None: nobody. attempts: of an attempt,
    likewise, as long as there are any attempts_left. clock: seconds."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.listener: Listener | None = None
        self.attempts: Listener | None = None
        self.attempts_left = 0
        self._busy_s, self._working, self._since = 0.0, 0, 0.0

    @property
    def busy_s(self) -> float:
        """Seconds so far in which anybody worked; those in which several did count once."""
        return self._busy_s + (self.clock() - self._since if self._working else 0.0)

    def begin(self) -> None:
        if not self._working:
            self._since = self.clock()
        self._working += 1

    def end(self) -> None:
        self._working -= 1
        if not self._working:
            self._busy_s += self.clock() - self._since

    @contextmanager
    def work(self, track: str, name: str) -> Iterator[None]:
        """Somebody generates or trains, inside the block."""
        self.begin()
        try:
            with self.span(track, name):
                yield
        finally:
            self.end()

    def span(self, track: str, name: str) -> AbstractContextManager[None]:
        """A part of the run. Those of one track nest, or follow each other."""
        return _NOTHING if self.listener is None else self._told(self.listener, track, name)

    def attempt(self, group: str, number: int) -> AbstractContextManager[None]:
        """Attempts overlap."""
        if self.attempts is None or not self.attempts_left:
            return _NOTHING
        self.attempts_left -= 1
        return self._told(self.attempts, group, str(number))

    @contextmanager
    def _told(self, listener: Listener, track: str, name: str) -> Iterator[None]:
        start = self.clock()
        try:
            yield
        finally:
            listener(track, name, start, self.clock())


ACTIVITY = Activity()
