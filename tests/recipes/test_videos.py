"""A model that reads videos, on MP4 files: sampler and learner agree, and a run resumes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TORCHVISION = ROOT / ".venv" / "torchvision"


@pytest.mark.slow
@pytest.mark.needs("av", str(TORCHVISION / "installed"))
def test_a_model_samples_and_learns_from_mp4_files(tmp_path):
    command = [sys.executable, str(Path(__file__).with_name("video_play.py")), str(tmp_path)]
    process = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": f"{TORCHVISION}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    result = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    assert result["qwen2_5_vl"] < 1e-5
    assert result["qwen3_vl"] < 1e-5
    assert result["learned"]
    assert result["resumed"]
