"""Run an event loop that ends although user code left tasks or threads that do not.

`asyncio.run` waits without limit for tasks that catch their cancellation and for threads of
`asyncio.to_thread`, and such a thread keeps one of the few places of the loop's thread pool. A
request without a timeout, of one reward or environment, would keep a run from ending.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")
END_S = 10.0  # longest wait for cancelled tasks, and for threads, when a loop ends
N_THREADS = min(32, (os.cpu_count() or 1) + 4)  # as in asyncio


def run_event_loop(main: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine, as `asyncio.run` does.

    When it has ended, other tasks and threads get END_S to end. Those that go on are left behind,
    with a warning: they do not keep the process from ending.
    """
    runner = asyncio.Runner()
    loop = runner.get_loop()
    loop.set_default_executor(AbandonableThreads())
    try:
        return runner.run(main)
    finally:
        if _cancel_all(loop):
            runner.close()
        else:
            loop.close()


def _cancel_all(loop: asyncio.AbstractEventLoop) -> bool:
    """Cancel the tasks of a loop. Return True if all of them have ended in time."""
    deadline = loop.time() + END_S
    pending = asyncio.all_tasks(loop)
    while pending and loop.time() < deadline:  # a cancelled task may start another
        for task in pending:
            task.cancel()
        loop.run_until_complete(asyncio.wait(pending, timeout=deadline - loop.time()))
        pending = asyncio.all_tasks(loop)
    if pending:
        log.warning(
            "%d tasks that catch their cancellation are left behind, such as %r. Let them raise "
            "asyncio.CancelledError",
            len(pending),
            next(iter(pending)).get_coro(),
        )
    return not pending


class _Call(Future[Any]):
    """A call in a thread. Cancelling it while it runs gives its thread's place to another."""

    def __init__(self, pool: AbandonableThreads, function: Callable[[], Any]) -> None:
        super().__init__()
        self._pool, self._function = pool, function
        self.is_abandoned = False

    def cancel(self) -> bool:
        is_cancelled = super().cancel()
        if not is_cancelled and self.running():
            self._pool.abandon(self)
        return is_cancelled

    def run(self) -> None:
        if not self.set_running_or_notify_cancel():
            return
        try:
            result = self._function()
        except BaseException as error:
            self.set_exception(error)
        else:
            self.set_result(result)


class AbandonableThreads(ThreadPoolExecutor):
    """A thread pool that replaces threads whose call was cancelled, and can end without them.

    A thread can't be stopped. Python's own pool keeps its place, and joins it when the process
    ends.

    Args:
        size: Maximum number of threads, not counting those whose call was cancelled.
    """

    def __init__(self, size: int = N_THREADS) -> None:
        super().__init__(size)  # asyncio takes no other class; this one starts threads itself
        self._changed = threading.Condition()
        self._calls = deque[_Call]()  # those that wait for a thread
        self._n_free, self._n_idle = size, 0
        self._running = set[_Call]()
        self._is_closed = False

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        call = _Call(self, partial(fn, *args, **kwargs))
        with self._changed:
            if self._is_closed:
                raise RuntimeError("cannot schedule new futures after shutdown")
            self._calls.append(call)
            try:
                self._find_thread()
            except RuntimeError:  # the machine has no thread left
                self._calls.remove(call)
                raise
        return call

    def abandon(self, call: _Call) -> None:
        """Stop counting the thread of a running call."""
        with self._changed:
            if not call.is_abandoned and not call.done():
                call.is_abandoned = True
                self._n_free += 1
                with contextlib.suppress(RuntimeError):  # other threads take the calls later
                    self._find_thread()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more calls. With `wait`, wait up to END_S for those that run or wait."""
        with self._changed:
            self._is_closed = True
            while cancel_futures and self._calls:
                self._calls.popleft().cancel()
            self._changed.notify_all()
            if wait and not self._changed.wait_for(self._is_at_rest, END_S):
                log.warning(
                    "%d calls in threads are left behind: they have not ended in %g s. Give them "
                    "a time limit",
                    len(self._running) + len(self._calls),
                    END_S,
                )

    def _is_at_rest(self) -> bool:
        return not self._calls and not self._running

    def _find_thread(self) -> None:
        if self._n_idle >= len(self._calls):
            self._changed.notify()
        elif self._n_free:
            threading.Thread(target=self._work, name="asyncio", daemon=True).start()
            self._n_free -= 1

    def _work(self) -> None:
        while (call := self._take()) is not None:
            call.run()
            with self._changed:
                self._running.discard(call)
                if self._is_closed:
                    self._changed.notify_all()
                if call.is_abandoned:
                    return
            del call  # its result may be large

    def _take(self) -> _Call | None:
        """Return the next call; None when the pool is closed."""
        with self._changed:
            self._n_idle += 1
            self._changed.wait_for(lambda: self._calls or self._is_closed)
            self._n_idle -= 1
            if not self._calls:
                return None
            call = self._calls.popleft()
            self._running.add(call)
            return call
