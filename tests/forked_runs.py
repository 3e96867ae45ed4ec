"""Runs in processes that start at once and go on beside the test, which may kill them.

They are forked from one server, which has imported what a training imports.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from command_line import TRAINING_MODULES, start_server

from ratchet.testing.forks import ForkCaller


class ForkedRatchet:
    """A running `ratchet`, with the methods of `subprocess.Popen` that tests use.

    One runs at a time: the next one ends the one before.
    """

    _last: ForkedRatchet | None = None

    def __init__(self, words: Sequence[str], environment: Mapping[str, str]) -> None:
        _end_last()
        ForkedRatchet._last = self
        self._outputs = tempfile.TemporaryDirectory()
        paths = [str(Path(self._outputs.name) / name) for name in ("stdout", "stderr")]
        self._stderr = Path(paths[1])
        self.returncode: int | None = None
        self.pid = _server().start(
            "command_line:run_in_fork",
            "command_line:run_command",
            list(words),
            dict(environment),
            os.getcwd(),
            paths,
        )

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = _server().wait(0)
        return self.returncode

    def wait(self, timeout: float) -> int:
        if self.returncode is None:
            self.returncode = _server().wait(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("ratchet", timeout)
        return self.returncode

    def communicate(self, timeout: float = 60.0) -> tuple[None, str]:
        self.wait(timeout)
        return None, self._stderr.read_text(encoding="utf-8")

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@contextlib.contextmanager
def training_forks(log: Path) -> Iterator[ForkCaller]:
    """Yield a caller of functions, one at a time, that logs to `log`."""
    _end_last()
    caller = copy.copy(_server())
    caller.log = log
    yield caller


def _end_last() -> None:
    last = ForkedRatchet._last
    if last is not None and last.poll() is None:  # its test has failed
        last.kill()
        last.wait(60)


@functools.cache
def _server() -> ForkCaller:
    return start_server(TRAINING_MODULES)
