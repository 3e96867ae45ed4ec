"""The process that runs the programs, each in a fork of itself."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import threading
import traceback
import types
from pathlib import Path
from typing import Any, NoReturn

HIGH = 400  # above all descriptors of a program


def main() -> None:
    """Import the modules of the command line and serve at its first word, until the end of the
    input."""
    address, *modules = sys.argv[1:]
    for module in (*modules, "support.frozen_imports"):
        importlib.import_module(module)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    os.write(1, b"ready\n")
    Server(listener).serve()
    os._exit(0)  # the end of an interpreter with so many modules takes seconds


class Server:
    """Programs that run, and the connections on which their starters wait."""

    def __init__(self, listener: socket.socket) -> None:
        self.listener = listener
        self.selector = selectors.DefaultSelector()
        self.selector.register(listener, selectors.EVENT_READ, self._accept)
        self.selector.register(0, selectors.EVENT_READ, None)

    def serve(self) -> None:
        while True:
            for key, _ in self.selector.select():
                if key.data is None:
                    return
                if key.fileobj in self.selector.get_map():  # not ended by an event before it
                    key.data()

    def _accept(self) -> None:
        connection, _ = self.listener.accept()
        start, descriptors, _, _ = socket.recv_fds(connection, 8, 250)
        with connection.makefile("rb", buffering=0) as stream:
            text = b""
            while len(text) < int.from_bytes(start, "big"):
                text += stream.read(1 << 20)
        child = os.fork()
        if not child:
            run(json.loads(text), descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        ended = os.pidfd_open(child)
        self.selector.register(connection, selectors.EVENT_READ, lambda: kill_group(child))
        self.selector.register(
            ended, selectors.EVENT_READ, lambda: self._end(child, ended, connection)
        )

    def _end(self, child: int, ended: int, connection: socket.socket) -> None:
        """Send a program's status to the process that started it."""
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        self.selector.unregister(ended)
        os.close(ended)
        self.selector.unregister(connection)
        with contextlib.suppress(OSError):  # the starter was killed
            connection.sendall(f"{status}\n".encode())
        connection.close()


def kill_group(child: int) -> None:
    """Kill a program whose starter was killed, with what it started."""
    try:
        os.killpg(child, signal.SIGKILL)
    except ProcessLookupError:
        os.kill(child, signal.SIGKILL)


def run(job: list[Any], descriptors: list[int]) -> NoReturn:
    """Run the program in this new process, as an interpreter would."""
    program, environment, directory, path, numbers = job
    os.setpgid(0, 0)
    status = 1
    try:
        moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, HIGH) for descriptor in descriptors]
        os.closerange(0, HIGH)
        for source, number in zip(moved, numbers, strict=True):
            os.dup2(source, number)
            os.close(source)
        open_streams()
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(directory)
        sys.path[:] = path
        sys.orig_argv = [sys.executable, *program]
        status = run_program(program)
        threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(status)


def open_streams() -> None:
    """Replace the standard streams, which remember the files that the server had."""
    open_stream = functools.partial(open, closefd=False)
    sys.stdin = sys.__stdin__ = open_stream(0)
    sys.stdout = sys.__stdout__ = open_stream(1, "w")
    sys.stderr = sys.__stderr__ = open_stream(2, "w", 1, errors="backslashreplace")


def run_program(program: list[str]) -> int:
    """Run a script, a module (`-m`) or code (`-c`), and return the status."""
    first = program[0]
    try:
        if first == "-m":
            sys.path.insert(0, os.getcwd())
            sys.argv = program[1:]
            runpy.run_module(program[1], run_name="__main__", alter_sys=True)
        elif first == "-c":
            sys.path.insert(0, "")
            sys.argv = ["-c", *program[2:]]
            sys.modules["__main__"] = module = types.ModuleType("__main__")
            exec(compile(program[1], "<string>", "exec"), vars(module))
        else:
            sys.path.insert(0, str(Path(first).resolve().parent))
            sys.argv = program
            runpy.run_path(first, run_name="__main__")
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return ended.code or 0
        sys.stderr.write(f"{ended.code}\n")
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    main()
