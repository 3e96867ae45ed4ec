"""Run a task in a background thread, such as writing a checkpoint while training continues."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future


class BackgroundTask:
    """A runner of one background task at a time.

    The thread is a daemon, so the process can end without waiting for the task. A caller that needs
    the task completed must call `wait`.
    """

    def __init__(self) -> None:
        self._future: Future[None] | None = None

    @property
    def has_finished(self) -> bool:
        """True if a task has finished whose result `wait` can return at once."""
        return self._future is not None and self._future.done()

    @property
    def is_running(self) -> bool:
        """True if a task is running."""
        return self._future is not None and not self._future.done()

    def begin(self, work: Callable[[], object]) -> None:
        """Start a task in a thread. Call `wait` for the previous task first."""
        assert self._future is None, "wait for the previous task first"
        future: Future[None] = Future()

        def run() -> None:
            try:
                work()
            except BaseException as error:  # `wait` raises it
                future.set_exception(error)
            else:
                future.set_result(None)

        self._future = future
        threading.Thread(target=run, name="checkpoint", daemon=True).start()

    def wait(self) -> bool:
        """Wait for the task, and return True if there was one. Raise the task's exception.

        A second call returns False.
        """
        future = self._future
        self._future = None
        if future is None:
            return False
        future.result()
        return True
