"""The rehearsal: what Ratchet does on CUDA, tried on a pretended accelerator.

The tests of the files `cuda_*.py` run in sessions whose PyTorch finds the accelerator of
`tests/support/pretend_cuda`, and so do tests that take the device that they find. To run one alone,
without this wrapper:

    PYTHONPATH=tests/support/pretend_cuda/startup:tests .venv/bin/python -m pytest FILE
"""

import sys
from pathlib import Path

import pytest
from support.pretend_cuda import make_environment
from support.pretend_cuda.build import build_backend
from support.programs import run_program
from support.warm_python import MODULES, warm_python

TESTS = Path(__file__).parents[1]
SESSIONS = {
    **{file.stem: [str(file)] for file in sorted(Path(__file__).parent.glob("cuda_*.py"))},
    "every recipe": [f"{TESTS}/recipes/test_every_recipe.py", "-k", "runs_from_its_file"],
    "offload": [f"{TESTS}/training/test_colocation.py"],
}


@pytest.fixture(scope="module")
def accelerated():
    """The environment of programs that find the accelerator, and start at once."""
    build_backend()
    with warm_python([*MODULES, "pytest"], environment=make_environment()) as environment:
        yield environment


@pytest.mark.slow
@pytest.mark.needs("c++")
@pytest.mark.parametrize("name", SESSIONS)
def test_rehearse(name, repository, accelerated):
    words = ["-m", "pytest", "-q", "--no-header", "--durations=5", *SESSIONS[name]]
    run_program(sys.executable, *words, cwd=repository, env=accelerated, timeout=None)
