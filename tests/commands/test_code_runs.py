"""A training whose rewards come from sandboxed programs ends with the same bits, killed and resumed
or not."""

from __future__ import annotations

import json

import pytest
import yaml
from forked_runs import training_forks

from ratchet.testing.kill_and_resume import ChaosTest, Trial

# the policy adds a digit; what that is worth hangs on the hash seed
PROMPT = "def f(x):\n return hash('k')%7+"
TEST = "def check(candidate):\n" + "".join(
    f"    assert candidate({{'h', None}}) % {n}\n" for n in (2, 3, 5)
)


def recipe(folder):
    rows, other = folder / "rows.jsonl", folder / "other.jsonl"
    lines = [
        {"prompt": f"{PROMPT}{n}+", "entry_point": "f", "test": TEST, "canonical_solution": str(n)}
        for n in range(8)
    ]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines[:7]))
    other.write_text(json.dumps(lines[7]) + "\n")
    stage = {"batch_size": 7}
    return {
        "name": "code",
        "threads": 1,
        "device": "cpu",
        "model": {"preset": "tiny", "overrides": {"hidden_size": 32, "n_layers": 1}},
        "tokenizer": {"kind": "characters", "alphabet": "".join(sorted({*PROMPT, *"0123456789"}))},
        "environment": {"kind": "programs", "train": str(rows), "test": str(other)},
        "rewards": [{"kind": "code", "workers": 2, "timeout_s": 20, "credit": "share"}],
        "sampling": {"max_new_tokens": 2},
        "optimizer": {"lr": 0.02},
        "logging": {"progress": "off"},
        "checkpoint": {"every": 10, "keep": 2},
        "stages": [
            {"name": "sft", "algorithm": {"kind": "sft"}, "steps": 20, **stage},
            {
                "name": "rl",
                "algorithm": {"kind": "grpo", "group_size": 4},
                "checkpoint": {"every": 1},
                "steps": 3,
                **stage,
            },
        ],
    }


@pytest.mark.slow
@pytest.mark.fault("R18")
def test_a_killed_run_with_rewards_of_code_has_the_same_bits(tmp_path):
    path = tmp_path / "code.yaml"
    path.write_text(yaml.safe_dump(recipe(tmp_path)))
    with training_forks(tmp_path / "output.log") as forks:
        under_test = ChaosTest(path, tmp_path, forks)
        assert under_test.start(under_test.reference_run, "") == 0
        assert under_test.run_trial(Trial(("step.update:22:kill",))).differences == ()
    lines = map(json.loads, (under_test.reference_run / "metrics.jsonl").read_text().splitlines())
    shares = [line["rollout/reward/code"] for line in lines if "rollout/reward/code" in line]
    assert len(shares) == 3
    assert 0 < sum(shares) < 3  # some programs pass, and some don't
