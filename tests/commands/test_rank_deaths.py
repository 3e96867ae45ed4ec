"""Training on two ranks through the command line, and what is left when one of them, or the driver,
is killed or stopped."""

import getpass
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from forked_runs import ForkedRatchet
from recipes.daily import seed_of_today

from ratchet.runs.checkpoints import CheckpointStore

RECIPE = {
    "name": "probe",
    "threads": 1,
    "device": "cpu",
    "model": {"preset": "tiny", "overrides": {"hidden_size": 32, "n_layers": 1}},
    "tokenizer": {"kind": "characters", "alphabet": "0123456789="},
    "environment": {"kind": "sorting", "digits": 2},
    "sampling": {"max_new_tokens": 3},
    "evaluation": {"tasks": 0},
    "checkpoint": {"every": 2, "keep": 2},
    "learner": {"kind": "dtensor", "dp_shard": 2, "micro_batch_tokens": 64},
    "cluster": {"kind": "local", "silence_s": 5},
    "algorithm": {"kind": "grpo", "group_size": 4, "kl": {"coef": 0.01}},
    "steps": 20,
    "batch_size": 16,
}
NOTICED_S = 30.0


class Driver:
    """`ratchet train` in a process of its own, whose temporary files lie in `folder`."""

    def __init__(self, *arguments, folder: Path, launcher: tuple[str, ...] = ()):
        folder.mkdir(exist_ok=True)
        self.folder, self.before = folder, set(os.listdir("/dev/shm"))
        self.cache = f"torchinductor_{getpass.getuser()}"  # torch's own, of all runs
        environment = {**os.environ, "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"}
        self.process = self.start(["train", *map(str, arguments)], environment, launcher)
        # every process that it has started, as far as we have seen, with its birth
        self.born: dict[int, str] = {}

    def start(
        self, words: list[str], environment: dict[str, str], launcher: tuple[str, ...]
    ) -> subprocess.Popen[str] | ForkedRatchet:
        command = [sys.executable, "-m", *launcher, "ratchet", *words]
        return subprocess.Popen(command, env=environment, stdout=-1, stderr=-1, text=True)

    def look(self) -> list[int]:
        """Its descendants of now, the ranks last."""
        children: dict[int, list[int]] = {}
        for entry in filter(str.isdecimal, os.listdir("/proc")):
            if stat := stat_of(int(entry)):
                children.setdefault(int(stat[1]), []).append(int(entry))
        found = [self.process.pid]
        for pid in found:
            found += sorted(children.get(pid, []))
        self.born |= {pid: stat[19] for pid in found[1:] if (stat := stat_of(pid))}
        return found[1:]

    def rank(self, number: int, role: str = "learner") -> int:
        """The process of that rank: its output goes to a file that says which it is."""
        for pid in self.look():
            try:
                if f"/{role}-{number}-" in os.readlink(f"/proc/{pid}/fd/1"):
                    return pid
            except OSError:
                continue
        raise AssertionError(f"no process is rank {number}")

    def ended(self) -> tuple[int, str]:
        """(exit status, what it wrote to standard error)"""
        _, said = self.process.communicate(timeout=NOTICED_S)
        return self.process.returncode, said

    def assert_nothing_left(self) -> None:
        until(lambda: not any(stat_of(pid)[19:20] == [birth] for pid, birth in self.born.items()))
        until(lambda: not [name for name in os.listdir(self.folder) if name != self.cache])
        left = set(os.listdir("/dev/shm")) - self.before
        mine = [name for name in left if name.startswith(("ratchet", "torch", "gloo"))]
        # tests beside this one make those
        assert not [name for name in mine if not name.startswith("ratchet-vllm-")]


class ForkedDriver(Driver):
    """A driver that starts at once: it is forked from a process that has the imports."""

    def start(
        self, words: list[str], environment: dict[str, str], launcher: tuple[str, ...]
    ) -> ForkedRatchet:
        return ForkedRatchet(words, environment)


def stat_of(pid: int) -> list[str]:
    """The state of a process, its parent, ...; nothing where it is gone, or only not yet waited
    for."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [] if fields[0] in "ZX" else fields


def until(condition, limit_s: float = NOTICED_S) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


def steps_of(run: Path) -> list[int]:
    """Return the steps in a run's metrics, without a line that is being written."""
    try:
        text = (run / "metrics.jsonl").read_text()
    except FileNotFoundError:
        return []
    whole, _, _ = text.rpartition("\n")
    return [json.loads(line)["step"] for line in whole.splitlines()]


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "probe.yaml"
    path.write_text(yaml.safe_dump(RECIPE))
    return path


