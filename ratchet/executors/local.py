"""Run worker groups as processes on this machine, without Ray.

A fork server starts them, and the driver reaches each through a pair of sockets.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, TimeoutError
from pathlib import Path
from typing import Any

import psutil

from ratchet.errors import WorkerError
from ratchet.executors.config import LocalClusterConfig
from ratchet.executors.devices import find_node
from ratchet.executors.fork_server import MESSAGE_BYTES
from ratchet.executors.placement import ResourceManager, ResourceRequest, VirtualCluster
from ratchet.executors.worker import WorkerPlace
from ratchet.executors.worker_group import WorkerGroup
from ratchet.executors.worker_handle import SocketWorkerHandle, WorkerName
from ratchet.executors.worker_main import read_tail
from ratchet.observe.exit_status import describe_exit
from ratchet.utils.temp_dirs import TemporaryFolder

HOST = "127.0.0.1"
PRELOAD = ("torch", "torch.distributed.tensor", "torch.distributed.fsdp", "ratchet.models.decoder")
END_S = 5.0  # maximum wait for a process to exit after its connection has closed
BOOTSTRAP = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]); "
    "from ratchet.executors.fork_server import main; main(int(sys.argv[2]), int(sys.argv[3]), "
    "*sys.argv[4:])"
)


class LocalExecutor:
    """An executor that starts processes on this machine, when the first group is created.

    Args:
        preload: Modules to import before the processes are forked.
    """

    def __init__(
        self,
        config: LocalClusterConfig,
        *,
        threads: int,
        device: str,
        preload: Sequence[str] = PRELOAD,
    ) -> None:
        self.config = config
        self.device = device
        self.cluster = VirtualCluster(ResourceManager([find_node(threads, device, config.devices)]))
        self.preload = tuple(preload)
        # The last one is in use. Those before it were killed, and all their processes with them.
        self._servers: list[ForkServerHandle] = []
        self._servers_lock = threading.Lock()
        self._groups: list[WorkerGroup] = []

    def spawn(self, factory: Callable[..., Any], /, **arguments: Any) -> Any:
        """Create a component in this process."""
        return factory(**arguments)

    def plan(self, requests: Sequence[ResourceRequest]) -> None:
        """Assign resources to all roles, before the first group is started.

        Raises ConfigError with the missing resources.
        """
        self.cluster.plan(requests)

    def group(self, role: str, rank: int | None = None) -> WorkerGroup:
        """Start the processes of a planned role, or of one rank of it.

        It does not wait until they have started; the first call does.
        """
        server = self._get_server()
        bundles = self.cluster.bundles(role)
        ports = "{}-{}".format(*self.config.ports) if self.config.ports else ""
        places, members = [], []
        for rank_number in range(len(bundles)) if rank is None else (rank,):
            bundle = bundles[rank_number]
            device = "cuda:0" if bundle.accelerators else "cpu"
            place = WorkerPlace(
                role,
                rank_number,
                len(bundles),
                bundle.local_rank,
                HOST,
                f"{HOST}:{ports}",
                bundle.threads,
                device,
            )
            visible_devices = (
                {"CUDA_VISIBLE_DEVICES": bundle.visible_devices} if self.device != "cpu" else {}
            )
            places.append(place)
            members.append(
                server.start(
                    WorkerName(role, rank_number, len(bundles), socket.gethostname()),
                    {"OMP_NUM_THREADS": str(bundle.threads), **visible_devices},
                    self.config.silence_s,
                )
            )
        group = WorkerGroup(places, members, timeout_s=self.config.timeout_s)
        self._groups.append(group)
        return group

    def close(self) -> None:
        """End all groups and their processes."""
        for group in self._groups:
            group.close()
        for server in self._servers:
            server.close()
        self._groups = []
        self._servers = []

    def _get_server(self) -> ForkServerHandle:
        """Return a running fork server; generators are restarted from several threads at once."""
        with self._servers_lock:
            if not self._servers or self._servers[-1].has_ended:
                self._servers.append(ForkServerHandle(self.preload))
            return self._servers[-1]


class LocalWorkerHandle(SocketWorkerHandle):
    """The handle of a worker that the fork server started."""

    def __init__(
        self,
        name: WorkerName,
        connection: socket.socket,
        silence_s: float,
        child: ForkedWorker,
        log: Path,
    ) -> None:
        self.child = child
        self._log = log
        super().__init__(name, connection, silence_s, self._wait_for_exit)

    def kill(self) -> None:
        super().kill()
        self.child.kill()

    def read_log_tail(self) -> str:
        return read_tail(self._log)

    def describe_state(self) -> str:
        try:
            status = psutil.Process(self.child.pid.result(0)).status()
        except (psutil.Error, TimeoutError):
            return ""
        is_stopped = status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
        return " (it is stopped, for example by SIGSTOP)" if is_stopped else ""

    def _wait_for_exit(self) -> tuple[str, str]:
        try:
            return describe_exit(self.child.status.result(END_S))
        except TimeoutError:
            return "it closed its connection", ""
        except WorkerError as error:
            return str(error), ""


class ForkedWorker:
    """A process that the fork server starts.

    Attributes:
        pid: The process id, once the process has started.
        status: The exit status, as in `subprocess`.
    """

    def __init__(self, send_order: Callable[[dict[str, Any]], None]) -> None:
        self.pid: Future[int] = Future()
        self.status: Future[int] = Future()
        self._send_order = send_order

    def kill(self) -> None:
        """Kill the process as soon as it has started."""
        self.pid.add_done_callback(lambda pid: self._send_order({"kill": pid.result()}))


class ForkServerHandle:
    """The driver's handle of the fork server. However the driver ends, the workers end too."""

    def __init__(self, preload: Sequence[str]) -> None:
        # The fork server removes the folder if this process is killed.
        self._temporary = TemporaryFolder("nursery")
        self.folder = self._temporary.path
        self._control, self._server_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._started: dict[int, ForkedWorker] = {}  # by number, until the process id is known
        self._living: dict[int, ForkedWorker] = {}  # by process id
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(
            target=self._run_server, args=(preload,), name="nursery", daemon=True
        )
        self._thread.start()

    @property
    def has_ended(self) -> bool:
        return not self._thread.is_alive()

    def start(
        self, name: WorkerName, environment: dict[str, str], silence_s: float
    ) -> LocalWorkerHandle:
        """Start a worker and return its handle. Raises WorkerError if the fork server has ended."""
        number = next(self._numbers)
        log = self.folder / f"{name.role}-{name.rank}-{number}.log"
        child = self._started[number] = ForkedWorker(self._send_order)
        driver_end, worker_end = socket.socketpair()
        with worker_end:
            message = json.dumps(
                {"start": number, "log": str(log), "environment": environment}
            ).encode()
            try:
                with self._lock:
                    socket.send_fds(self._control, [message], [worker_end.fileno()])
            except OSError as error:
                driver_end.close()
                self._thread.join()  # so that `has_ended` says so from now on
                raise WorkerError(f"{name} can't start: the fork server has ended") from error
        return LocalWorkerHandle(name, driver_end, silence_s, child, log)

    def close(self) -> None:
        """End the server and its processes, and remove their logs; block until that is done."""
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)
        if self._process is not None:
            self._process.terminate()  # end it even while it imports modules
        self._thread.join()
        self._temporary.close()

    def _send_order(self, order: dict[str, Any]) -> None:
        # If the fork server is gone, all its processes are gone too.
        with contextlib.suppress(OSError), self._lock:
            self._control.send(json.dumps(order).encode())

    def _run_server(self, preload: Sequence[str]) -> None:
        """Start the fork server and handle its reports until it ends.

        This thread lives as long as the server, because on Linux the server gets its death signal
        when the thread that started it ends.
        """
        with self._server_end as server_end:
            arguments = [
                json.dumps(sys.path),
                str(server_end.fileno()),
                str(os.getpid()),
                str(self.folder),
                ",".join(preload),
            ]
            process = self._process = subprocess.Popen(
                [sys.executable, "-c", BOOTSTRAP, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=2,  # keep output of imports out of the driver's standard output
                pass_fds=(server_end.fileno(),),
                # Numerical libraries must start no threads here: a fork would not copy them.
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                start_new_session=True,  # Ctrl-C reaches the driver alone
            )
        with contextlib.suppress(OSError):
            while message := self._control.recv(MESSAGE_BYTES):
                self._handle_report(json.loads(message))
        exit_text, _ = describe_exit(process.wait())
        for child in (*self._started.values(), *self._living.values()):
            child.status.set_exception(WorkerError(f"the fork server ended: {exit_text}"))

    def _handle_report(self, report: dict[str, int]) -> None:
        if "started" in report:
            child = self._living[report["pid"]] = self._started.pop(report["started"])
            child.pid.set_result(report["pid"])
        else:
            self._living.pop(report["ended"]).status.set_result(report["status"])
