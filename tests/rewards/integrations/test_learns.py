"""Runs with a reward function and with an environment class of TRL learn."""

import json
from pathlib import Path
from statistics import fmean

import pytest
from pages import run, written

HERE = Path(__file__).parent
TRAIN = "import sys; from ratchet.cli.main import main; sys.argv = ['ratchet', 'train', 'r.yaml']; main()"
MODEL = "model: {preset: tiny, overrides: {hidden_size: 64, n_layers: 2}}\nthreads: 1\n"
REWARD = f"""\
{MODEL}
tokenizer: {{kind: characters, alphabet: "0123456789+="}}
sampling: {{max_new_tokens: 8}}
environment: {{kind: arithmetic, digits: 1}}
evaluation: {{tasks: 4}}
algorithm: {{kind: grpo, group_size: 8}}
rewards: [{{kind: trl, function: "{HERE / "trl_rewards.py"}:sevens"}}]
optimizer: {{lr: 3e-3}}
steps: 20
batch_size: 8
"""
ENVIRONMENT = f"""\
{MODEL}
tokenizer: {{kind: characters, template: turns, tool_format: hermes}}
sampling: {{max_new_tokens: 80}}
evaluation: {{tasks: 8}}
batch_size: 8
stages:
  - algorithm: {{kind: sft, train: all}}
    environment: {{kind: dataset, train: calls.jsonl, test_share: 0.0}}
    optimizer: {{lr: 3e-3}}
    evaluation: {{tasks: 0}}
    steps: 150
  - algorithm: {{kind: grpo, group_size: 8}}
    environment: {{kind: trl, factory: "counter.py:Counter", test_tasks: 8}}
    optimizer: {{lr: 3e-4}}
    steps: 20
"""


def rewards(directory, recipe):
    (directory / "r.yaml").write_text(recipe)
    run(directory, "-c", TRAIN)
    (logged,) = directory.glob("runs/*/metrics.jsonl")
    steps = [json.loads(line) for line in logged.read_text().splitlines()]
    return [step["rollout/reward"] for step in steps if "rollout/reward" in step]


def conversation(button):
    """Presses a button: what the policy can do before it learns which."""
    call = {"name": "press", "arguments": {"button": button}}
    messages = [
        {"role": "user", "content": "Press a or b."},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "call_0", "function": call}]},
        {"role": "tool", "content": "ok", "tool_call_id": "call_0"},
        {"role": "assistant", "content": "."},
    ]
    return json.dumps({"messages": messages}) + "\n"


@pytest.mark.slow
def test_a_run_learns_by_a_reward_function_of_trl(tmp_path):
    by_step = rewards(tmp_path, REWARD)
    assert by_step[0] < 0.1
    assert by_step[-1] > 0.5


@pytest.mark.slow
def test_a_run_learns_in_an_environment_class_of_trl(repository, tmp_path):
    written(repository / "docs" / "integrations" / "trl.md", tmp_path)
    (tmp_path / "calls.jsonl").write_text("".join(map(conversation, "abc")))
    by_step = rewards(tmp_path, ENVIRONMENT)
    assert fmean(by_step[:2]) < 0.4
    assert fmean(by_step[-5:]) > 0.65