@pytest.fixture
def run(tmp_path):
    return tmp_path / "run"


def started(recipe, run, seed: int, launcher: tuple[str, ...] = ()) -> Driver:
    """In the middle of one of its steps."""
    start = Driver if launcher else ForkedDriver
    folder = recipe.parent / "temporary"
    driver = start(recipe, "--run-dir", run, folder=folder, launcher=launcher)
    until(lambda: len(steps_of(run)) > 3 or driver.process.poll() is not None, limit_s=300)
    time.sleep(random.Random(seed).random() * 0.2)  # anywhere in a step
    driver.look()
    assert driver.process.poll() is None, driver.process.communicate()
    return driver


def assert_goes_on(run: Path) -> None:
    """From its checkpoint to the end."""
    resumed = ForkedDriver("--resume", run, folder=run.parent / "temporary")
    _, said = resumed.process.communicate(timeout=300)
    assert resumed.process.returncode == 0, said
    assert "from step" in (run / "run.log").read_text()
    assert steps_of(run)[-1] == RECIPE["steps"]
    assert len(set(steps_of(run))) == len(steps_of(run))
    assert (run / "model" / "model.safetensors").is_file()
    resumed.assert_nothing_left()


@pytest.mark.slow
@pytest.mark.parametrize(("how", "rank"), [(signal.SIGKILL, 1), (signal.SIGSTOP, 0)])
@pytest.mark.fault("P4", "P7")
def test_a_rank_is_killed_or_stopped(recipe, run, how, rank):
    driver = started(recipe, run, seed=how)
    os.kill(driver.rank(rank), how)
    status, said = driver.ended()
    assert status == 1
    assert f"WorkerDied: learner rank {rank} of 2 on {os.uname().nodename}" in said
    assert (
        "SIGKILL"
        if how is signal.SIGKILL
        else "was silent for 5 s (it is stopped, for example by SIGSTOP)"
    ) in said
    assert "Traceback" not in said
    driver.assert_nothing_left()
    assert_goes_on(run)


@pytest.mark.slow
@pytest.mark.fault("P6")
def test_the_driver_is_killed_at_any_point_of_a_step(recipe, run):
    """At another point each day."""
    driver = started(recipe, run, seed_of_today(7))
    driver.process.kill()
    assert driver.ended()[0] == -signal.SIGKILL
    driver.assert_nothing_left()
    assert_goes_on(run)


@pytest.mark.slow
@pytest.mark.fault("P6")
def test_a_rank_is_killed_while_ranks_write_a_checkpoint(recipe, run):
    beside = {"every": 1, "keep": 2, "background": True}
    recipe.write_text(yaml.safe_dump(RECIPE | {"checkpoint": beside}))
    driver = started(recipe, run, seed=5)
    pid = driver.rank(1)
    until(lambda: list((run / "checkpoints").glob(".tmp-*")))
    os.kill(pid, signal.SIGKILL)
    status, said = driver.ended()
    assert status == 1
    assert "WorkerDied: learner rank 1 of 2" in said
    assert "Traceback" not in said
    driver.assert_nothing_left()
    store = CheckpointStore(run / "checkpoints")
    latest = store.latest()
    assert latest is not None
    assert store.steps()[-1] == latest.step
    assert_goes_on(run)


@pytest.mark.slow
def test_a_signal_finishes_the_step(recipe, run):
    driver = started(recipe, run, seed=3)
    driver.process.send_signal(signal.SIGTERM)
    assert driver.ended()[0] == 128 + signal.SIGTERM
    driver.assert_nothing_left()
    assert_goes_on(run)


@pytest.mark.slow
def test_under_torchrun_too(recipe, run):
    """It sends the signal to all ranks, and rank 0 needs the others to finish its step."""
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m")
    driver = started(recipe, run, seed=4, launcher=torchrun)
    driver.process.send_signal(signal.SIGTERM)
    driver.ended()
    assert "SIGTERM: finishing this step, then saving" in (run / "run.log").read_text()
    assert "WorkerDied" not in (run / "run.log").read_text()
    assert (
        max(int(path.name.rpartition("-")[2]) for path in (run / "checkpoints").iterdir())
        == steps_of(run)[-1]
    )
