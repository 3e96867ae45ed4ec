"""Training with generators in processes of their own, through the command line: what becomes of the
run, and what is left, when one of them is killed or stopped."""

import json
import os
import random
import signal
import time

import pytest
import yaml
from commands.test_rank_deaths import RECIPE, ForkedDriver, steps_of, until

pytestmark = pytest.mark.slow
WORKERS = {"kind": "workers", "worker": {"kind": "engine", "kv_cache_gib": 0.01}}


@pytest.fixture
def started(tmp_path):
    """started(recovery, seed): a driver in the middle of one of its steps."""

    def started(seed, **keys):
        recipe = tmp_path / "probe.yaml"
        recipe.write_text(yaml.safe_dump({**RECIPE, "generator": {**WORKERS, **keys}}))
        driver = ForkedDriver(recipe, "--run-dir", tmp_path / "run", folder=tmp_path / "temporary")
        until(
            lambda: len(steps_of(tmp_path / "run")) > 3 or driver.process.poll() is not None,
            limit_s=300,
        )
        time.sleep(random.Random(seed).random() * 0.2)
        driver.look()
        assert driver.process.poll() is None, driver.process.communicate()
        return driver

    return started


@pytest.mark.parametrize(
    ("how", "rank", "worker_runs"),
    [
        (signal.SIGKILL, 1, "completions"),
        (signal.SIGSTOP, 0, "completions"),
        (signal.SIGKILL, 0, "groups"),
    ],
)
@pytest.mark.fault("P1", "P7")
def test_a_generator_is_killed_or_stopped(started, tmp_path, how, rank, worker_runs):
    driver = started(how, worker_runs=worker_runs)
    os.kill(driver.rank(rank, role="generator"), how)
    status, said = driver.ended()
    assert status == 1
    assert f"WorkerDied: generator rank {rank} of 2 on {os.uname().nodename}" in said
    assert (
        "SIGKILL"
        if how is signal.SIGKILL
        else "was silent for 5 s (it is stopped, for example by SIGSTOP)"
    ) in said
    assert "Traceback" not in said
    driver.assert_nothing_left()
    resumed = ForkedDriver("--resume", tmp_path / "run", folder=tmp_path / "temporary")
    assert resumed.process.wait(300) == 0
    assert steps_of(tmp_path / "run")[-1] == RECIPE["steps"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The metrics of the run in which nobody dies."""
    folder = tmp_path_factory.mktemp("undisturbed")
    recipe = folder / "probe.yaml"
    recipe.write_text(yaml.safe_dump({**RECIPE, "generator": {**WORKERS, "recovery": "restart"}}))
    driver = ForkedDriver(recipe, "--run-dir", folder / "run", folder=folder / "temporary")
    assert driver.process.wait(300) == 0, driver.process.communicate()
    return [
        json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()
    ]


@pytest.mark.parametrize(("how", "seed"), [(signal.SIGKILL, 1), (signal.SIGSTOP, 2)])
def test_another_takes_its_place(undisturbed, started, tmp_path, how, seed):
    """And the run ends as one in which nobody died."""
    driver = started(seed, recovery="restart")
    os.kill(driver.rank(seed % 2, role="generator"), how)
    _, said = driver.process.communicate(timeout=300)
    assert driver.process.returncode == 0, said
    assert "generator restart 1 of at most 3" in (tmp_path / "run" / "run.log").read_text()
    rows = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert sum(row.get("generator/restarts", 0) for row in rows) == 1
    driver.assert_nothing_left()
    assert [_lasting(row) for row in rows] == [_lasting(row) for row in undisturbed]


def _lasting(row):
    return {
        name: value
        for name, value in row.items()
        if not name.startswith(("time/", "system/", "generator/"))
    }


def test_the_driver_is_killed(started):
    driver = started(5)
    driver.process.kill()
    assert driver.ended()[0] == -signal.SIGKILL
    driver.assert_nothing_left()
