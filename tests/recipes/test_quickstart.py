"""The figures that the README states for the quick-start, run in full."""

import json
from statistics import fmean

import pytest

from ratchet.training.start import start_run


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_quickstart_learns_what_the_readme_says(seed, repository, tmp_path):
    run = tmp_path / "run"
    overrides = [f"seed={seed}", "threads=1", "logging.progress=off"]
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
