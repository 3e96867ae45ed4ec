"""Processes that are there at once: forked by one that has imported torch already, and has done
nothing else.

A run of some steps takes a second, of which a fresh interpreter would need several. One call at a
time; each has a process of its own, which ends as it pleases: by a status, a signal, its own
SIGKILL.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import subprocess
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

START = "from ratchet.testing.forks import serve; serve()"


class Forks:
    """Calls functions in new processes. modules: that each of them has imported from the start. A
    context manager."""

    def __init__(self, modules: Sequence[str], *, log: Path) -> None:
        self.log = log
        self._server = subprocess.Popen(
            [sys.executable, "-c", START, *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )

    def __enter__(self) -> Forks:
        self._read()  # it has imported all
        return self

    def __exit__(self, *_: object) -> None:
        self._server.communicate()  # the end of its input ends it

    def call(
        self,
        function: str,
        *arguments: Any,
        kill_after_s: float | None = None,
        limit_s: float = 300.0,
    ) -> int:
        """Calls `function` ("module:name") with JSON values. Returns its status: what it returned,
        1 after an error, or minus the signal that ended it. What it writes goes to the log.
        kill_after_s: SIGKILL then, if it is still there.

        Raises TimeoutError where it takes longer than `limit_s`, after killing it.
        """
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps([function, arguments, str(self.log)]) + "\n")
        pid = self._read()
        if self._ends_within(limit_s if kill_after_s is None else kill_after_s):
            return self._read()
        # it has no other waiter: until the server says so, the number is its own
        os.kill(pid, signal.SIGKILL)
        status = self._read()
        if kill_after_s is None:
            raise TimeoutError(
                f"{function} was not over after {limit_s:g} s: {self.log} has what it wrote"
            )
        return status

    def _ends_within(self, seconds: float) -> bool:
        assert self._server.stdout is not None
        return bool(select.select([self._server.stdout], [], [], seconds)[0])

    def _read(self) -> int:
        """A number from the server. It writes one at a time, so nothing waits in the reader's
        buffer."""
        assert self._server.stdout is not None
        line = self._server.stdout.readline()
        if not line:
            raise RuntimeError(
                "the process that forks others has died: its traceback is on standard error"
            )
        return int(line)


def serve() -> None:
    """The server's side: for each line of its input a process, whose number and then whose status
    it answers."""
    for module in sys.argv[1:]:
        importlib.import_module(module)
    _say(0)
    for line in sys.stdin:
        function, arguments, log = json.loads(line)
        pid = os.fork()
        if not pid:
            _serve_one(function, arguments, log)
        _say(pid)
        _, ended = os.waitpid(pid, 0)
        _say(os.waitstatus_to_exitcode(ended))


def _say(number: int) -> None:
    sys.stdout.write(f"{number}\n")
    sys.stdout.flush()


def _serve_one(function: str, arguments: Sequence[Any], log: str) -> None:
    """Run the call in the new process, which never returns from here."""
    status = 1
    try:
        nothing, output = (
            os.open(os.devnull, os.O_RDONLY),
            os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644),
        )
        for descriptor, source in enumerate((nothing, output, output)):
            os.dup2(source, descriptor)
        module, _, name = function.partition(":")
        status = getattr(importlib.import_module(module), name)(*arguments)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
