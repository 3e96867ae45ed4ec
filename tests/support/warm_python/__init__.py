"""Python programs that start at once, in tests that start many.

In the environment of `warm_python(modules)` an interpreter hands its program (a script, `-m` or
`-c`) over to a process that has imported the modules and done nothing else. That process runs it in
a fork, with the arguments, environment, directory, path and open files of the interpreter, which
ends as the program ends; what the program starts in turn is handed over as well. A program whose
interpreter is killed is killed.

Unlike a program of its own: it has another process id, group and parent, variables that a library
reads when it is imported are those of the server, and no signal but SIGKILL reaches it.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
TESTS = HERE.parents[1]
# What a training imports, and what writes the models of benchmarks.
MODULES = (
    "ratchet.testing.kill_and_resume",
    "ratchet.training.stage_from_config",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.tokenization_utils_fast",
)


@contextlib.contextmanager
def warm_python(
    modules: Sequence[str] = MODULES, *, environment: Mapping[str, str] | None = None
) -> Iterator[dict[str, str]]:
    """Yield the environment of processes whose Python programs start at once.

    A program that still runs at the end goes on.

    Args:
        modules: Modules that the programs have imported from the start.
        environment: What it is made of; default: that of this process.
    """
    base = dict(os.environ if environment is None else environment)
    if not hasattr(os, "pidfd_open"):  # not Linux: programs start as ever
        yield base
        return
    given = base.get("PYTHONPATH", "")
    with tempfile.TemporaryDirectory() as folder:
        address = str(Path(folder) / "socket")
        with subprocess.Popen(
            [sys.executable, str(HERE / "server.py"), address, *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**base, "PYTHONPATH": os.pathsep.join([str(TESTS), given]).rstrip(os.pathsep)},
        ) as server:
            assert server.stdin
            assert server.stdout
            assert server.stdout.readline() == b"ready\n"
            path = os.pathsep.join([str(HERE / "startup"), given]).rstrip(os.pathsep)
            yield {**base, "PYTHONPATH": path, "WARM_PYTHON": address}
            server.stdin.close()


@pytest.fixture(scope="session")
def warm_environment() -> Iterator[dict[str, str]]:
    """The environment of Python programs that have imported MODULES from the start."""
    with warm_python() as environment:
        yield environment
