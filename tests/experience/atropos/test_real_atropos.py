"""The package itself: an environment of it plays groups, and trains."""

import json
import os
import sys
from pathlib import Path

import pytest
from support.programs import run_program

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = ROOT / ".venv" / "atropos"


@pytest.mark.slow
@pytest.mark.needs(str(PACKAGE / "installed"))
def test_an_environment_of_the_package_plays_two_turns_trains_and_resumes(tmp_path):
    play = Path(__file__).with_name("real_play.py")
    paths = f"{PACKAGE}:{ROOT / 'tests'}:{ROOT}"
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    run_program(sys.executable, play, tmp_path, cwd=tmp_path, env=environment)
    result = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    # The policy says a, aba in the first attempt, and b, aa in the second.
    assert [outcome[:20] for outcome in result["outcomes"]] == [
        "Scored(reward=3.0, p",
        "Scored(reward=2.0, p",
    ]
    assert result["turns"] == [2, 2]
    assert result["trained"] == ["aaba", "baa"]
    assert result["statuses"] == [0, 0]
    assert result["items"] == ["0", "2"]
