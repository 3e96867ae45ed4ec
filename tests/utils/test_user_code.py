"""Code that catches its cancellation is left behind, and its task ends when the code returns."""

import asyncio

import pytest

from ratchet.utils import user_code
from ratchet.utils.user_code import leave_when_cancelled, run_guarded


@pytest.mark.parametrize(("stop_s", "n_cancellations"), [(0.01, 1), (60.0, 2)])
def test_work_that_is_left_behind_does_not_go_on(monkeypatch, stop_s, n_cancellations):
    """A caller may be cancelled a second time while it waits for the end of the work."""
    monkeypatch.setattr(user_code, "STOP_S", stop_s)
    went_on = []

    async def main():
        release, entered = asyncio.Event(), asyncio.Event()

        async def stubborn():
            while not release.is_set():
                entered.set()
                try:
                    await release.wait()
                except asyncio.CancelledError:
                    continue

        async def work():
            await run_guarded(stubborn)
            went_on.append(True)

        call = asyncio.ensure_future(leave_when_cancelled(work()))
        for _ in range(n_cancellations):
            await entered.wait()
            entered.clear()
            call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        release.set()
        await asyncio.gather(
            *asyncio.all_tasks() - {asyncio.current_task()}, return_exceptions=True
        )

    asyncio.run(main())
    assert went_on == []


def test_a_task_of_user_code_names_its_coroutine():
    async def poll():
        pass

    async def start():
        task = asyncio.ensure_future(poll())
        await task
        return repr(task.get_coro())

    assert "poll" in asyncio.run(run_guarded(start))
