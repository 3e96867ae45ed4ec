"""Processes that user code left running end with the run; those that may be meant to stay do not."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys

import pytest

from ratchet.processes.left_processes import OWNER, end_left_processes
from ratchet.rewards.process_pool.pool import RewardWorkers


def start(stack: contextlib.ExitStack, *command: str, detached: bool = False) -> int:
    """Start a program, which is killed at the end of `stack`."""
    process = subprocess.Popen(command, start_new_session=detached)
    stack.callback(process.wait)
    stack.callback(process.kill)
    return process.pid


def test_left_processes_end_with_the_run(caplog):
    sleep = ("sleep", "600")
    with contextlib.ExitStack() as stack:
        earlier = start(stack, *sleep)
        with end_left_processes():
            left, detached = start(stack, *sleep), start(stack, *sleep, detached=True)
            os.waitid(os.P_PID, start(stack, "true"), os.WEXITED | os.WNOWAIT)
            orphan = int(subprocess.check_output(["sh", "-c", "sleep 600 >/dev/null & echo $!"]))
            stack.callback(os.kill, orphan, 9)
        assert os.waitid(os.P_PID, left, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None
        for pid in (earlier, detached):
            assert os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None
        os.kill(orphan, 0)
        named, ends = caplog.messages
        assert f"still running: {detached} (sleep 600), {orphan} (sleep 600). If" in named
        assert f"are ended: {left} (sleep 600). End" in ends


def test_helpers_of_libraries_stay(caplog):
    helper = "from multiprocessing.resource_tracker import main; import time; time.sleep(600)"
    with contextlib.ExitStack() as stack:
        with end_left_processes():
            pid = start(stack, sys.executable, "-S", "-c", helper)
        assert os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None
        assert caplog.messages == []


@pytest.mark.medium
def test_workers_of_ratchet_and_programs_that_name_it_their_owner_stay(caplog):
    with contextlib.ExitStack() as stack:
        with end_left_processes():
            numbers = RewardWorkers("operator:add", cpu_s=10)
            assert asyncio.run(numbers.call(2, 3)) == 5
            owned = subprocess.Popen(
                ("sleep", "600"), env={OWNER: str(os.getpid())}, start_new_session=True
            )
            stack.callback(owned.wait)
            stack.callback(owned.kill)
        assert caplog.messages == []


def test_a_word_of_the_command_line_makes_no_helper(caplog):
    with contextlib.ExitStack() as stack, end_left_processes():
        start(stack, "sh", "-c", "sleep 600; true", "/srv/ray/wandb", detached=True)
        start(stack, sys.executable, "-c", "import time; time.sleep(600)", "raylet")
    assert len(caplog.messages) == 2
