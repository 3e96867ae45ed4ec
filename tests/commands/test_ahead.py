"""Whole runs whose attempts begin before the step that trains on them, through the command line:
what they record, and that nothing that happens to the process changes it."""

import json
import math
import signal

import pytest
import yaml
from command_line import ratchet
from experience.ledger_faults import find_ledger_faults
from support.offloadable_engine import KIND as OFFLOADABLE
from training.test_session import RECIPE, assert_equal_runs

from ratchet.experience.sources.prompt_ledger import read_ledger

pytestmark = pytest.mark.slow

ROLLOUTS = {
    "ready": {"max_staleness": 2, "order": "ready"},
    "issued": {"max_staleness": 0.5},
    "resampled": {
        "max_staleness": 1,
        "order": "ready",
        "dynamic_sampling": True,
        "replay": {"groups": 2, "max_age": 2, "priority": "uniform"},
    },
    "in step": {"replay": {"groups": 2, "max_age": 2, "priority": "uniform"}},
    "tails": {"tail_batching": 2},
    "turns": {"max_staleness": 2, "order": "ready"},
    "adaptive": {
        "max_staleness": 2,
        "order": "ready",
        "adaptive": {"staleness": 0.5, "mismatch": 1.0},
    },
}
CHOSEN = {"examples": 12, "curriculum": {"memory": 0.2}}
# Of any length: groups are ready one after the other, and the longest attempts are cut off.
UNEVEN = {
    "algorithm": {"kind": "grpo", "group_size": 2},
    "sampling": {"max_new_tokens": 60, "stop": ["0"]},
}
MORE = {"resampled": CHOSEN, "in step": CHOSEN, "tails": UNEVEN, "turns": UNEVEN}
# Learner and generator take turns: attempts are interrupted by each update.
PLACED = {"turns": {"cluster": {"colocated": True}, "generator": {"kind": OFFLOADABLE}}}
STAGE = {
    "name": "rl",
    "algorithm": {"kind": "decoupled_ppo", "group_size": 4},
    "steps": 6,
    "batch_size": 4,
}
# Completions of up to 11 tokens that end at any of them: steps end while others are under way.
AHEAD = {
    **RECIPE,
    "environment": {"kind": "sorting", "digits": 3},
    "sampling": {"max_new_tokens": 11},
}


@pytest.fixture(
    scope="module",
    params=[*ROLLOUTS],
)
def case(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    recipe = folder / "ahead.yaml"
    stages = [
        RECIPE["stages"][0],
        {**STAGE, "rollouts": ROLLOUTS[request.param], **MORE.get(request.param, {})},
    ]
    placed = PLACED.get(request.param, {})
    checkpoint = {"every": 1, "keep": 2}
    recipe.write_text(
        yaml.safe_dump({**AHEAD, **placed, "checkpoint": checkpoint, "stages": stages})
    )
    done = ratchet("train", recipe, "--run-dir", folder / "whole")
    assert done.returncode == 0, done.stderr
    return recipe, folder / "whole", ROLLOUTS[request.param]


def rows(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_the_ledger_says_that_each_prompt_was_trained_on_once_and_in_time(case):
    _, run, rollouts = case
    lines = list(read_ledger(run / "ledger.jsonl"))
    staleness, age = (
        math.ceil(rollouts.get("max_staleness", 0)),
        rollouts.get("replay", {}).get("max_age", 0),
    )
    assert not find_ledger_faults(iter(lines), max_staleness=staleness, max_age=age)
    trained = [
        line for line in lines if line["event"] == "trained" and line["id"].startswith("rl/")
    ]
    assert len(trained) == STAGE["steps"] * STAGE["batch_size"]
    behind = [row.get("rollout/staleness_max", 0) for row in rows(run)]
    assert max(behind) <= max(staleness, age), (
        "tokens are not older than the step by more than the bound"
    )
    assert (max(behind) > 0) == bool(staleness or age)
    assert any(line["event"] == "replayed" for line in lines) == ("replay" in rollouts)
    filtered = [line for line in lines if line["event"] == "filtered"]
    assert bool(filtered) == ("dynamic_sampling" in rollouts)
    deferred = [line["id"] for line in lines if line["event"] == "deferred"]
    assert bool(deferred) == ("tail_batching" in rollouts)
    assert set(deferred) <= {line["id"] for line in trained}, "none waits at the end"
    assert sum(row.get("rollout/tails/deferred", 0) for row in rows(run)) == len(deferred)
    under_way = [
        row["rollout/adaptive/groups"] for row in rows(run) if "rollout/adaptive/groups" in row
    ]
    assert (len(set(under_way)) > 1) == ("adaptive" in rollouts)


@pytest.mark.parametrize(
    "fault",
    [
        "step.update:7:kill",
        "step.sample:9:kill",
        "checkpoint.after_sync:8:kill",
        "ledger.noted:20:kill",
    ],
)
def test_a_killed_run_resumes_to_the_same_bits(fault, case, tmp_path):
    recipe, whole, _ = case
    run = tmp_path / "run"
    killed = ratchet("train", recipe, "--run-dir", run, faults=fault)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    resumed = ratchet("train", "--resume", run)
    assert resumed.returncode == 0, resumed.stderr
    assert_equal_runs(whole, run)
    assert (run / "ledger.jsonl").read_bytes() == (whole / "ledger.jsonl").read_bytes()
