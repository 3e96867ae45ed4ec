"""Attempts that begin ahead of their step, on generators in processes of their own, while
generators and drivers are killed: no prompt is lost or trained on twice, and none with weights that
are too old."""

import json
import os
import random
import signal
import tempfile
from collections import Counter
from pathlib import Path

import pytest
import yaml
from commands.test_rank_deaths import RECIPE, ForkedDriver, steps_of, until
from experience.ledger_faults import find_ledger_faults
from support.offloadable_engine import KIND as OFFLOADABLE
from support.rotation import todays

from ratchet.experience.sources.prompt_ledger import read_ledger

pytestmark = pytest.mark.slow
STALENESS, STEPS = 2, 36
AHEAD = {
    **{key: value for key, value in RECIPE.items() if key != "learner"},
    "environment": {"kind": "sorting", "digits": 4},
    "sampling": {"max_new_tokens": 40},
    "checkpoint": {"every": 3, "keep": 2},
    "rollouts": {"max_staleness": STALENESS, "order": "ready"},
    "generator": {
        "kind": "workers",
        "worker": {"kind": "engine", "kv_cache_gib": 0.01},
        "recovery": "restart",
        "max_restarts": 30,
    },
    "steps": STEPS,
    "batch_size": 4,
}
LOCAL = {"kind": "local", "silence_s": 30}
RAY = {"kind": "ray", "silence_s": 30, "object_store_mib": 128}
TURNS = {"worker": {"kind": OFFLOADABLE, "kv_cache_gib": 0.01}}
# The cluster, and keys of the generator. Those that take turns with the learner are interrupted.
PLACES = {
    "local": (LOCAL, {}),
    "ray": (RAY, {}),
    "local, by turns": ({**LOCAL, "colocated": True}, TURNS),
    "ray, by turns": ({**RAY, "colocated": True}, TURNS),
}


@pytest.fixture
def short_path():
    """Ray's sockets lie below it, and their names have a limit."""
    with tempfile.TemporaryDirectory(prefix="r-", ignore_cleanup_errors=True) as path:
        yield Path(path) / "t"


@pytest.mark.parametrize(
    "place",
    [
        pytest.param(name, marks=[pytest.mark.needs("ray")] * name.startswith("ray"))
        for name in todays([*PLACES], 2)
    ],
)
def test_every_prompt_is_trained_on_once_whoever_is_killed(place, tmp_path, short_path):
    recipe, run = tmp_path / "ahead.yaml", tmp_path / "run"
    cluster, keys = PLACES[place]
    generator = {**AHEAD["generator"], **keys}
    recipe.write_text(yaml.safe_dump({**AHEAD, "cluster": cluster, "generator": generator}))
    rng, kills = random.Random(place), 6
    drivers = 2  # of the kills: each takes a new start
    victims = ["driver"] * drivers + ["generator"] * (kills - drivers)
    rng.shuffle(victims)
    driver = ForkedDriver(recipe, "--run-dir", run, folder=short_path)
    killed = Counter()
    for number, victim in enumerate(victims):
        reached = (number + 1) * (STEPS - 4) // len(victims)

        def came(goal=reached, own=driver):
            return (steps_of(run) or [0])[-1] >= goal or own.process.poll() is not None

        until(came, limit_s=300)
        if driver.process.poll() is not None:
            break
        if victim == "driver":
            driver.process.kill()
            driver.ended()
            driver = ForkedDriver("--resume", run, folder=short_path)
        else:
            os.kill(generator_of(driver, rng.randrange(2)), signal.SIGKILL)
        killed[victim] += 1
    _, said = driver.process.communicate(timeout=300)
    assert driver.process.returncode == 0, said
    assert sum(killed.values()) == kills, killed
    lines = list(read_ledger(run / "ledger.jsonl"))
    assert not find_ledger_faults(iter(lines), max_staleness=STALENESS)
    trained = [line for line in lines if line["event"] == "trained"]
    issued = [line["id"] for line in lines if line["event"] == "issued"]
    assert len(trained) == STEPS * AHEAD["batch_size"]
    assert sorted(line["id"] for line in trained) == sorted(issued), (
        "nothing was begun for nothing, or lost"
    )
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(len(rows)))
    assert max(row.get("rollout/staleness_max", 0) for row in rows) <= STALENESS


def generator_of(driver, number):
    """The process of one of the generators: another one may be about to take its place."""
    found = []

    def there():
        found[:] = [pid for pid in driver.look() if is_generator(pid)]
        return len(found) > number or driver.process.poll() is not None

    until(there, limit_s=60)
    return found[number]


def is_generator(pid):
    try:
        title = Path(f"/proc/{pid}/cmdline").read_bytes()
        return title.startswith(b"ray::WorkerActor") or "/generator-" in os.readlink(
            f"/proc/{pid}/fd/1"
        )
    except OSError:
        return False
