"""The rehearsal: what Ratchet does on CUDA, tried on a pretended accelerator.

The tests of the files `cuda_*.py` run in a session whose PyTorch finds the accelerator of
`tests/support/pretend_cuda`. To run one alone, without this wrapper:

    PYTHONPATH=tests/support/pretend_cuda/startup:tests .venv/bin/python -m pytest FILE
"""

import subprocess
import sys
from pathlib import Path

import pytest
from support.pretend_cuda import make_environment
from support.pretend_cuda.build import build_backend

FILES = sorted(Path(__file__).parent.glob("cuda_*.py"))


@pytest.mark.slow
@pytest.mark.needs("c++")
@pytest.mark.parametrize("file", FILES, ids=[file.stem for file in FILES])
def test_rehearse(file, repository):
    build_backend()
    session = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--no-header", "--durations=5", str(file)],
        cwd=repository,
        env=make_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert session.returncode == 0, session.stdout + session.stderr
