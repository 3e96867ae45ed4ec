"""The real vLLM, on a CPU. Each engine has a process of its own (`vllm_play.py`)."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

PLAY = Path(__file__).parent / "vllm_play.py"
pytestmark = [pytest.mark.slow, pytest.mark.needs("vllm")]


@pytest.mark.parametrize(
    "play",
    [
        "conforms sync",
        "conforms async",
        "pushes sync tied",
        "pushes async untied tensor_parallel=2",
        "pushes async untied data_parallel=2",
        "pushes_experts",
        "adapters sync",
        "adapters async",
        "several_adapters sync",
        "several_adapters async",
        "pushes_in_flight sync keep_kv",
        "pushes_in_flight async",
        "fails_to_start sync",
        "fails_to_start async",
        "trains_as_the_engine_does",
        "takes_turns",
    ],
)
def test_play(play):
    done = subprocess.run(
        [sys.executable, str(PLAY), *play.split()], capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    assert done.stdout.endswith("fine\n")


def test_no_process_outlives_a_killed_driver():
    driver = subprocess.Popen(
        [sys.executable, str(PLAY), "is_killed"], stdout=subprocess.PIPE, text=True
    )
    assert driver.stdout is not None
    pids = next(json.loads(line) for line in driver.stdout if line.startswith("["))
    assert len(pids) >= 2
    os.kill(driver.pid, signal.SIGKILL)
    driver.wait()
    deadline = time.monotonic() + 60
    while any(map(runs, pids)):
        assert time.monotonic() < deadline, "vLLM's processes outlive the one that started them"
        time.sleep(0.2)


def runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
