"""Plain functions of users run in threads of their own: one that hangs costs its call alone."""

import asyncio
import contextlib
import threading

import pytest

from ratchet.rewards import user_threads
from ratchet.rewards.deadline import CURRENT_DEADLINE
from ratchet.rewards.user_threads import call_in_thread


class Recorded:
    """A deadline that counts its pauses."""

    seconds = 1.0
    pauses = 0

    @contextlib.contextmanager
    def paused(self):
        self.pauses += 1
        yield


def test_a_call_that_hangs_holds_up_neither_other_calls_nor_the_end(monkeypatch):
    monkeypatch.setattr(user_threads, "MAX_CALLS", 1)
    release, ended = threading.Event(), []

    def hang():
        release.wait(10)
        ended.append("hung")

    async def main():
        hung = asyncio.ensure_future(call_in_thread(hang))
        await asyncio.sleep(0)
        deadline = Recorded()
        CURRENT_DEADLINE.set(deadline)
        waiting = asyncio.ensure_future(call_in_thread(lambda: "well"))
        await asyncio.sleep(0)
        assert deadline.pauses == 1  # its time does not run while it waits for a thread
        hung.cancel()
        return await waiting

    assert asyncio.run(main()) == "well"
    assert ended == []
    release.set()


def test_a_thread_is_used_again():
    """What user code keeps for each thread, such as a connection, stays."""

    async def main():
        return [await call_in_thread(threading.get_ident) for _ in range(20)]

    assert len(set(asyncio.run(main()))) < 20


@pytest.mark.parametrize(
    ("raised", "expected"), [(KeyError("a"), KeyError), (StopIteration(), RuntimeError)]
)
def test_what_a_call_raises_reaches_the_caller(raised, expected):
    def fail():
        raise raised

    with pytest.raises(expected):
        asyncio.run(call_in_thread(fail))
