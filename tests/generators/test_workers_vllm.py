"""The real vLLM in a process of its own, beside a learner in others."""

import contextlib
import json
import os
import signal
import tempfile
from pathlib import Path

import pytest
import yaml
from commands.test_rank_deaths import Driver, stat_of, steps_of, until

pytestmark = [pytest.mark.slow, pytest.mark.needs("vllm")]
SHAPE = {
    "hidden_size": 64,
    "n_layers": 1,
    "n_heads": 2,
    "n_kv_heads": 2,
    "head_dim": 32,
    "max_positions": 128,
}
RECIPE = {
    "name": "probe",
    "threads": 2,
    "device": "cpu",
    "model": {"preset": "tiny", "overrides": SHAPE},
    "tokenizer": {"kind": "characters", "alphabet": "0123456789="},
    "environment": {"kind": "sorting", "digits": 2},
    "sampling": {"max_new_tokens": 3},
    "evaluation": {"tasks": 32},
    "optimizer": {"lr": 3e-3},
    "parity": {"every": 1, "threshold": 1e-3},
    "batch_size": 16,
    "learner": {"kind": "dtensor"},
    "generator": {
        "kind": "workers",
        "workers": 1,
        "worker": {"kind": "vllm", "kv_cache_gib": 0.1, "enforce_eager": True},
    },
    "stages": [
        {"name": "sft", "algorithm": {"kind": "sft"}},
        {"name": "grpo", "algorithm": {"kind": "grpo", "group_size": 4}},
    ],
}
START_S = 300


@contextlib.contextmanager
def driver_of(tmp_path, *, engine, steps=(50, 10), **keys):
    recipe = tmp_path / "probe.yaml"
    generator = {**RECIPE["generator"], **keys}
    generator["worker"] = {**generator["worker"], "engine": engine}
    stages = [{**stage, "steps": n} for stage, n in zip(RECIPE["stages"], steps, strict=True)]
    recipe.write_text(yaml.safe_dump({**RECIPE, "generator": generator, "stages": stages}))
    folder = Path(tempfile.gettempdir()) / "v"  # vLLM's sockets need short names
    driver = Driver(recipe, "--run-dir", tmp_path / "run", folder=folder)
    try:
        yield driver
    finally:
        driver.process.kill()


def segments():
    """Of vLLM, in shared memory."""
    return {
        name
        for name in os.listdir("/dev/shm")
        if name.startswith(("psm_", "ratchet-vllm-", "vllm"))
    }


def left(before):
    """Of those that came since, what belongs to nobody: other tests run vLLM at the same time."""
    maps = ""
    for path in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            maps += path.read_text()
    return {name for name in segments() - before if name not in maps and not lives(name)}


def lives(name):
    """Whether the group that a directory is named for has a process."""
    group = name.removeprefix("ratchet-vllm-").partition("-")[0]
    try:
        os.killpg(int(group), 0)
    except (ValueError, ProcessLookupError):
        return False
    return True


def rows_of(tmp_path):
    text = (tmp_path / "run" / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.rpartition("\n")[0].splitlines()]


def kill_first(driver):
    os.kill(driver.rank(0, role="generator"), signal.SIGKILL)
    _, said = driver.process.communicate(timeout=START_S)
    return said


def assert_nothing_left(driver, before):
    until(lambda: not any(stat_of(pid)[19:20] == [birth] for pid, birth in driver.born.items()))
    until(lambda: not left(before))


def test_two_train_and_sample_what_the_learner_has_and_a_killed_one_is_replaced(tmp_path):
    before, run = segments(), tmp_path / "run"
    with driver_of(tmp_path, engine="sync", workers=2, recovery="restart") as driver:
        until(lambda: len(steps_of(run)) > 10 or driver.process.poll() is not None, START_S)
        said = kill_first(driver)
        assert driver.process.returncode == 0, said
        assert "generator restart 1 of at most 3" in (run / "run.log").read_text()
        rows = rows_of(tmp_path)
        assert rows[0]["eval/accuracy"] < 0.2 < rows[-1]["eval/accuracy"]
        assert max(row["parity/max"] for row in rows if "parity/max" in row) < 1e-4
        assert_nothing_left(driver, before)


def test_a_killed_one_ends_the_run_and_its_processes(tmp_path):
    """Of vLLM: the worker has an engine in a process, and that has a worker in another."""
    before, run, steps = segments(), tmp_path / "run", (5, 10_000)
    with driver_of(tmp_path, engine="async", recovery="none", steps=steps) as driver:
        until(lambda: len(steps_of(run)) > 8 or driver.process.poll() is not None, START_S)
        said = kill_first(driver)
        assert driver.process.returncode == 1, said
        assert "WorkerDied: generator rank 0 of 1" in said
        parity = [row["parity/max"] for row in rows_of(tmp_path) if "parity/max" in row]
        assert parity
        assert max(parity) < 1e-4
        assert_nothing_left(driver, before)
