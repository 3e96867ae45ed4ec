"""Code that a child process runs first: it binds the child to its parent, and calls its entry."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from ratchet.processes.frames import Connection, FrameKind, PeerGone, dump_json
from ratchet.processes.process_group import end_group

PR_SET_PDEATHSIG = 1


def main(descriptor: str, parent: str, entry: str, arguments: str) -> None:
    """Run a spawned process until its entry returns or its parent is gone.

    The process leads a process group, and its whole group ends with it. An exception of the entry
    is sent to the parent as a RAISED frame of number 0 with the traceback.

    Args:
        descriptor: File descriptor of the socket to the parent.
        parent: Process ID of the parent.
        entry: "module:function", called with the connection to the parent and the arguments.
        arguments: JSON list.
    """
    die_with_parent(int(parent))
    connection = Connection(socket.socket(fileno=int(descriptor)))
    try:
        call_entry(entry, connection, json.loads(arguments))
    except PeerGone:
        pass
    except BaseException:
        with contextlib.suppress(OSError):
            connection.send(FrameKind.RAISED, 0, dump_json(traceback.format_exc()))
    end_group()


def call_entry(entry: str, connection: Connection, arguments: Sequence[Any]) -> None:
    """Import the entry and call it with the connection and the arguments."""
    import_function(entry)(connection, *arguments)


def import_function(path: str) -> Any:
    """Return the function "module:name"."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


def die_with_parent(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Let the kernel signal this process when the thread that started it ends.

    This holds even if other code of this process has the GIL. Exit at once if the parent has
    already ended. On systems other than Linux the process notices only the end of its connection.

    Args:
        parent: Process ID of the parent.
        number: The signal to send.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(number), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
