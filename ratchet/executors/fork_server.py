"""A process that has imported what workers need and forks them, so that each starts in milliseconds
and shares that memory.

It runs no code of the components itself: a process that has used several threads could not be
forked. The driver asks through a socket; when that closes, or the driver dies, it kills every
worker with all that it started, and removes the folder of the run. `multiprocessing` has such a
server too, which would run the driver's main script in each worker, and let go of what workers have
started.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import selectors
import shutil
import signal
import socket
from pathlib import Path
from typing import Any, NoReturn

from ratchet.executors.shm_cleanup import remove, shared_by
from ratchet.executors.worker_main import die_with_parent, end_group, log_to, serve

MESSAGE_BYTES = 2**16


def main(descriptor: int, driver: int, folder: str, preload: str) -> None:
    """preload: names of modules, by comma; one that is missing is left to those who need it."""
    die_with_parent(driver, signal.SIGTERM)
    control = socket.socket(fileno=descriptor)
    nursery = _Nursery(control, Path(folder))
    signal.signal(signal.SIGTERM, lambda number, frame: nursery.end())
    for name in filter(None, preload.split(",")):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.freeze()  # or every child's first collection copies the pages of all that was imported
    nursery.run()


class _Nursery:
    def __init__(self, control: socket.socket, folder: Path) -> None:
        self.control, self.folder = control, folder
        self.children: set[int] = set()
        # Signals wake the selector through a socket of their own.
        self._woken, self._wake = socket.socketpair()
        for end in (self._woken, self._wake):
            end.setblocking(False)

    def run(self) -> NoReturn:
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        with selectors.DefaultSelector() as selector:
            selector.register(self.control, selectors.EVENT_READ, self._obey)
            selector.register(self._woken, selectors.EVENT_READ, self._reap)
            while True:
                for key, _ in selector.select():
                    key.data()

    def end(self) -> NoReturn:
        for child in self.children:
            _kill(child)
        shutil.rmtree(self.folder, ignore_errors=True)
        os._exit(0)

    def _obey(self) -> None:
        try:
            message, descriptors, _, _ = socket.recv_fds(self.control, MESSAGE_BYTES, 1)
        except OSError:
            message, descriptors = b"", []
        if not message:
            self.end()
        asked = json.loads(message)
        if "kill" in asked:
            if asked["kill"] in self.children:
                _kill(asked["kill"])
            return
        child = os.fork()
        if child == 0:
            self._become(descriptors[0], asked)
        os.close(descriptors[0])
        self.children.add(child)
        self._say({"started": asked["start"], "pid": child})

    def _reap(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._woken.recv(512):
                pass
        for child in list(self.children):
            ended = os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None:
                continue
            _kill(child)  # what it has left: while it is not waited for, its group is no other's
            _, status = os.waitpid(child, 0)
            self.children.discard(child)
            self._say({"ended": child, "status": os.waitstatus_to_exitcode(status)})

    def _say(self, what: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the driver is gone: the selector says so
            self.control.send(json.dumps(what).encode())

    def _become(self, descriptor: int, asked: dict[str, Any]) -> NoReturn:
        status = 1
        try:
            nursery = os.getppid()
            os.setsid()  # a group of its own, and Ctrl-C is for the driver
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            die_with_parent(nursery)
            for inherited in (self.control, self._woken, self._wake):
                inherited.close()
            gc.unfreeze()
            log = Path(asked["log"])
            log_to(log)
            os.environ.update(asked["environment"])
            serve(socket.socket(fileno=descriptor), log, lost=end_group)
            status = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(status)


def _kill(child: int) -> None:
    """With all that it started, and what they have in shared memory."""
    left = shared_by(child)
    # it has no group yet: then it has no children either
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    remove(left)
