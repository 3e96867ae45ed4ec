"""What runs where the functions of Linux are missing, as on macOS (docs/status.md)."""

import os
import sys

import pytest
from support.programs import run_program

pytestmark = pytest.mark.slow


def test_without_the_functions_of_linux_a_run_trains_on_ranks_and_replays(repository, tmp_path):
    """Two ranks train, a worker generates, weights go through files; a step replays to the bit."""
    options = {
        "cwd": tmp_path,
        "env": {**os.environ, "PYTHONPATH": str(repository / "tests/support/pretend_macos")},
    }
    assert run_program(sys.executable, "-c", "import sys; print(sys.platform)", **options) == (
        "darwin\n"
    )
    ranks = "learner={kind: dtensor, dp_shard: 2}"
    workers = "generator={kind: workers, workers: 1}"
    command = (sys.executable, "-m", "ratchet")
    run_program(*command, "train", "quickstart", "--try-steps", 1, ranks, workers, **options)
    run_program(*command, "train", "quickstart", "--try-steps", 1, "name=alone", **options)
    said = run_program(*command, "replay", "runs/alone", "--step", 1, **options)
    assert "bit-equal" in said
