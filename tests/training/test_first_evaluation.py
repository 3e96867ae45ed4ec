"""The evaluation before the first step stops a run of which no attempt can be judged."""

from pathlib import Path

import pytest

from ratchet.errors import TrainingError
from ratchet.training.start import start_run

RECIPE = """
model: {preset: tiny}
tokenizer: {kind: characters}
environment: {kind: arithmetic, digits: 1}
algorithm: {kind: sft}
eval_rewards: [{kind: "strict_reward:judge"}]
sampling: {max_new_tokens: 2}
evaluation: {tasks: 3}
steps: 1
batch_size: 2
"""
# It judges a right answer, as `check` tries it on a demonstration, but fails on all others.
REWARD = """
def judge(trajectory, task):
    if trajectory.messages[-1].text == str(task.answer):
        return 1.0
    raise KeyError("no answer")
"""


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "strict_reward.py").write_text(REWARD)
    (tmp_path / "mine.yaml").write_text(RECIPE)
    return Path("mine.yaml")


@pytest.mark.medium
def test_the_run_stops_before_the_first_step_and_names_the_users_line(recipe, tmp_path):
    with pytest.raises(TrainingError) as caught:
        start_run(recipe, [], None, command="test")
    assert str(caught.value).splitlines() == [
        "all 3 attempts of the evaluation before the first step failed; by kind: reward 3; "
        "the most frequent (3), reward:",
        "reward 'judge': reward strict_reward:judge, task 'arithmetic/test/0':",
        f"KeyError: 'no answer' ({tmp_path}/strict_reward.py, line 5, in judge); "
        "run.log has the whole traceback",
        "See docs/by-symptom.md#attempts-fail",
    ]
    log = next(tmp_path.glob("runs/*/run.log")).read_text()
    assert "Traceback (most recent call last)" in log


@pytest.mark.medium
def test_a_run_that_allows_every_failure_goes_on(recipe):
    assert start_run(recipe, ["rollouts.max_failed_share=1.0"], None, command="test") == 0
