"""`ratchet train` says what a recipe asks for and likely does not mean."""

from __future__ import annotations

import pytest
import yaml
from command_line import ratchet
from training.test_session import RECIPE

WARNING = "rollouts.max_staleness=1 trains on attempts of older weights, and algorithm grpo treats them as sampled"


@pytest.mark.slow
@pytest.mark.fault("R19")
def test_train_warns_of_staleness_before_its_steps(tmp_path):
    stage = {
        "name": "rl",
        "algorithm": {"kind": "grpo", "group_size": 2},
        "steps": 1,
        "batch_size": 2,
    }
    plain = {
        "evaluation": {"tasks": 0},
        "checkpoint": {"every": 0},
        "stages": [{**stage, "rollouts": {"max_staleness": 1}}],
    }
    recipe = tmp_path / "stale.yaml"
    recipe.write_text(yaml.safe_dump({**RECIPE, **plain}))
    done = ratchet("train", recipe, "--run-dir", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert WARNING in " ".join((done.stdout + done.stderr).split())
    assert WARNING in (tmp_path / "run" / "run.log").read_text()
