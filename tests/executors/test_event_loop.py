"""Event loops that end although user code left tasks and threads that do not."""

import asyncio
import contextlib
import subprocess
import sys
import threading

import pytest

from ratchet.executors import event_loop
from ratchet.executors.event_loop import AbandonableThreads, run_event_loop


@pytest.fixture
def blocked():
    """A function that blocks a thread until the test ends, and an event that says that it runs."""
    entered, release = threading.Event(), threading.Event()

    def block():
        entered.set()
        release.wait()

    yield block, entered
    release.set()


def test_a_task_that_catches_its_cancellation_is_left_behind(monkeypatch, caplog):
    monkeypatch.setattr(event_loop, "END_S", 0.01)
    n_cancelled = 0

    async def poll():
        nonlocal n_cancelled
        while n_cancelled < 100:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                n_cancelled += 1

    async def main():
        tasks.append(asyncio.ensure_future(poll()))
        await asyncio.sleep(0)
        return 7

    tasks = []
    assert run_event_loop(main()) == 7
    assert n_cancelled == 1
    assert "1 tasks that catch their cancellation are left behind" in caplog.text
    n_cancelled = 100
    with pytest.raises(StopIteration):  # end it, so that it is not destroyed while it waits
        tasks[0].get_coro().throw(asyncio.CancelledError())


def test_a_thread_that_blocks_is_left_behind(blocked, monkeypatch, caplog):
    monkeypatch.setattr(event_loop, "END_S", 0.01)
    block, entered = blocked

    async def main():
        call = asyncio.ensure_future(asyncio.to_thread(block))
        while not entered.is_set():
            await asyncio.sleep(0)
        call.cancel()
        return await asyncio.to_thread(lambda: 7)

    assert run_event_loop(main()) == 7
    assert "1 calls in threads are left behind" in caplog.text


def test_errors_and_cancellations_leave_as_from_asyncio_run():
    ended = []

    async def wait():
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    async def main():
        task = asyncio.ensure_future(wait())
        await asyncio.sleep(0)
        raise ValueError(task.done())

    with pytest.raises(ValueError, match="False"):
        run_event_loop(main())
    assert ended == [True]


def test_a_cancelled_call_gives_its_place_to_another(blocked):
    block, entered = blocked
    pool = AbandonableThreads(1)
    first, second = pool.submit(block), pool.submit(lambda: threading.current_thread().name)
    entered.wait()
    assert not second.done()
    assert not first.cancel()
    assert not first.cancel()  # a second time gives nothing
    assert second.result() == "asyncio"
    with pytest.raises(ZeroDivisionError):
        pool.submit(lambda: 1 / 0).result()
    entered.clear()
    third, fourth = pool.submit(block), pool.submit(print)
    entered.wait()
    pool.shutdown(wait=False, cancel_futures=True)
    assert fourth.cancelled()
    assert third.running()
    with pytest.raises(RuntimeError, match="after shutdown"):
        pool.submit(print)


def test_waiting_calls_end_before_the_pool():
    pool = AbandonableThreads(2)
    calls = [pool.submit(lambda i=i: i) for i in range(20)]
    pool.shutdown()
    assert [call.result() for call in calls] == list(range(20))


@pytest.mark.medium
def test_a_process_ends_though_a_call_blocks():
    program = """
import asyncio, threading
from ratchet.executors import event_loop
event_loop.END_S = 0.01
async def main():
    asyncio.ensure_future(asyncio.to_thread(threading.Event().wait))
    await asyncio.sleep(0)
event_loop.run_event_loop(main())
raise SystemExit(3)
"""
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 3


def test_a_task_that_a_cancelled_task_starts_is_left_behind(monkeypatch, caplog):
    monkeypatch.setattr(event_loop, "END_S", 0.01)
    tasks = []

    async def stay():
        loop = asyncio.get_running_loop()
        end = loop.time() + 1
        while loop.time() < end:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(end - loop.time())

    async def start_another():
        try:
            await asyncio.Event().wait()
        finally:
            tasks.append(asyncio.ensure_future(stay()))

    async def main():
        tasks.append(asyncio.ensure_future(start_another()))
        await asyncio.sleep(0)

    run_event_loop(main())
    assert "1 tasks that catch their cancellation are left behind" in caplog.text
    assert tasks[0].cancelled()
    tasks[1].get_coro().close()


def test_calls_go_on_after_a_thread_could_not_start(monkeypatch):
    def fail(self):
        raise RuntimeError("can't start new thread")

    pool = AbandonableThreads(1)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        with pytest.raises(RuntimeError, match="new thread"):
            pool.submit(print)
    assert pool.submit(lambda: 7).result(timeout=10) == 7
    pool.shutdown()
