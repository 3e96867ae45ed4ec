# %% [markdown]
# # 6. Reading a run
#
# A run keeps what every step did. Here one is trained, read as tables, and computed again: bit for bit, and with another setting.

# %%
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

from ratchet.notebook import RunView
from ratchet.observe.records.reader import Record
from ratchet.training.start import start_run

os.chdir(tempfile.mkdtemp())  # the run goes into ./runs

RECIPE = {
    "name": "read",
    "threads": 1,
    "model": {"preset": "tiny"},
    "tokenizer": {"kind": "characters", "alphabet": "0123456789="},
    "environment": {"kind": "sorting", "digits": 4},
    "sampling": {"temperature": 0.6, "max_new_tokens": 5},
    "evaluation": {"tasks": 64},
    "logging": {"progress": "off", "tensorboard": False},
    "stages": [
        {
            "name": "sft",
            "algorithm": {"kind": "sft"},
            "steps": 30,
            "batch_size": 64,
            "optimizer": {"lr": 3e-3, "warmup_steps": 5},
        },
        {
            "name": "grpo",
            "algorithm": {"kind": "grpo", "group_size": 8},
            "steps": 10,
            "batch_size": 32,
            "optimizer": {"lr": 5e-4, "warmup_steps": 2},
        },
    ],
}
recipe = Path("read.yaml")
recipe.write_text(yaml.safe_dump(RECIPE))
assert start_run(recipe, [], None, command=f"ratchet train {recipe}") == 0

# %% [markdown]
# ## Metrics
#
# A line of JSON for each step; docs/metrics.md says what each name is.

# %%
run = Path("runs/read")
rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
rewards = {row["step"]: row["rollout/reward"] for row in rows if "rollout/reward" in row}
print({step: round(reward, 2) for step, reward in rewards.items()})

# %% [markdown]
# ## Seen
#
# In Jupyter, VS Code and marimo these draw themselves: the curves, a group with its tokens coloured by advantage, and the report with all of it.

# %%
view = RunView(run)
view

# %%
group_view = view.show_group(40, color_by="advantage")
group_view

# %%
report = view.show_report(rollouts=32)
report

# %% [markdown]
# ## The record
#
# Every attempt of every step: a table of numbers and words, and the groups as they were trained on.

# %%
record = Record(run / "steps")
table = record.table(["step", "reward", "length"], steps=[40])
print(table.num_rows, "attempts in step 40; mean reward", sum(table["reward"].to_pylist()) / 256)

group = record.groups(40)[0]
print(group.trajectories[0].messages[0].text)
for attempt in group.trajectories:
    print(f"  {attempt.messages[-1].text:6} {attempt.reward}")


# %% [markdown]
# ## Computed again
#
# `ratchet replay` takes the nearest checkpoint, learns from the recorded steps in between, and compares every metric, column and weight bit for bit.


# %%
def ratchet(*words):
    """Run a command of ratchet, and return the JSON that it prints."""
    command = [sys.executable, "-m", "ratchet", *words, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


verdict = ratchet("replay", "runs/read", "--step", "36")
print({key: verdict[key] for key in ("step", "stage", "equal")})

# %% [markdown]
# With another setting: the same batch and weights, advantages that are not divided by the spread of their group (Dr. GRPO).

# %%
changed = ratchet("replay", "runs/read", "--step", "36", "--set", "algorithm.advantage.scale=none")
for name in ("policy/loss", "policy/grad_norm", "policy/entropy/entropy"):
    print(
        f"{name}: {changed['metrics'][name]:.3g} as it was, {changed['changed'][name]:.3g} changed"
    )

# %% [markdown]
# ## What moved the weights
#
# `ratchet explain` gives each group's part of the gradient; they sum to 1, and a group below 0 pulled the other way.

# %%
explanation = ratchet("explain", "runs/read", "--step", "36")
directions = [row["direction"] for row in explanation["groups"]]
print(f"{len(directions)} groups; the strongest has {max(directions):.0%} of the gradient")

# %%
assert view._repr_html_().count("<svg") >= 5
assert len(group_view.attempts) == 8
assert report.page.startswith("<!doctype html>")
assert len(rewards) == 10
assert table.num_rows == 32 * 8
assert len(group.trajectories) == 8
assert verdict["equal"]
assert changed["changed"]["policy/grad_norm"] != changed["metrics"]["policy/grad_norm"]
assert abs(sum(directions) - 1) < 1e-3
