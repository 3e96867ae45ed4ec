"""A sentinel that pauses a run, and what becomes of it."""

import json

import pytest
import yaml
from forked_runs import training_forks

from ratchet.runs.checkpoints import CheckpointStore
from ratchet.testing.kill_and_resume import ChaosTest, list_differences
from ratchet.training.run import PAUSED

RECIPE = {
    "name": "probe",
    "threads": 1,
    "device": "cpu",
    "model": {"preset": "tiny", "overrides": {"hidden_size": 32, "n_layers": 1}},
    "tokenizer": {"kind": "characters", "alphabet": "0123456789="},
    "environment": {"kind": "sorting", "digits": 2},
    "evaluation": {"tasks": 0},
    "logging": {"progress": "off", "tensorboard": False},
    # its files end where a run is saved, and a pause saves at a step of its own
    "record": {"every": 0},
    "algorithm": {"kind": "sft"},
    "steps": 6,
    "batch_size": 4,
    "checkpoint": {"every": 2},
}
MINE = {"metric": "policy/lr", "rule": "above", "threshold": 1.5e-5, "patience": 2}
LOSS = {"metric": "policy/loss", "rule": "spike", "threshold": 0.0, "window": 2}
# The rate rises: 1e-5, 2e-5, ..., so the sentinel's rule holds from step 2 on, and it alarms at
# step 3.
RISING = {"optimizer": {"lr": 6e-5, "warmup_steps": 6}}


@pytest.fixture(scope="module")
def forks(tmp_path_factory):
    with training_forks(tmp_path_factory.mktemp("forks") / "output.log") as made:
        yield made


def training(tmp_path, forks, name, action):
    folder = tmp_path / name
    folder.mkdir()
    recipe = folder / "probe.yaml"
    own = {"mine": {**MINE, "action": action}, "loss": LOSS}
    recipe.write_text(yaml.safe_dump({**RECIPE, **RISING, "sentinels": {"custom": own}}))
    chaos = ChaosTest(recipe, folder, forks)
    return lambda fault="": chaos.start(folder / "run", fault)


@pytest.mark.slow
def test_it_saves_and_ends_with_a_status_of_its_own_and_goes_on_when_told_to(forks, tmp_path):
    paused = training(tmp_path, forks, "paused", "pause")
    assert paused() == PAUSED
    run = tmp_path / "paused" / "run"
    assert CheckpointStore(run / "checkpoints").steps() == [2, 3]
    assert "sentinel mine: policy/lr" in (run / "run.log").read_text()
    evidence = json.loads((run / "sentinels" / "step-00000003-mine.json").read_text())
    assert len(evidence["history"]) == 3
    assert len(evidence["attempts"]) == 4
    assert paused() == 0, "its memory says that it has alarmed"
    warned = training(tmp_path, forks, "warned", "warn")
    assert warned() == 0
    # Evidence names its action, too.
    assert list_differences(tmp_path / "warned" / "run", run) == [
        "config.yaml differs",
        "sentinels/step-00000003-mine.json differs",
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "kill", ["step.log:5:kill", "checkpoint.begin:2:kill", "file.drafted:2:kill"]
)
def test_a_killed_run_says_what_the_whole_one_said(kill, forks, tmp_path):
    whole, killed = (training(tmp_path, forks, name, "warn") for name in ("whole", "killed"))
    assert whole() == 0
    assert list((tmp_path / "whole" / "run" / "sentinels").iterdir())
    assert killed(kill) == -9
    assert killed() == 0
    assert list_differences(tmp_path / "whole" / "run", tmp_path / "killed" / "run") == []
