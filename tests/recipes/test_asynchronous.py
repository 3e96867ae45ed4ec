"""What docs/asynchronous.md states for training on attempts of weights that are up to four steps
old, run in full."""

import json

import pytest
from recipes.daily import seed_of_today

from ratchet.training.start import start_run


@pytest.mark.slow
def test_stale_attempts_with_a_correction_teach_what_fresh_ones_do(repository, tmp_path):
    run = tmp_path / "run"
    overrides = [f"seed={seed_of_today(3)}", "logging.progress=off"]
    assert (
        start_run(repository / "ratchet/recipes/asynchronous.yaml", overrides, run, command="test")
        == 0
    )
    _, grpo = json.loads((run / "summary.json").read_text())["stages"]
    assert grpo["accuracy_after"] >= 0.93  # synchronously 0.955 to 0.979, with the processor
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    staleness = [row.get("rollout/staleness_max", 0) for row in rows if "rollout/reward" in row]
    assert max(staleness) == 4
    assert sum(behind > 0 for behind in staleness) > len(staleness) / 2
