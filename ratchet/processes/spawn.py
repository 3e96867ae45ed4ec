"""Start a process of a new Python interpreter, and end it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from ratchet.processes.frames import Connection

BOOTSTRAP = (
    "import sys, json; sys.path[{replaced}] = json.loads(sys.argv[1]); "
    "from ratchet.processes.child import main; main(*sys.argv[2:])"
)


class SpawnedProcess:
    """A child process that runs a function, and the connection to it.

    It leads a session of its own, so Ctrl-C does not reach it. On Linux it ends when the thread
    that started it ends, however that happens. Its standard output goes to its standard error, so
    what it prints never reaches the driver's standard output.

    Attributes:
        connection: The connection to the process.
        pid: The process id.

    Args:
        entry: "module:function", called in the process with its `Connection` and the arguments.
        arguments: JSON values. Other users of the machine can see them, so send secrets through
            the connection.
        environment: Environment variables; None: those of this process.
        stderr: As in `subprocess`; None: that of this process.
        socket_kind: SOCK_STREAM, or SOCK_SEQPACKET for `send_descriptor`.
        interpreter: The Python of another environment, and the folders to append to its path; None:
            this process's own Python and path.
    """

    def __init__(
        self,
        entry: str,
        arguments: Sequence[Any] = (),
        *,
        environment: Mapping[str, str] | None = None,
        stderr: int | None = None,
        socket_kind: socket.SocketKind = socket.SOCK_STREAM,
        interpreter: tuple[str, Sequence[str]] | None = None,
    ) -> None:
        parent_end, child_end = socket.socketpair(socket.AF_UNIX, socket_kind)
        self.connection = Connection(parent_end)
        with child_end:
            program, paths = interpreter or (sys.executable, sys.path)
            bootstrap = BOOTSTRAP.format(replaced="len(sys.path):" if interpreter else ":")
            command = [json.dumps(list(paths)), str(child_end.fileno()), str(os.getpid()), entry]
            self._process = subprocess.Popen(
                [program, "-c", bootstrap, *command, json.dumps(arguments)],
                stdin=subprocess.DEVNULL,
                stdout=2 if stderr is None else stderr,
                stderr=stderr,
                env=environment,
                pass_fds=(child_end.fileno(),),
                start_new_session=True,
            )
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """Return the exit status as in `subprocess`, or None while the process runs."""
        return self._process.poll()

    def wait(self) -> int:
        """Wait for the end of the process, and return its exit status."""
        return self._process.wait()

    def end(self) -> int:
        """Kill the process and its group if they still run, and return its exit status.

        The kill does not change the status of a process that has already ended.
        """
        self.kill()
        return self.wait()

    def terminate(self) -> None:
        """Send SIGTERM to the process."""
        self._process.terminate()

    def kill(self) -> None:
        """Kill the process and its group, with all that it has started. Does not block."""
        if self._process.returncode is None:
            # macOS raises PermissionError for a dead process.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
