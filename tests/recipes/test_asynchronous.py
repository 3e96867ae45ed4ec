"""What docs/asynchronous.md states for training on attempts of weights that are up to four steps
old, run in full."""

import json

import pytest

from ratchet.training.start import start_run


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_stale_attempts_with_a_correction_teach_what_fresh_ones_do(seed, repository, tmp_path):
    run = tmp_path / "run"
    overrides = [f"seed={seed}", "logging.progress=off"]
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
