"""Write a checkpoint in the background, from a copy in main memory, while training continues."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future


class BackgroundTask:
    """A runner of one background task at a time.

    The process does not wait for a task at its end: a caller that begins a task must settle it,
    unless the process is to end at once.
    """

    def __init__(self) -> None:
        self._work: Future[None] | None = None

    @property
    def ended(self) -> bool:
        """True if a task has finished but is not settled: `settle` does not wait."""
        return self._work is not None and self._work.done()

    @property
    def busy(self) -> bool:
        """True if a task is running."""
        return self._work is not None and not self._work.done()

    def begin(self, work: Callable[[], object]) -> None:
        """Start a task in a thread. The previous task must be settled."""
        assert self._work is None, "what was begun before is settled first"
        future: Future[None] = Future()

        def run() -> None:
            try:
                work()
            except BaseException as error:  # `settle` raises it
                future.set_exception(error)
            else:
                future.set_result(None)

        self._work = future
        threading.Thread(target=run, name="checkpoint", daemon=True).start()

    def settle(self) -> bool:
        """Wait for the task, and raise its exception, once. Return True if there was a task."""
        work = self._work
        self._work = None
        if work is None:
            return False
        work.result()
        return True
