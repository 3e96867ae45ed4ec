"""The driver's side of a fork server: start it, let it fork processes, and note how they end."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, TimeoutError
from pathlib import Path
from typing import Any

from ratchet.errors import WorkerError
from ratchet.processes.exit_status import describe_exit
from ratchet.processes.frames import Connection, FrameKind, PeerGone, dump_json
from ratchet.processes.output_log import read_tail
from ratchet.processes.process_group import kill_group
from ratchet.processes.spawn import SpawnedProcess
from ratchet.utils.temp_dirs import TemporaryFolder

END_S = 5.0  # maximum wait for a process to exit after its connection has closed


class ForkedProcess:
    """A process that the fork server starts.

    Attributes:
        connection: The connection to the process.
        log: The file with all that the process prints.
        pid: The process id, once the process has started.
        status: The exit status, as in `subprocess`, or WorkerError if the fork server has ended.
    """

    def __init__(self, connection: Connection, log: Path, send_kill: Callable[[int], None]) -> None:
        self.connection = connection
        self.log = log
        self.pid: Future[int] = Future()
        self.status: Future[int] = Future()
        self._send_kill = send_kill

    def kill(self) -> None:
        """Kill the process and its group as soon as it has started. Does not block."""
        self.pid.add_done_callback(lambda pid: self._send_kill(pid.result()))

    def describe_end(self) -> tuple[str, str]:
        """Wait briefly for the process to end. Return how it ended, and the signal's name or ""."""
        try:
            return describe_exit(self.status.result(END_S))
        except TimeoutError:
            return "it closed its connection", ""
        except WorkerError as error:
            return str(error), ""

    def read_log_tail(self) -> str:
        """Return the last lines that the process has printed; "" if they can't be read."""
        return read_tail(self.log)


class ForkServer:
    """The driver's handle of a fork server.

    However the driver ends, the server and all processes that it forked end too.

    Args:
        preload: Modules to import before processes are forked.
        environment: Environment variables of the processes.
        interpreter: As in `SpawnedProcess`.

    Attributes:
        folder: The folder of the logs.
    """

    def __init__(
        self,
        preload: Sequence[str],
        environment: Mapping[str, str],
        interpreter: tuple[str, Sequence[str]] | None = None,
    ) -> None:
        # The fork server removes the folder if this process is killed.
        self._temporary_folder = TemporaryFolder("fork-server")
        self.folder = self._temporary_folder.path
        self._server: Future[SpawnedProcess] = Future()
        self._starting: dict[int, ForkedProcess] = {}  # by number, until the process id is known
        self._running: dict[int, ForkedProcess] = {}  # by process id
        self._numbers = itertools.count()
        self._thread = threading.Thread(
            target=self._run_server,
            args=(preload, environment, interpreter),
            name="fork-server",
            daemon=True,
        )
        self._thread.start()

    @property
    def has_ended(self) -> bool:
        return not self._thread.is_alive()

    def start(self, name: str, entry: str, arguments: Sequence[Any]) -> ForkedProcess:
        """Start a process.

        Args:
            name: A part of the log file's name.
            entry: "module:function", called in the process with its `Connection`, the path of its
                log and the arguments.
            arguments: JSON values.

        Raises WorkerError if the fork server has ended.
        """
        number = next(self._numbers)
        log = self.folder / f"{name}-{number}.log"
        driver_end, process_end = socket.socketpair()
        process = self._starting[number] = ForkedProcess(
            Connection(driver_end), log, self._send_kill
        )
        order = dump_json([str(log), entry, list(arguments)])
        with process_end:
            try:
                self._server.result().connection.send_descriptor(
                    process_end.fileno(), FrameKind.CALL, number, order
                )
            except OSError as error:
                driver_end.close()
                self._thread.join()  # so that `has_ended` is True from now on
                raise WorkerError(f"{name} can't start: the fork server has ended") from error
        return process

    def close(self) -> None:
        """End the server and its processes, and remove their logs; block until that is done."""
        with contextlib.suppress(OSError):
            server = self._server.result()
            server.connection.shut_down()
            server.terminate()  # end it even while it imports modules
        self._thread.join()
        self._temporary_folder.close()

    def _send_kill(self, pid: int) -> None:
        # If the fork server is gone, all its processes are gone too.
        with contextlib.suppress(OSError):
            self._server.result().connection.send(FrameKind.CANCEL, pid)

    def _run_server(
        self,
        preload: Sequence[str],
        environment: Mapping[str, str],
        interpreter: tuple[str, Sequence[str]] | None,
    ) -> None:
        """Start the fork server and handle its reports until it ends.

        This thread lives as long as the server, because on Linux the server gets its death signal
        when the thread that started it ends.
        """
        try:
            server = SpawnedProcess(
                "ratchet.processes.fork_server:main",
                (str(self.folder), list(preload)),
                environment=environment,
                socket_kind=socket.SOCK_SEQPACKET,
                interpreter=interpreter,
            )
        except OSError as error:
            self._server.set_exception(error)
            return
        self._server.set_result(server)
        failure = ""
        with contextlib.suppress(PeerGone):
            while True:
                report = server.connection.receive()
                if report.kind is FrameKind.HELLO:
                    pid = report.parcel.load_json()
                    process = self._running[pid] = self._starting.pop(report.number)
                    process.pid.set_result(pid)
                elif report.kind is FrameKind.CLOSE:
                    self._running.pop(report.number).status.set_result(report.parcel.load_json())
                else:
                    failure = report.parcel.load_json()
        status = server.wait()
        # The server died before it could kill its processes' groups. Children of the forked
        # processes may still run.
        if status != 0:
            for pid in self._running:
                kill_group(pid)
        end = failure or describe_exit(status)[0]
        for process in (*self._starting.values(), *self._running.values()):
            process.status.set_exception(WorkerError(f"the fork server ended: {end}"))
