import sys
from pathlib import Path

import pytest

from ratchet.config.loader import dump_config, load_config

RECIPE = """\
model: {path: models/mine}
tokenizer: {kind: byte_bpe, texts: [texts.txt]}
environment: {kind: dataset, train: "data/*.jsonl", test: here.jsonl}
algorithm: {kind: on_policy_distillation, teacher: {dataset: models/mine}}
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A directory to stand in, with a recipe, its data and its model in `own`."""
    for name in ("models/mine/config.json", "data/a.jsonl", "texts.txt", "here.jsonl"):
        path = tmp_path / "own" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    (tmp_path / "here.jsonl").write_text("")
    (tmp_path / "own/mine.yaml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def test_paths_that_are_only_beside_the_recipe_are_found_there(project):
    config = load_config("own/mine.yaml")
    environment = config.stages[0].environment
    assert config.model.path == "own/models/mine"
    assert config.tokenizer.texts == (Path("own/texts.txt"),)
    assert environment.train == (Path("own/data/*.jsonl"),)
    assert environment.test == (Path("here.jsonl"),), "where one stands comes first"
    assert config.stages[0].algorithm.teacher == {"dataset": "own/models/mine"}
    assert config.import_dirs == ()


def test_a_path_of_the_command_line_or_of_nothing_stays(project):
    config = load_config("own/mine.yaml", ["model.path=texts.txt", "environment.test=gone.jsonl"])
    assert config.model.path == "texts.txt"
    assert config.stages[0].environment.test == (Path("gone.jsonl"),)


def test_paths_of_an_extended_recipe_are_beside_that_recipe(project):
    (project / "other").mkdir()
    (project / "other/more.yaml").write_text("extends: ../own/mine.yaml\n")
    assert load_config("other/more.yaml").model.path == "other/../own/models/mine"


def test_the_saved_recipe_of_a_run_is_not_looked_up_again(project):
    config = load_config("own/mine.yaml", ["model.path=trained"])
    (project / "run/trained").mkdir(parents=True)
    (project / "run/config.yaml").write_text(dump_config(config))
    assert load_config("run/config.yaml") == config


def test_a_module_beside_the_recipe_is_importable_and_so_it_is_for_the_saved_recipe(project):
    (project / "own/my_beside_rewards.py").write_text(
        "def right(trajectory, task):\n    return 1.0\n"
    )
    (project / "own/mine.yaml").write_text(
        "model: {preset: tiny}\ntokenizer: {kind: characters}\nenvironment: {kind: sorting}\n"
        "algorithm: {kind: grpo}\nrewards: [{kind: 'my_beside_rewards:right'}]\n"
    )
    config = load_config("own/mine.yaml")
    assert config.import_dirs == ("own",)
    (project / "saved.yaml").write_text(dump_config(config))
    sys.path.remove(str(project / "own"))
    assert load_config("saved.yaml") == config
    assert str(project / "own") in sys.path


def test_a_function_of_a_file_beside_the_recipe_is_found_there(project):
    for file in ("own/rewards/score.py", "here.py"):
        (project / file).parent.mkdir(exist_ok=True)
        (project / file).write_text("def score(completions, **columns): return [0.0]\n")
    (project / "own/mine.yaml").write_text(
        RECIPE + "rewards: [{kind: trl, function: 'rewards/score.py:score'}]\n"
        "eval_rewards: [{kind: trl, function: 'here.py:score'}]\n"
    )
    stage = load_config("own/mine.yaml").stages[0]
    assert stage.rewards[0].function == "own/rewards/score.py:score"
    assert stage.eval_rewards[0].function == "here.py:score"
