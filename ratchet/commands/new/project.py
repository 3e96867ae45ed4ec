"""Write a project of the user's own (`ratchet new project`): data, a reward, a recipe and a test.

All of it runs unchanged, in seconds and without a download: a small model learns from random
weights to name the largest of three digits.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from string import Template

N_ROWS = 400

README = """\
# $name

A model learns to name the largest of three digits (`482=` -> `8`), first from examples, then from
a reward.

```
make test                  # the reward's test, then the recipe with all that it names
ratchet train recipe.yaml  # some seconds; shows the accuracy on held-out rows before and after
ratchet report runs/$name  # curves and answers as one HTML file
ratchet chat runs/$name --prompt 482=
```

| File | Replace it by |
|---|---|
| `data.jsonl` | your rows: a prompt and its answer; CSV and Parquet work too |
| `reward.py` | what a good answer is to you: any function `(trajectory, task) -> float` |
| `test_reward.py` | answers of which you know what they must earn |
| `recipe.yaml` | your model (`model: {path: Qwen/Qwen3-0.6B}`); `ratchet help KEY` explains a key |
"""

MAKEFILE = """\
PYTHON ?= python3

.PHONY: test train

test:
	$$(PYTHON) -m unittest --quiet
	$$(PYTHON) -m ratchet check recipe.yaml

train:
	$$(PYTHON) -m ratchet train recipe.yaml
"""

RECIPE = """\
# The largest of three digits, from random weights.
name: "$name"
threads: 1
# For a trained model write {path: Qwen/Qwen3-0.6B}, and remove the tokenizer.
model: {preset: tiny}
tokenizer: {kind: characters, alphabet: "0123456789="}
environment: {kind: dataset, train: data.jsonl, test_share: 0.25}
rewards: [{kind: "reward:judge"}]
sampling: {temperature: 0.7, max_new_tokens: 2}
evaluation: {every: 20}
stages:
  # Random weights earn no reward before some supervised steps. A trained model may skip this stage.
  - name: sft
    algorithm: {kind: sft}
    steps: 10
    batch_size: 32
    optimizer: {lr: 2e-3, warmup_steps: 5}
  - name: grpo
    algorithm: {kind: grpo, group_size: 8, equal_rewards: drop}
    steps: 60
    batch_size: 32
    optimizer: {lr: 5e-4, warmup_steps: 5}
"""

REWARD = '''\
"""The reward: most of it for the right answer, a little for a single digit."""

from ratchet.rewards.base import answer_text


def judge(trajectory, task):
    """Return named parts, which sum to the reward and are logged by name.

    An answer may hold anything: never execute it, and return 0 if it is wrong. Raise an error only
    for a broken task.
    """
    text = answer_text(trajectory).strip()
    return {
        "right": 0.9 * (text == str(task.answer)),
        "digit": 0.1 * (len(text) == 1 and text in "0123456789"),
    }
'''

TEST = '''\
"""The reward keeps the contract of rewards, and gives known answers what they must earn."""

import unittest

from ratchet.rewards.base import as_reward
from ratchet.testing import check_reward
from ratchet.types import Message, Task
from reward import judge

TASK = Task("task/0", (Message("user", "482="),), answer="8")


class RewardTest(unittest.TestCase):
    def test_a_right_answer_earns_more_than_a_wrong_one(self):
        check_reward(as_reward(judge), TASK, good="8", bad="4")

    def test_a_digit_earns_more_than_none(self):
        check_reward(as_reward(judge), TASK, good="4", bad="48")


if __name__ == "__main__":
    unittest.main()
'''


def make_project_files(name: str) -> Mapping[str, str]:
    """Return the texts of the project's files by their path below the directory `name`."""
    texts = {
        "README.md": README,
        "Makefile": MAKEFILE,
        "recipe.yaml": RECIPE,
        "reward.py": REWARD,
        "test_reward.py": TEST,
    }
    files = {file: Template(text).substitute(name=name) for file, text in texts.items()}
    return files | {"data.jsonl": _make_rows()}


def _make_rows() -> str:
    """Return JSON lines with a prompt of three digits and the largest of them, always the same."""
    generator = random.Random(0)
    prompts = ["".join(generator.choices("0123456789", k=3)) for _ in range(N_ROWS)]
    rows = [{"prompt": f"{digits}=", "answer": max(digits)} for digits in prompts]
    return "".join(f"{json.dumps(row)}\n" for row in rows)
