import asyncio
import gc
import os
import sys
import time
from pathlib import Path

import pytest

from ratchet.rewards.process_pool.pool import PoolWorkerError, ProcessorTimeExceeded, RewardWorkers


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parent), *sys.path])


def called(name, *arguments, cpu_s=0.3, **named):
    return asyncio.run(RewardWorkers(f"targets:{name}", cpu_s=cpu_s, **named).call(*arguments))


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_arguments_and_results_travel_whole_and_chatter_does_not_count():
    odd = ["\ud800\x00\u2028\n", {"a": [1, 2.5, None, True]}, "x" * 300_000]
    assert called("echo", *odd) == odd


@pytest.mark.medium
def test_a_call_that_never_ends_is_killed_and_the_next_one_served():
    async def both():
        workers = RewardWorkers("targets:spin", cpu_s=0.2, size=1)
        with pytest.raises(ProcessorTimeExceeded, match=r"targets:spin took more than 0.2 s"):
            await workers.call(1)
        return await workers.call(0)

    assert asyncio.run(both()) == "done"


@pytest.mark.medium
def test_a_regular_expression_that_backtracks_for_ever_is_killed_inside_c_code():
    with pytest.raises(ProcessorTimeExceeded):
        called("backtrack", "(a+)+$", "a" * 60 + "b")


def test_an_exception_comes_back_with_its_traceback():
    with pytest.raises(PoolWorkerError, match="ZeroDivisionError"):
        called("divide", 1, 0)
    with pytest.raises(PoolWorkerError, match=r"(?s)raised:.*SystemExit: enough"):
        called("leave")


@pytest.mark.fault("P21")
def test_memory_is_bounded():
    with pytest.raises(PoolWorkerError, match="MemoryError"):
        called("devour", 900, memory_mib=512)


def test_a_worker_writes_no_file_and_sees_no_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET", "42")
    assert "SECRET" not in called("environment")
    with pytest.raises(PoolWorkerError):
        called("write", str(tmp_path / "out"))
    assert not (tmp_path / "out").exists() or (tmp_path / "out").stat().st_size == 0


@pytest.mark.fault("P3")
def test_a_worker_killed_from_outside_is_replaced_once(tmp_path):
    marker = tmp_path / "marker"
    marker.touch()
    assert called("die_once", str(marker)) == "alive"
    with pytest.raises(PoolWorkerError, match="died"):
        called("die")


def test_a_module_that_is_missing_says_so():
    with pytest.raises(
        PoolWorkerError, match=r"(?s)did not start: .*No module named 'no_such_module'"
    ):
        asyncio.run(RewardWorkers("no_such_module:f", cpu_s=1.0).call())


def test_workers_are_kept_between_calls_and_loops_and_end_with_their_owner():
    workers = RewardWorkers("targets:pid", cpu_s=1.0, size=1)
    first, second = asyncio.run(workers.call()), asyncio.run(workers.call())
    assert first == second
    del workers
    gc.collect()
    # The pool's thread may hold the last reference for a moment after the call has returned.
    deadline = time.monotonic() + 10.0
    while is_running(first) and time.monotonic() < deadline:
        time.sleep(0.001)
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)


def test_calls_of_a_group_run_side_by_side():
    async def group():
        workers = RewardWorkers("targets:echo", cpu_s=1.0, size=2)
        return await asyncio.gather(*(workers.call(i) for i in range(20)))

    assert asyncio.run(group()) == [[i] for i in range(20)]
