"""The process of a fork server: it imports the workers' modules once, then forks each worker.

A forked worker starts in milliseconds and shares the imported modules' memory. The server runs no
code of the components itself, because a process that has used several threads can't be forked
safely.

The driver sends orders as frames: CALL (number, JSON [log, entry, arguments], and the worker's
socket beside it) forks a worker, and CANCEL (process ID) kills one. The server reports HELLO
(number, process ID) when a worker has started, and CLOSE (process ID, exit status) when it has
ended. When the socket closes, or the driver dies, the server kills every worker with all its
children, and removes the run's folder. The fork server of `multiprocessing` would run the driver's
main script in each worker, and would not kill the workers' children.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import selectors
import shutil
import signal
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from ratchet.processes.child import call_entry, die_with_parent
from ratchet.processes.frames import Connection, Frame, FrameKind, PeerGone, dump_json
from ratchet.processes.output_log import redirect_output
from ratchet.processes.process_group import kill_group


def main(control: Connection, folder: str, preload: Sequence[str]) -> None:
    """Run the fork server until the driver closes its socket.

    Args:
        control: The connection to the driver, of kind SOCK_SEQPACKET.
        folder: The run's folder, which the server removes at the end.
        preload: Names of modules to import. A module that can't be imported is skipped; a worker
            that needs it raises.
    """
    server = _ForkServer(control, Path(folder))
    signal.signal(signal.SIGTERM, lambda number, frame: server.end())
    die_with_parent(os.getppid(), signal.SIGTERM)  # so that the driver's death removes the folder
    for name in preload:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    # Without this, every child's first garbage collection would copy the imported modules' pages.
    gc.freeze()
    server.run()


class _ForkServer:
    """The event loop of the fork server: it handles the driver's orders and the workers' ends."""

    def __init__(self, control: Connection, folder: Path) -> None:
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
            selector.register(self.control.socket, selectors.EVENT_READ, self._handle_order)
            selector.register(self._wake_receiver, selectors.EVENT_READ, self._reap_workers)
            while True:
                for key, _ in selector.select():
                    key.data()

    def end(self) -> NoReturn:
        for child in self.children:
            kill_group(child)
        shutil.rmtree(self.folder, ignore_errors=True)
        os._exit(0)

    def _handle_order(self) -> None:
        try:
            order, descriptors = self.control.receive_descriptor()
        except PeerGone:
            self.end()
        if order.kind is FrameKind.CANCEL:
            if order.number in self.children:
                kill_group(order.number)
            return
        child = os.fork()
        if child == 0:
            self._run_worker(descriptors[0], order)
        os.close(descriptors[0])
        self.children.add(child)
        self._report(FrameKind.HELLO, order.number, child)

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
            kill_group(child)
            _, status = os.waitpid(child, 0)
            self.children.discard(child)
            self._report(FrameKind.CLOSE, child, os.waitstatus_to_exitcode(status))

    def _report(self, kind: FrameKind, number: int, value: Any) -> None:
        with contextlib.suppress(OSError):  # the driver is gone; `_handle_order` ends the server
            self.control.send(kind, number, dump_json(value))

    def _run_worker(self, descriptor: int, order: Frame) -> NoReturn:
        status = 1
        try:
            server = os.getppid()
            os.setsid()  # a new process group, which Ctrl-C does not reach
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            die_with_parent(server)
            for server_socket in (self.control.socket, self._wake_receiver, self._wake_sender):
                server_socket.close()
            gc.unfreeze()
            log, entry, arguments = order.parcel.load_json()
            redirect_output(Path(log))
            call_entry(entry, Connection(socket.socket(fileno=descriptor)), [log, *arguments])
            status = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(status)
