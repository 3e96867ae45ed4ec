"""ROLL's agentic files: which environments are converted, and what the others need."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from ratchet.commands.migrate.importer import ImportResult, UnconvertedTask, read_config

MANAGER = "roll.pipeline.agentic.env_manager.traj_env_manager.TrajEnvManager"
# As ROLL's examples/config/traj_envs.yaml, which the file includes.
ENVIRONMENTS = f"""
steps: 10
custom_env:
  Room:
    env_type: sokoban
    max_steps: ${{steps}}
    max_tokens_per_step: 64
    env_manager_cls: {MANAGER}
    agent_template: "Turn {{turn_idx}}"
    env_config: {{max_steps: 10, format_penalty: -0.15, dim_room: [6, 6], num_boxes: 1}}
  Hall:
    env_type: sokoban
    max_steps: 20
    env_config: {{dim_room: [10, 10], num_boxes: 2, search_depth: 10}}
  Lake: {{env_type: frozen_lake, max_steps: 5, env_config: {{is_slippery: false}}}}
  Ice: {{env_type: frozen_lake, max_steps: 5, env_config: {{size: 6, p: 0.9}}}}
  Guess: {{env_type: "game:GuessTheNumber-v0", max_steps: 7, env_config: {{max_number: 20}}}}
  Shop: {{env_type: webshop, max_steps: 5}}
"""
FILE = """
defaults: [envs@_here_]
pretrain: m
rollout_batch_size: 64
adv_estimator: grpo
reward_normalization: {grouping: traj_group_id, method: mean_std}
actor_train: {training_args: {per_device_train_batch_size: 8, gradient_accumulation_steps: 8}}
actor_infer: {generating_args: {max_new_tokens: 128, top_p: 1.0, top_k: 0}}
train_env_manager:
  num_env_groups: 8
  group_size: 8
  tags: [TAGS]
val_env_manager: {num_env_groups: 32, group_size: 1, tags: [Room, Lake], num_groups_partition: [24, 8]}
custom_envs: {Room: "${custom_env.Room}"}
"""


def imported(folder: Path, tags: str, **changed: Any) -> ImportResult:
    """Import the file with these tags, whose environments have further keys."""
    definitions = yaml.safe_load(ENVIRONMENTS)
    for section in definitions["custom_env"].values():
        section.update(changed)
    (folder / "envs.yaml").write_text(yaml.safe_dump(definitions), encoding="utf-8")
    file = folder / "agentic.yaml"
    file.write_text(FILE.replace("TAGS", tags), encoding="utf-8")
    return read_config(file)


SOKOBAN = {"kind": "sokoban", "size": 4, "boxes": 1, "max_moves": 10}
LAKE = {"kind": "frozen_lake", "size": 4, "holes": 0.2, "slip": 0.0, "max_moves": 5}
ICE = {"kind": "frozen_lake", "size": 6, "holes": 0.1, "slip": 2 / 3, "max_moves": 5}
GUESS = {"kind": "gem", "id": "game:GuessTheNumber-v0", "kwargs": {"max_number": 20}}


@pytest.mark.parametrize(
    ("tag", "section"), [("Room", SOKOBAN), ("Lake", LAKE), ("Ice", ICE), ("Guess", GUESS)]
)
def test_an_environment_is_converted_with_its_size_and_limits(tmp_path, tag, section):
    recipe = imported(tmp_path, tag).recipe
    assert recipe["environment"] == section
    assert recipe["rewards"] == []
    assert recipe["batch_size"] == 8  # groups of 8, and 64 attempts
    assert recipe["algorithm"]["group_size"] == 8
    assert recipe["sampling"]["max_new_tokens"] == (64 if tag == "Room" else 128)
    assert recipe.get("rollouts") == ({"max_turns": 7} if tag == "Guess" else None)
    assert recipe["evaluation"]["tasks"] == 32
    assert recipe["evaluation"]["environment"] == {
        "kind": "mixture",
        "parts": [
            {**SOKOBAN, "tag": "Room", "weight": 24.0},
            {**LAKE, "tag": "Lake", "weight": 8.0},
        ],
    }


def test_losses_are_named_and_unused_environments_are_not(tmp_path):
    result = imported(tmp_path, "Room")
    notes = {item.peer_key: item.note for item in result.dropped if not item.is_default}
    assert "told" not in notes.get("custom_envs.Hall.env_config.search_depth", "")
    assert "in its own way" in notes["custom_envs.Room.agent_template"]
    assert "no reward" in notes["custom_envs.Room.env_config.format_penalty"]
    assert not any(".Hall." in key or key.startswith("custom_env.") for key in notes)
    assert not any(key.startswith("reward_normalization") for key in notes)
    (tags,) = [item for item in result.items if item.peer_key == "train_env_manager.tags"]
    assert "the last box on its goal earns 1; there it pays 10" in tags.note


def test_several_environments_become_a_mixture(tmp_path):
    parts = imported(tmp_path, "Room, Hall").recipe["environment"]["parts"]
    assert [(part["size"], part["weight"]) for part in parts] == [(4, 1.0), (8, 1.0)]


def test_managers_set_the_window_or_images(tmp_path):
    step = imported(tmp_path, "Room", env_manager_cls="x.StepEnvManager", history_length=3)
    assert step.recipe["rollouts"]["history_window"] == 3
    images = imported(tmp_path, "Room", env_manager_cls="x.VLTrajEnvManager")
    assert images.recipe["environment"]["observation"] == "image"
    joined = imported(tmp_path, "Guess", env_manager_cls="x.StepConcatEnvManager", history_length=7)
    assert joined.recipe["environment"] == GUESS


@pytest.mark.parametrize(
    ("tag", "keys", "words"),
    [
        ("Shop", {}, "environment webshop, which is not converted. Serve WebShop by OpenEnv"),
        ("Room", {"agent_runner_cls": "x.Runner"}, "and the agent of agent_runner_cls"),
        ("Room", {"env_manager_cls": "x.AgentNativeStepEnvManager"}, "has no counterpart"),
        ("Guess", {"env_manager_cls": "x.StepConcatEnvManager", "history_length": 2}, "StepConcat"),
        ("Guess", {"tool_wrapper": {"tool_id": "python_code"}}, "a function that adds gem's tools"),
        ("Room", {"env_config": {"dim_room": [6, 8]}}, r"dim_room=\[6, 8\] must be two equal"),
        ("Room", {"env_config": {"dim_room": [[6, 6]]}}, r"dim_room=\[\[6, 6\]\] must be"),
        ("Room", {"env_config": {"num_boxes": "x"}}, "Room.env_config.num_boxes is 'x'"),
        # A recipe of questions would be another task.
        ("Room, Lake]\n  num_groups_partition: [1", {}, "must have a number for each tag. Set it."),
        ("Unknown", {}, "environment Unknown, which is not converted. Choose environment.kind"),
        ("Room, Shop", {}, "environment webshop"),
    ],
)
def test_an_environment_without_a_counterpart_is_refused(tmp_path, tag, keys, words):
    with pytest.raises(UnconvertedTask, match=words):
        imported(tmp_path, tag, **keys)
