"""Two lengths of one thing, warm-ups by share, and recipes cut short."""

from pathlib import Path

import pytest
import yaml

from ratchet.commands.describe_recipe import describe
from ratchet.config.length import count_warmup_steps, shorten
from ratchet.config.loader import dump_config, load_config
from ratchet.config.schema import RunConfig
from ratchet.errors import ConfigError

BASE = {
    "model": {"preset": "tiny"},
    "tokenizer": {"kind": "bytes"},
    "environment": {"kind": "sorting"},
    "algorithm": {"kind": "sft"},
}


def load(tmp_path: Path, *overrides: str, **keys: object) -> RunConfig:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump({**BASE, **keys}))
    return load_config(path, overrides)


def length(config: RunConfig) -> list[tuple[int | None, float | None]]:
    return [(stage.steps, stage.passes) for stage in config.stages]


def test_steps_are_100_unless_one_of_the_two_is_set(tmp_path: Path) -> None:
    assert length(load(tmp_path)) == [(100, None)]
    assert length(load(tmp_path, steps=7)) == [(7, None)]
    assert length(load(tmp_path, passes=2)) == [(None, 2)]


def test_both_or_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="steps=7 and passes=2 are two lengths of one stage"):
        load(tmp_path, steps=7, passes=2)
    with pytest.raises(ConfigError, match="steps and passes are both null"):
        load(tmp_path, steps=None)


def test_the_layer_above_replaces_the_other_length(tmp_path: Path) -> None:
    assert length(load(tmp_path, "passes=2", steps=7)) == [(None, 2)]
    assert length(load(tmp_path, "steps=7", passes=2)) == [(7, None)]
    stages = [{"name": "a", "passes": 0.5}, {"name": "b"}]
    assert length(load(tmp_path, steps=7, stages=stages)) == [(None, 0.5), (7, None)]
    assert length(load(tmp_path, "stages.a.steps=3", stages=stages)) == [(3, None), (100, None)]
    optimizer = load(tmp_path, "optimizer.warmup_share=0.1", optimizer={"warmup_steps": 3})
    assert optimizer.stages[0].optimizer.warmup_steps == 0


def test_a_length_that_stages_set_in_the_other_way_has_no_effect_at_the_top(tmp_path: Path) -> None:
    stages = [{"name": "a", "steps": 4}]
    with pytest.raises(ConfigError, match=r"passes: has no effect.* set stages.a.passes"):
        load(tmp_path, "passes=2", stages=stages)


def test_passes_survive_a_dump(tmp_path: Path) -> None:
    config = load(tmp_path, passes=2)
    (tmp_path / "dump.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "dump.yaml") == config


def test_a_description_before_the_data_are_read(tmp_path: Path) -> None:
    text = describe(load(tmp_path, passes=2, evaluation={"every": 5}))
    assert "length        2 passes" in text
    assert "evaluation    before and after, every 5 steps, 512 attempts each" in text


def test_warmup_by_share(tmp_path: Path) -> None:
    assert count_warmup_steps(0, 0.1, 31) == 4
    assert count_warmup_steps(0, 0.0, 31) == 0
    assert count_warmup_steps(5, 0.0, 31) == 5
    with pytest.raises(ConfigError, match=r"warmup_steps=3 and warmup_share=0.1 are two lengths"):
        load(tmp_path, optimizer={"warmup_steps": 3, "warmup_share": 0.1})


@pytest.mark.medium
def test_a_recipe_cut_short_is_still_one(tmp_path: Path) -> None:
    critic = {"kind": "ppo", "critic": {"warmup_steps": 10}}
    config = load(
        tmp_path,
        steps=40,
        examples=20,
        curriculum={"difficulty": "digits", "full_by_step": 30},
        algorithm=critic,
        optimizer={"warmup_steps": 10, "schedule": "wsd", "decay_steps": 10},
        evaluation={"every": 4},
        checkpoint={"every": 2, "keep_best": 1, "end_with": "best"},
    )
    for steps in (1, 2, 3, 9, 60):
        cut, (note,) = shorten(config, steps)
        (tmp_path / "cut.yaml").write_text(dump_config(cut))
        assert load_config(tmp_path / "cut.yaml") == cut
        assert cut.stages[0].steps == min(40, steps)
    assert note == "stage ppo is only tried: 40 steps of the 40 in the recipe"
    assert shorten(config, 3)[1] == [
        "stage ppo is only tried: 3 steps of the 40 in the recipe; clipped: "
        "optimizer.warmup_steps=10 to 2, optimizer.decay_steps=10 to 1, "
        "algorithm.critic.warmup_steps=10 to 2, evaluation.every=4 to 3, "
        "checkpoint.every=2 to 3, curriculum.full_by_step=30 to 3"
    ]
