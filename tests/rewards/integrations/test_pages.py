"""The pages on other libraries' functions: their recipes train as they stand."""

import pytest
from pages import run, written

from ratchet.config.loader import load_config

TRAIN = (
    "import sys; from ratchet.cli.main import main; sys.argv = ['ratchet', 'train', {!r}]; main()"
)


@pytest.fixture
def pages(repository, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("trl", "verl"):
        written(repository / "docs" / "integrations" / f"{name}.md", tmp_path)
    return tmp_path


def test_the_recipes_are_valid(pages):
    recipes = sorted(pages.glob("*.yaml"))
    assert len(recipes) == 4
    for recipe in recipes:
        load_config(recipe)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "metrics"),
    [
        ("with_rewards", ["reward/exact", "reward/only_long_sums/length"]),
        ("with_environment", ["attempt/Counter", "attempt/presses"]),
        ("with_verl", ["reward/compute_score/acc", "reward/compute_score/length"]),
        ("with_openrlhf", ["reward/reward_func/right", "reward/reward_func/scores"]),
    ],
)
def test_the_recipes_train_and_log(pages, recipe, metrics):
    run(pages, "-c", TRAIN.format(f"{recipe}.yaml"))
    (logged,) = pages.glob("runs/*/metrics.jsonl")
    text = logged.read_text(encoding="utf-8")
    assert [name for name in metrics if f'rollout/{name}"' not in text] == []
