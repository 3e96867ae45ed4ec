"""A step whose rollouts have images, played again from the record."""

import asyncio
import shutil

import pytest
import yaml

from ratchet.commands.replay.engine import RecordedSource, Replay
from ratchet.errors import DataError
from ratchet.observe.records.reader import Record
from ratchet.testing.tiny_vlm import write_tiny_vlm
from ratchet.training.start import start_run

RECIPE = {
    "name": "pictures",
    "threads": 1,
    "logging": {"progress": "off", "tensorboard": False},
    "environment": {"kind": "commands.picture_world:World"},
    "generator": {"kind": "hf"},
    "sampling": {"max_new_tokens": 12, "stop": list("abcdefghijklmnopqrstuvwxyz")},
    "evaluation": {"tasks": 0},
    "checkpoint": {"every": 1, "keep": 4},
    "stages": [
        {
            "name": "grpo",
            "algorithm": {"kind": "grpo", "group_size": 3},
            "steps": 2,
            "batch_size": 2,
        }
    ],
}


@pytest.mark.slow
def test_a_step_with_images_is_played_again_bit_for_bit(tmp_path):
    model = write_tiny_vlm(tmp_path / "model")
    recipe, run = tmp_path / "recipe.yaml", tmp_path / "run"
    recipe.write_text(yaml.safe_dump({**RECIPE, "model": {"path": str(model)}}))
    assert start_run(recipe, [], run, command="test") == 0
    record = Record(run / "steps")
    assert sum(len(t.media) for group in record.groups(2) for t in group.trajectories) >= 6

    async def play(step):
        replay = Replay(run)
        await replay.advance_to(step)
        return await replay.replay_next()

    for step in (1, 2):
        played = asyncio.run(play(step))
        assert played.table.equals(record.step(step).cast(played.table.schema))
        assert played.fingerprints == record.steps[step].fingerprints
    with pytest.raises(DataError, match="the run's model has no processor any more"):
        asyncio.run(RecordedSource(record, None).draw(2, 0))
    shutil.rmtree(run / "steps" / "media")
    with pytest.raises(DataError, match=r"media/0.*parquet can't be read"):
        asyncio.run(play(2))
