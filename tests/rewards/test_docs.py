"""The pages on rewards: what they show runs as it stands, and what they list is what there is."""

import re
import subprocess
import sys

import pytest
import yaml

from ratchet.config.kinds import KINDS, resolve, section_class


@pytest.fixture
def page(repository, tmp_path):
    """The files of docs/write-a-reward.md, by name, as written into a directory."""
    text = (repository / "docs" / "write-a-reward.md").read_text(encoding="utf-8")
    files = dict(re.findall(r"```(?:python|yaml)\n# (\S+)\n(.*?)```", text, flags=re.DOTALL))
    assert len(files) == text.count("```") // 2
    for name, code in files.items():
        (tmp_path / name).write_text(code, encoding="utf-8")
    return files


def run(tmp_path, *command):
    done = subprocess.run([sys.executable, *command], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_your_own_reward_trains_and_keeps_the_contract(page, tmp_path):
    assert all(len([line for line in code.splitlines() if line.strip()]) < 30 for code in page.values())
    run(tmp_path, "-c", "import sys; from ratchet.cli import main; sys.argv = ['ratchet', 'train', 'my_recipe.yaml']; main()")
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
    assert rows == {kind: set(section_class("rewards", kind).model_fields) - places for kind in KINDS["rewards"]}


def test_the_examples_are_valid(repository):
    text = (repository / "docs" / "rewards.md").read_text(encoding="utf-8")
    examples = re.findall(r"```yaml\n(.*?)```", text, flags=re.DOTALL)
    assert len(examples) == 4
    for example in examples:
        for section in yaml.safe_load(example)["rewards"]:
            resolve("rewards", section)
