"""Call functions in processes that start at once.

A server that has imported torch, and done nothing else, forks the processes. A run of a few steps
takes a second, but the start of a fresh interpreter would take several. The server handles one call
at a time. Each call has its own process, which may end with a status or by a signal.
"""

from __future__ import annotations

import gc
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

SERVER_CODE = "from ratchet.testing.forks import serve; serve()"


class ForkCaller:
    """A context manager that calls functions in new processes."""

    def __init__(self, modules: Sequence[str], *, log: Path) -> None:
        """Start the server.

        Args:
            modules: Modules that every process has imported from the start.
            log: File to which the processes' output is appended.
        """
        self.log = log
        self._server = subprocess.Popen(
            [sys.executable, "-c", SERVER_CODE, *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )

    def __enter__(self) -> ForkCaller:
        self._read()  # the server sends a number after its imports
        return self

    def __exit__(self, *_: object) -> None:
        self._server.communicate()  # the server ends at the end of its input

    def call(
        self,
        function: str,
        *arguments: Any,
        kill_after_s: float | None = None,
        limit_s: float = 300.0,
    ) -> int:
        """Call `function` ("module:name") with JSON values and return its status.

        The status is what the function returned, 1 after an error, or minus the signal that ended
        the process.

        Args:
            kill_after_s: Time after which the process gets SIGKILL; it replaces `limit_s`.
            limit_s: Time after which the process is killed and TimeoutError raised.
        """
        pid = self.start(function, *arguments)
        status = self.wait(limit_s if kill_after_s is None else kill_after_s)
        if status is not None:
            return status
        # Only the server waits for the process, so its PID is not reused before the server reports.
        os.kill(pid, signal.SIGKILL)
        status = self._read()
        if kill_after_s is None:
            raise TimeoutError(
                f"{function} did not end within {limit_s:g} s: {self.log} has its output"
            )
        return status

    def start(self, function: str, *arguments: Any) -> int:
        """Call `function` and return the process id at once; `wait` comes before the next call."""
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps([function, arguments, str(self.log)]) + "\n")
        return self._read()

    def wait(self, limit_s: float) -> int | None:
        """Return the status of the call that `start` began, or None if it still runs after
        `limit_s`."""
        return self._read() if self._ends_within(limit_s) else None

    def _ends_within(self, seconds: float) -> bool:
        assert self._server.stdout is not None
        return bool(select.select([self._server.stdout], [], [], seconds)[0])

    def _read(self) -> int:
        """Return a number from the server.

        The server writes one number at a time, so that none waits in the buffer, where `select`
        would not see it.
        """
        assert self._server.stdout is not None
        line = self._server.stdout.readline()
        if not line:
            raise RuntimeError(
                "the process that forks others has died: its traceback is on standard error"
            )
        return int(line)


def serve() -> None:
    """Run the server: for each line of input fork a process, and write its PID, then its status."""
    for module in sys.argv[1:]:
        importlib.import_module(module)
    # A collection in a fork would traverse, and so copy, what is imported.
    gc.collect()
    gc.freeze()
    _write_number(0)
    for line in sys.stdin:
        function, arguments, log = json.loads(line)
        pid = os.fork()
        if not pid:
            _run_in_fork(function, arguments, log)
        _write_number(pid)
        _, wait_status = os.waitpid(pid, 0)
        _write_number(os.waitstatus_to_exitcode(wait_status))


def _write_number(number: int) -> None:
    sys.stdout.write(f"{number}\n")
    sys.stdout.flush()


def _run_in_fork(function: str, arguments: Sequence[Any], log: str) -> None:
    """Run the call in the new process, which never returns from here."""
    status = 1
    try:
        null_input = os.open(os.devnull, os.O_RDONLY)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for descriptor, source in enumerate((null_input, output, output)):
            os.dup2(source, descriptor)
        module, _, name = function.partition(":")
        status = getattr(importlib.import_module(module), name)(*arguments)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
