"""Work that goes on beside the training, one piece at a time: the writing of a checkpoint from a
copy in main memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future


class Background:
    """Not waited for at the end of the process: whoever begins something settles it, unless the
    process is to end at once."""

    def __init__(self) -> None:
        self._work: Future[None] | None = None

    @property
    def ended(self) -> bool:
        """Whether there is something to settle that will not be waited for."""
        return self._work is not None and self._work.done()

    @property
    def busy(self) -> bool:
        """Whether there is something that goes on."""
        return self._work is not None and not self._work.done()

    def begin(self, work: Callable[[], object]) -> None:
        assert self._work is None, "what was begun before is settled first"
        future: Future[None] = Future()

        def run() -> None:
            try:
                work()
            except BaseException as error:  # whatever it is, `settle` raises it
                future.set_exception(error)
            else:
                future.set_result(None)

        self._work = future
        threading.Thread(target=run, name="checkpoint", daemon=True).start()

    def settle(self) -> bool:
        """Waits until it is done, and raises what it raised, once. Returns whether there was
        anything."""
        work, self._work = self._work, None
        if work is None:
            return False
        work.result()
        return True
