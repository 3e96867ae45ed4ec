"""Time in which a program waits for a core counts for no limit, and its own threads extend none."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ratchet.sandbox import Limits, LocalSandbox, Reason, SandboxError
from ratchet.sandbox.fork_server_client import RunOutputs, make_result
from ratchet.sandbox.inside import run_queue, zygote
from ratchet.sandbox.inside.run_queue import RunQueueClock

LIMITS = Limits(wall_s=2)


@pytest.fixture
def proc(tmp_path: Path) -> Iterator[int]:
    proc = os.open(tmp_path, os.O_RDONLY)
    yield proc
    os.close(proc)


def write(proc: Path, pid: int, thread: int, used_s: float, waited_s: float) -> None:
    place = proc / f"{pid}/task/{thread}"
    place.mkdir(parents=True, exist_ok=True)
    (place / "schedstat").write_text(f"{used_s * 1e9:.0f} {waited_s * 1e9:.0f} 1\n")


def test_the_longest_wait_is_left_out(tmp_path, proc, monkeypatch):
    now = 10.0
    monkeypatch.setattr(run_queue.time, "monotonic", lambda: now)
    clock = RunQueueClock(proc, start=8.0)
    assert clock.seconds == 2.0
    write(tmp_path, 2, 2, used_s=0.25, waited_s=1.5)
    write(tmp_path, 2, 3, used_s=0.25, waited_s=0.5)
    clock.measure([2])
    assert clock.seconds == 0.5
    now = 11.0
    write(tmp_path, 2, 2, used_s=0.5, waited_s=1.75)
    write(tmp_path, 2, 3, used_s=0.25, waited_s=1.25)
    clock.measure([2, 99])  # process 99 has ended
    assert clock.seconds == 0.75


def test_waits_of_processes_for_each_other_count(tmp_path, proc, monkeypatch):
    """Four processes that share two cores for 3 s use 6 s, and each waits for 1.5 s."""
    monkeypatch.setattr(run_queue.time, "monotonic", lambda: 3.0)
    clock = RunQueueClock(proc, start=0.0)
    for pid in range(2, 6):
        write(tmp_path, pid, pid, used_s=1.5, waited_s=1.5)
    clock.measure(range(2, 6))
    assert clock.seconds == 3.0


@pytest.mark.parametrize("can_fork", [False, True])
def test_a_program_that_gets_no_core_is_not_judged(tmp_path, proc, monkeypatch, can_fork):
    """A reward of 0 would be a verdict on the machine."""
    now = 0.0

    class Idle:
        def register(self, *_: int) -> None:
            pass

        def poll(self, wait_ms: float) -> list[tuple[int, int]]:
            nonlocal now
            now += wait_ms / 1000
            write(tmp_path, 2, 2, used_s=0.01 * now, waited_s=0.99 * now)
            return []

    monkeypatch.setattr(run_queue.time, "monotonic", lambda: now)
    monkeypatch.setattr(zygote.select, "poll", Idle)
    monkeypatch.setattr(zygote, "measure_resident_kib", lambda proc, pids: 0)
    request = zygote.Request(0.1, 2, 512, 16, 8 if can_fork else 1, 32, False, False)
    with socket.socket() as channel:
        stopped = zygote.wait_for_child(
            channel, 0, 0, request, proc if can_fork else None, RunQueueClock(proc, 0.0), 2
        )
    assert stopped == "starved"
    assert now == pytest.approx(zygote.MAX_STRETCH * 0.1, abs=0.15)
    report = {"status": 9, "stopped": stopped, "seconds": 0.2, "cpu": 0.2}
    with pytest.raises(SandboxError, match="too busy to judge a program"):
        make_result(report, RunOutputs([0, 1], LIMITS), LIMITS)


@pytest.mark.medium
@pytest.mark.parametrize("processes", [1, 4])
def test_other_programs_on_its_core_do_not_use_up_a_programs_time(processes: int) -> None:
    before = os.sched_getaffinity(0)
    limits = Limits(wall_s=0.4, processes=processes)
    with contextlib.ExitStack() as stack:
        os.sched_setaffinity(0, {max(before)})  # the processes below inherit it
        stack.callback(os.sched_setaffinity, 0, before)
        sandbox = LocalSandbox(slots=1)
        stack.callback(sandbox.close)
        for _ in range(3):
            # Linux may share a core among sessions, not among processes.
            busy = subprocess.Popen(
                [sys.executable, "-S", "-c", "while True: pass"], start_new_session=True
            )
            stack.enter_context(busy)
            stack.callback(busy.kill)
        work = "import time\nwhile time.process_time() < 0.2: pass"
        assert asyncio.run(sandbox.run(work, limits=limits)).reason is Reason.EXIT
        asleep = asyncio.run(sandbox.run("import time; time.sleep(60)", limits=limits))
        assert asleep.reason is Reason.WALL
