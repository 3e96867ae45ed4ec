"""A fork server: a process that imports the workers' modules once, then forks each worker.

A forked worker starts in milliseconds and shares the imported modules' memory. The server runs no
code of the components itself, because a process that has used several threads can't be forked
safely.

The driver sends orders through a socket. When the socket closes, or the driver dies, the server
kills every worker with all its children, and removes the run's folder. The fork server of
`multiprocessing` would run the driver's main script in each worker, and would not kill the workers'
children.
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

from ratchet.executors.shm_cleanup import list_shared_memory, remove_paths
from ratchet.executors.worker_main import die_with_parent, end_group, redirect_output, serve

MESSAGE_BYTES = 2**16


def main(descriptor: int, driver: int, folder: str, preload: str) -> None:
    """Run the fork server until the driver closes its socket.

    Args:
        descriptor: the socket to the driver.
        driver: the driver's process id.
        folder: the run's folder, which the server removes at the end.
        preload: names of modules to import, separated by commas. A module that can't be imported
            is skipped; a worker that needs it raises.
    """
    die_with_parent(driver, signal.SIGTERM)
    control = socket.socket(fileno=descriptor)
    server = _ForkServer(control, Path(folder))
    signal.signal(signal.SIGTERM, lambda number, frame: server.end())
    for name in filter(None, preload.split(",")):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    # Without this, every child's first garbage collection would copy the imported modules' pages.
    gc.freeze()
    server.run()


class _ForkServer:
    """The event loop of the fork server: it handles the driver's orders and the workers' ends."""

    def __init__(self, control: socket.socket, folder: Path) -> None:
        self.control = control
        self.folder = folder
        self.children: set[int] = set()
        # Signals wake the selector through this pair of sockets.
        self._wake_receiver, self._wake_sender = socket.socketpair()
        for wake_socket in (self._wake_receiver, self._wake_sender):
            wake_socket.setblocking(False)

    def run(self) -> NoReturn:
        # Without a Python handler, SIGCHLD would not be written to the wakeup socket.
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(self._wake_sender.fileno(), warn_on_full_buffer=False)
        with selectors.DefaultSelector() as selector:
            selector.register(self.control, selectors.EVENT_READ, self._handle_order)
            selector.register(self._wake_receiver, selectors.EVENT_READ, self._reap_workers)
            while True:
                for key, _ in selector.select():
                    key.data()

    def end(self) -> NoReturn:
        for child in self.children:
            _kill(child)
        shutil.rmtree(self.folder, ignore_errors=True)
        os._exit(0)

    def _handle_order(self) -> None:
        try:
            message, descriptors, _, _ = socket.recv_fds(self.control, MESSAGE_BYTES, 1)
        except OSError:
            message, descriptors = b"", []
        if not message:
            self.end()
        order = json.loads(message)
        if "kill" in order:
            if order["kill"] in self.children:
                _kill(order["kill"])
            return
        child = os.fork()
        if child == 0:
            self._run_worker(descriptors[0], order)
        os.close(descriptors[0])
        self.children.add(child)
        self._report({"started": order["start"], "pid": child})

    def _reap_workers(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wake_receiver.recv(512):
                pass
        for child in list(self.children):
            exit_info = os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if exit_info is None:
                continue
            # Kill the worker's remaining children before `waitpid`: after it, another process may
            # get the same group id.
            _kill(child)
            _, status = os.waitpid(child, 0)
            self.children.discard(child)
            self._report({"ended": child, "status": os.waitstatus_to_exitcode(status)})

    def _report(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the driver is gone; `_handle_order` ends the server
            self.control.send(json.dumps(message).encode())

    def _run_worker(self, descriptor: int, order: dict[str, Any]) -> NoReturn:
        status = 1
        try:
            server = os.getppid()
            os.setsid()  # a new process group, which Ctrl-C does not reach
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            die_with_parent(server)
            for server_socket in (self.control, self._wake_receiver, self._wake_sender):
                server_socket.close()
            gc.unfreeze()
            log = Path(order["log"])
            redirect_output(log)
            os.environ.update(order["environment"])
            serve(socket.socket(fileno=descriptor), log, on_driver_lost=end_group)
            status = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(status)


def _kill(child: int) -> None:
    """Kill a worker with all its children, and remove their shared memory."""
    paths = list_shared_memory(child)
    # A new worker may not have created its group yet. It has no children then, and `os.kill`
    # below kills it.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    remove_paths(paths)
