"""docs/rollouts.md: what it shows runs as it stands, and the names that it lists are those that
there are."""

import re
from functools import partial

import pytest
from experience.counting import TOKENIZER, Counting, batch_of, by_seed
from pages import run as run_python

from ratchet.experience.nemo_rl import rollouts
from ratchet.experience.nemo_rl.rollouts import run_multi_turn_rollout
from ratchet.testing.fakes import FakeGenerator


@pytest.fixture(scope="module")
def page(repository):
    return (repository / "docs" / "rollouts.md").read_text(encoding="utf-8")


@pytest.fixture
def run(page, tmp_path):
    """Runs Python in a directory with the page's files."""
    files = dict(re.findall(r"```(?:python|yaml)\n# (\S+)\n(.*?)```", page, flags=re.DOTALL))
    assert len(files) == page.count("```") // 2
    for name, code in files.items():
        assert len([line for line in code.splitlines() if line.strip()]) < 30
        (tmp_path / name).write_text(code, encoding="utf-8")

    return partial(run_python, tmp_path)


@pytest.mark.medium
def test_the_environment_trains(run, tmp_path):
    run("-m", "ratchet", "train", "my_recipe.yaml")
    (metrics,) = tmp_path.glob("runs/*/metrics.jsonl")
    assert '"rollout/environment/higher/found"' in metrics.read_text(encoding="utf-8")


@pytest.mark.slow
def test_both_ways_to_play_give_the_same(run):
    first, second = run("play.py").splitlines()
    assert first == second


def test_it_names_every_function_metric_and_column(page):
    assert all(f"`{name}`" in page for name in rollouts.__all__ if name != "TokenizerType")
    environment = Counting()
    played, metrics = run_multi_turn_rollout(
        FakeGenerator(by_seed),
        batch_of({"turns": 2}),
        TOKENIZER,
        {"count": environment},
        max_seq_len=64,
    )
    assert all(f"`{column}`" in page for column in played)
    for name in metrics:
        stem, _, end = (
            name.rpartition("/") if re.search(r"/(p\d+|max|mean)$", name) else (name, "", "")
        )
        stem = re.sub("^max_(?=gen_tokens_per_sample)", "mean_", stem)
        assert stem.startswith("count") or f"`{stem}" in page
        assert f"/{end}`" in page or not end
