# %% [markdown]
# # 4. Preference learning and a reward model
#
# From pairs of a better and a worse answer: directly (DPO), or by way of a model that learns to score answers and then judges attempts. Each step
# is a recipe, written here as a dictionary and trained as `ratchet train recipe.yaml` does.

# %%
import json
import os
import tempfile
from pathlib import Path

import yaml

from ratchet.training.start import start_run

os.chdir(tempfile.mkdtemp())  # runs go into ./runs

BASE = {
    "threads": 1,
    "tokenizer": {"kind": "characters", "alphabet": "0123456789="},
    "environment": {"kind": "sorting", "digits": 4},
    "sampling": {"temperature": 0.6, "max_new_tokens": 5},
    "evaluation": {"tasks": 128},
    "logging": {"progress": "off", "tensorboard": False},
}


def train(name, **keys):
    """Train by a recipe, and return what its last stage reached."""
    recipe = Path(f"{name}.yaml")
    recipe.write_text(yaml.safe_dump({**BASE, "name": name, **keys}))
    assert start_run(recipe, [], None, command=f"ratchet train {recipe}") == 0
    return json.loads(Path(f"runs/{name}/summary.json").read_text())["stages"][-1]


# %% [markdown]
# ## A start
#
# A little supervised fine-tuning: it sorts about half of the problems.

# %%
start = train(
    "start",
    model={"preset": "tiny"},
    algorithm={"kind": "sft"},
    steps=30,
    batch_size=64,
    optimizer={"lr": 3e-3, "warmup_steps": 5},
    rewards=[{"kind": "exact_match"}],
)
print(f"start: {start['accuracy_after']:.0%}")

# %% [markdown]
# ## Pairs, directly
#
# The right answer against the same with one slip. `sft_coef` keeps the right answer likely: a margin alone can be had by making both unlikely.

# %%
dpo = train(
    "dpo",
    model={"path": "runs/start"},
    algorithm={"kind": "dpo", "beta": 0.1, "sft_coef": 1.0},
    steps=40,
    batch_size=32,
    optimizer={"lr": 5e-4, "warmup_steps": 5},
    rewards=[{"kind": "exact_match"}],
)
print(f"DPO: {dpo['accuracy_before']:.0%} to {dpo['accuracy_after']:.0%}")

# %% [markdown]
# ## A reward model
#
# The same pairs teach a scalar head which of two answers is better. Its accuracy is the share of held-out pairs that it orders rightly.

# %%
scorer = train(
    "scorer",
    model={"path": "runs/start"},
    algorithm={"kind": "reward_model"},
    steps=80,
    batch_size=32,
    optimizer={"lr": 1e-3, "warmup_steps": 5},
)
print(f"reward model: {scorer['accuracy_after']:.0%} of held-out pairs")

# %% [markdown]
# ## Is the learned reward fooled?
#
# GRPO with nothing but the learned score as its reward. The score rises, and right answers are lost: the policy has found answers that the reward model has
# never seen and likes. So measure the task itself beside a learned reward (`eval_rewards`), keep near the start (`kl.coef`), stop in time
# (`evaluation.patience`), and let a second opinion warn (`sentinels.second_opinion`).

# %%
judged = train(
    "judged",
    model={"path": "runs/start"},
    algorithm={"kind": "grpo", "group_size": 8},
    steps=20,
    batch_size=32,
    optimizer={"lr": 5e-4, "warmup_steps": 5},
    rewards=[{"kind": "reward_model", "path": "runs/scorer/model"}],
    eval_rewards=[{"kind": "exact_match"}],
)
lines = Path("runs/judged/metrics.jsonl").read_text().splitlines()
scores = [row["rollout/reward"] for line in lines if "rollout/reward" in (row := json.loads(line))]
print(f"learned score: {scores[0]:.2f} to {scores[-1]:.2f}")
print(f"right answers: {judged['accuracy_before']:.0%} to {judged['accuracy_after']:.0%}")

# %%
assert dpo["accuracy_after"] > dpo["accuracy_before"]
assert scorer["accuracy_after"] > 0.7
assert scores[-1] > scores[0]
assert judged["accuracy_after"] < judged["accuracy_before"]
