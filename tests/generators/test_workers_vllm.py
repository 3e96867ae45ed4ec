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
        {"name": "sft", "algorithm": {"kind": "sft"}, "steps": 50},
        {"name": "grpo", "algorithm": {"kind": "grpo", "group_size": 4}, "steps": 10},
    ],
}
START_S = 200


def driver_of(tmp_path, **generator):
    recipe = tmp_path / "probe.yaml"
    recipe.write_text(yaml.safe_dump({**RECIPE, "generator": {**RECIPE["generator"], **generator}}))
    folder = Path(tempfile.gettempdir()) / "v"  # vLLM's sockets need short names
    return Driver(recipe, "--run-dir", tmp_path / "run", folder=folder)


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


def test_it_trains_and_samples_what_the_learner_has(tmp_path):
    before, driver = segments(), driver_of(tmp_path, workers=2)
    _, said = driver.process.communicate(timeout=START_S)
    assert driver.process.returncode == 0, said
    rows = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert rows[0]["eval/accuracy"] < 0.2 < rows[-1]["eval/accuracy"]
    assert max(row["parity/max"] for row in rows if "parity/max" in row) < 1e-4
    until(lambda: not left(before))


@pytest.mark.parametrize("recovery", ["none", "restart"])
def test_a_killed_one_is_replaced_or_ends_the_run(tmp_path, recovery):
    before, driver = segments(), driver_of(tmp_path, recovery=recovery)
    until(
        lambda: len(steps_of(tmp_path / "run")) > 10 or driver.process.poll() is not None,
        limit_s=START_S,
    )
    os.kill(driver.rank(0, role="generator"), signal.SIGKILL)
    _, said = driver.process.communicate(timeout=START_S)
    assert driver.process.returncode == (1 if recovery == "none" else 0), said
    if recovery == "none":
        assert "WorkerDied: generator rank 0 of 1" in said
    else:
        assert "generator restart 1 of at most 3" in (tmp_path / "run" / "run.log").read_text()
    until(lambda: not any(stat_of(pid)[19:20] == [birth] for pid, birth in driver.born.items()))
    until(lambda: not left(before))
