"""The page on Harbor: its commands and its recipe run as they stand."""

import json
import shutil

import pytest
from command_line import ratchet
from pages import written


def run(*arguments):
    result = ratchet(*arguments)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.slow
def test_new_tasks_pass_their_oracle_and_train(repository, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written(repository / "docs" / "integrations" / "harbor.md", tmp_path)
    page = (repository / "docs" / "integrations" / "harbor.md").read_text(encoding="utf-8")
    assert "ratchet eval oracle --on harbor test=my-sum 'waive=[image]'" in page
    run("new", "harbor-task", "my-sum")
    for name in "abc":
        shutil.copytree("my-sum", f"tasks/{name}")
    run("eval", "oracle", "--on", "harbor", "test=my-sum", "waive=[image]")
    (results,) = tmp_path.glob("evals/*/results.json")
    text = json.dumps(json.loads(results.read_text(encoding="utf-8")))
    assert '"reward": 1.0' in text
    run("train", "with_tasks.yaml")
    (metrics,) = tmp_path.glob("runs/*/metrics.jsonl")
    assert '"rollout/reward"' in metrics.read_text(encoding="utf-8")
