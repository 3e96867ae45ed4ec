"""The time in which at least one learner or generator works."""

from __future__ import annotations

import time
from collections.abc import Callable


class BusyTime:
    """A context that marks its block as working; blocks may nest and overlap.

    clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self._busy_s = 0.0
        self._n_working = 0
        self._since = 0.0

    @property
    def seconds(self) -> float:
        """Return the seconds so far in which at least one component worked."""
        return self._busy_s + (self.clock() - self._since if self._n_working else 0.0)

    def __enter__(self) -> None:
        if not self._n_working:
            self._since = self.clock()
        self._n_working += 1

    def __exit__(self, *_: object) -> None:
        self._n_working -= 1
        if not self._n_working:
            self._busy_s += self.clock() - self._since


# One for the whole process: the working components have no reference to the one that measures.
BUSY_TIME = BusyTime()
