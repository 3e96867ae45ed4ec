"""Processes that user code left running end with the run; those that may be meant to stay do not."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys

from ratchet.processes.left_processes import end_left_processes


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
