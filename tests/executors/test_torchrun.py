import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ratchet.errors import ConfigError
from ratchet.executors.config import TorchrunClusterConfig
from ratchet.executors.torchrun import TorchrunExecutor

TESTS = Path(__file__).parents[1]


def launched(what: str) -> tuple[int, dict, str]:
    """The exit status of torchrun with two processes, what its driver printed, and what all of them
    said."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)])}
    done = subprocess.run(
        [*command, str(Path(__file__).with_name("torchrun_driver.py")), what],
        capture_output=True, text=True, env=environment, timeout=300, check=False,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert lines, done.stderr
    return done.returncode, json.loads(lines[-1]), done.stderr


@pytest.mark.slow
def test_rank_0_drives_and_works_and_the_other_serves():
    status, said, errors = launched("end")
    assert status == 0, errors
    assert said["sums"] == [3.0, 3.0]
    assert said["places"] == [[0, 0, 2], [1, 1, 2]]
    assert said["critic"] == [1]
    assert "2 of 3" in said["too_much"]


@pytest.mark.slow
def test_a_rank_that_dies():
    status, said, _ = launched("die")
    assert status != 0
    message, rank = said["died"]
    assert rank == 1
    assert "learner rank 1 of 2" in message


def test_without_torchrun():
    with pytest.raises(ConfigError, match="needs several processes that torchrun started"):
        TorchrunExecutor(TorchrunClusterConfig(), threads=1, device="cpu")
