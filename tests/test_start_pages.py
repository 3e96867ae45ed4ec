"""The pages for beginners: their files and commands run as they stand, in order."""

import json

import pytest
from command_line import ratchet
from pages import follow


@pytest.mark.slow
def test_my_data_my_reward_my_model(repository, tmp_path, monkeypatch):
    follow(repository / "docs" / "start" / "my-data-my-reward.md", tmp_path)
    summary = json.loads((tmp_path / "runs" / "grpo" / "summary.json").read_text(encoding="utf-8"))
    (stage,) = summary["stages"]
    assert stage["accuracy_after"] > stage["accuracy_before"] + 0.05
    assert (tmp_path / "runs" / "grpo" / "report.html").is_file()
    monkeypatch.chdir(tmp_path)
    words = ["--against", "runs/start", "--tasks", 8, "--samples", 0]
    done = ratchet("eval", "runs/grpo", *words)
    assert done.returncode == 2  # a run without a reward has no answers to compare
    assert "Set --recipe to a recipe with a reward" in done.stderr


@pytest.mark.slow
def test_an_agent_with_a_function_as_its_tool(repository, tmp_path):
    follow(repository / "docs" / "start" / "agents.md", tmp_path)
    metrics = (tmp_path / "runs" / "agent" / "metrics.jsonl").read_text(encoding="utf-8")
    assert '"rollout/attempt/malformed_tool_calls"' in metrics
