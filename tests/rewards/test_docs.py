"""The pages on rewards: what they show runs as it stands, and what they list is what there is."""

import re

import pytest
import yaml
from pages import run, written

from ratchet.config.registry import KINDS
from ratchet.config.resolve import resolve, section_class


@pytest.fixture
def page(repository, tmp_path):
    return written(repository / "docs" / "write-a-reward.md", tmp_path)


@pytest.mark.slow
def test_your_own_reward_trains_and_keeps_the_contract(page, tmp_path):
    assert all(
        len([line for line in code.splitlines() if line.strip()]) < 30 for code in page.values()
    )
    run(tmp_path, "-m", "ratchet", "train", "my_recipe.yaml")
    (metrics,) = tmp_path.glob("runs/*/metrics.jsonl")
    for name in ("brief", "brief/right"):
        assert f'reward/{name}"' in metrics.read_text(encoding="utf-8")
    run(tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_my_rewards.py")


def test_the_table_lists_every_kind_with_every_key(repository):
    text = (repository / "docs" / "rewards.md").read_text(encoding="utf-8")
    rows = {
        kind: set(re.findall(r"`(\w+)`", keys))
        for kind, keys in re.findall(r"^\| `(\w+)` \|.*\|([^|]*)\|$", text, re.MULTILINE)
    }
    places = {"kind", "weight"}
    assert rows == {
        kind: set(section_class("rewards", kind).model_fields) - places for kind in KINDS["rewards"]
    }


def test_the_examples_are_valid(repository):
    text = (repository / "docs" / "rewards.md").read_text(encoding="utf-8")
    examples = re.findall(r"```yaml\n(.*?)```", text, flags=re.DOTALL)
    assert len(examples) == 7
    for example in examples:
        for section in yaml.safe_load(example)["rewards"]:
            resolve("rewards", section)
