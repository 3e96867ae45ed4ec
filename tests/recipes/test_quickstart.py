"""The figures that the README states for the quick-start, run in full."""

import json
from statistics import fmean

import pytest
from recipes.daily import seed_of_today

from ratchet.training.start import start_run


@pytest.mark.slow
def test_the_quickstart_learns_what_the_readme_says(repository, tmp_path):
    run = tmp_path / "run"
    overrides = [f"seed={seed_of_today(3)}", "threads=1", "logging.progress=off"]
    assert (
        start_run(repository / "ratchet/recipes/quickstart.yaml", overrides, run, command="test")
        == 0
    )
    sft, grpo = json.loads((run / "summary.json").read_text())["stages"]
    assert sft["accuracy_before"] < 0.02
    assert grpo["accuracy_after"] >= 0.92
    assert grpo["accuracy_after"] - grpo["accuracy_before"] >= 0.45
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert fmean(row["rollout/failed_share"] for row in rows if "rollout/failed_share" in row) == 0
