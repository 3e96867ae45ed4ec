"""A run with a window of history: killed and resumed, and replayed, with the same bits."""

from __future__ import annotations

import asyncio

import pytest
import yaml
from forked_runs import training_forks

from ratchet.commands.replay.engine import Replay
from ratchet.observe.records.reader import Record
from ratchet.recipes import RECIPES_DIR
from ratchet.testing.kill_and_resume import ChaosTest, Trial

RECIPE = RECIPES_DIR / "step_window.yaml"


@pytest.mark.slow
@pytest.mark.fault("R18")
def test_a_run_with_a_window_of_history_has_the_same_bits(tmp_path):
    recipe = yaml.safe_load(RECIPE.read_text())
    for stage in recipe["stages"]:
        stage |= {"steps": 2, "batch_size": 4, "checkpoint": {"every": 1, "keep": 4}}
        stage["optimizer"] = {"lr": 1e-3, "warmup_steps": 0}
    recipe |= {"logging": {"progress": "off"}, "evaluation": {"tasks": 0}}
    recipe["sampling"] = {"max_new_tokens": 12, "stop": list("udlr")}  # an untrained model goes on
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    with training_forks(tmp_path / "output.log") as forks:
        under_test = ChaosTest(path, tmp_path, forks)
        assert under_test.start(under_test.reference_run, "") == 0
        assert under_test.run_trial(Trial(("step.update:4:kill",))).differences == ()
    record = Record(under_test.reference_run / "steps")
    rows = [row for group in record.groups(4) for row in group.trajectories]
    assert max(row.metrics["turns"] for row in rows) > 3, "longer than the window"
    assert all(len(row.turns) == 1 for row in rows)

    async def play(step):
        replay = Replay(under_test.reference_run)
        await replay.advance_to(step)
        return await replay.replay_next()

    for step in (2, 4):  # supervised rows and rollouts
        played = asyncio.run(play(step))
        assert played.table.equals(record.step(step).cast(played.table.schema))
        assert played.fingerprints == record.steps[step].fingerprints
