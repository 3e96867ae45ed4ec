"""Runs the command line in a process of its own that starts at once.

Each call is forked from a server that has imported what a training imports and done nothing else: a
fresh interpreter spends over two seconds of processor time on imports. Tests of what an interpreter
imports, and of how one starts, launch it themselves.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import subprocess
import sys
import tempfile
import threading
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from ratchet.testing.forks import ForkCaller
from ratchet.testing.kill_and_resume import PRELOADED_MODULES

TESTS = Path(__file__).resolve().parent
# A training imports these in its first steps: pyarrow looks for pandas.
LATE_IMPORTS = ("pandas", "pyarrow.pandas_compat", "pyarrow.compute")
TRAINING_MODULES = (
    *PRELOADED_MODULES,
    "ratchet.cli.main",
    *(name for name in LATE_IMPORTS if find_spec(name.partition(".")[0])),
)


def ratchet(
    *arguments: object,
    faults: str = "",
    timeout: float = 300,
    preload: tuple[str, ...] = TRAINING_MODULES,
) -> subprocess.CompletedProcess[str]:
    """Run `ratchet` with these arguments and return its exit status and output, as
    `subprocess.run` does.

    Args:
        faults: Failpoints to arm, in `RATCHET_FAULTS`.
        timeout: Seconds after which the process is killed and TimeoutError raised.
        preload: Modules that the process has imported from the start.
    """
    words = [str(argument) for argument in arguments]
    return call_in_fork(
        "command_line:run_command",
        words,
        environment={"RATCHET_FAULTS": faults},
        timeout=timeout,
        preload=preload,
    )


def call_in_fork(
    function: str,
    words: list[str],
    *,
    environment: dict[str, str],
    timeout: float,
    preload: tuple[str, ...],
    paths: tuple[Path, ...] = (),
) -> subprocess.CompletedProcess[str]:
    """Call `function` ("module:name") with words in a fork of a server and return its status and
    output.

    Args:
        environment: What the environment has beside what this process's has.
        timeout: Seconds after which the process is killed and TimeoutError raised.
        preload: Modules that the process has imported from the start.
        paths: Directories in which it looks for modules first.
    """
    environment = {**os.environ, **environment, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / "stdout", Path(folder) / "stderr"]
        status = _server(preload, paths).call(
            "command_line:run_in_fork",
            function,
            words,
            environment,
            os.getcwd(),
            [str(path) for path in outputs],
            limit_s=timeout,
        )
        texts = [path.read_text(encoding="utf-8") for path in outputs]
    return subprocess.CompletedProcess([function, *words], status, *texts)


@functools.cache
def _server(modules: tuple[str, ...], paths: tuple[Path, ...]) -> ForkCaller:
    return start_server(modules, paths)


def start_server(modules: tuple[str, ...], paths: tuple[Path, ...] = ()) -> ForkCaller:
    """Start a server of forks, which ends with this process. It runs one call at a time."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(
        map(str, [*paths, TESTS, *([before] if before else [])])
    )
    try:
        with contextlib.chdir(TESTS.parent):  # a test may be in a directory that it removes
            server = ForkCaller(modules, log=Path(os.devnull))
    finally:
        del os.environ["PYTHONPATH"]
        if before is not None:
            os.environ["PYTHONPATH"] = before
    stack = contextlib.ExitStack()
    atexit.register(stack.close)
    return stack.enter_context(server)


def run_in_fork(
    function: str,
    words: list[str],
    environment: dict[str, str],
    directory: str,
    outputs: list[str],
) -> int:
    """Call a function in a forked process, end it as an interpreter ends, and return its status."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    tempfile.tempdir = None  # the environment may name another one than the server's
    for descriptor, path in enumerate(outputs, start=1):
        file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        os.dup2(file, descriptor)
        os.close(file)
    module, _, name = function.partition(":")
    status = 0
    try:
        getattr(import_module(module), name)(words)
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
    atexit._run_exitfuncs()
    return status


def run_command(words: list[str]) -> None:
    """Run the command line in this process."""
    from ratchet.cli.main import main

    sys.argv = ["ratchet", *words]
    main()
