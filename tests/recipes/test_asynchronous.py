"""What docs/asynchronous.md states for training on attempts of weights that are up to four steps
old, in the first third of the recipe; test_rotating.py runs it whole."""

import json

import pytest
from recipes.daily import seed_of_today

from ratchet.training.start import start_run


@pytest.mark.slow
def test_stale_attempts_with_a_correction_teach(repository, tmp_path):
    run = tmp_path / "run"
    overrides = [
        f"seed={seed_of_today(3)}",
        "logging.progress=off",
        "stages.grpo.steps=70",
        "evaluation.every=0",
    ]
    assert (
        start_run(repository / "ratchet/recipes/asynchronous.yaml", overrides, run, command="test")
        == 0
    )
    _, grpo = json.loads((run / "summary.json").read_text())["stages"]
    assert grpo["accuracy_after"] > grpo["accuracy_before"] + 0.2
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    staleness = [row.get("rollout/staleness_max", 0) for row in rows if "rollout/reward" in row]
    assert max(staleness) == 4
    assert sum(behind > 0 for behind in staleness) > len(staleness) / 2
