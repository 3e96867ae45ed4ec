"""Run worker groups on the processes that torchrun started.

Rank 0 is the driver and also a worker; the other ranks serve it through sockets. Ranks meet at
torchrun's own store, where rank 0 writes its address and a secret. Any process that can read the
store can connect, so the network must be private, as for everything that torchrun starts.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, NoReturn

from ratchet.errors import ConfigError, WorkerError
from ratchet.executors.config import TorchrunClusterConfig
from ratchet.executors.placement import (
    Accelerator,
    ClusterNode,
    ResourceManager,
    ResourceRequest,
    VirtualCluster,
)
from ratchet.executors.signals import STOP_SIGNALS, keep_handlers
from ratchet.executors.worker import WorkerPlace, bind_socket
from ratchet.executors.worker_group import WorkerGroup
from ratchet.executors.worker_handle import START_S, SocketWorkerHandle, WorkerName
from ratchet.executors.worker_main import serve
from ratchet.observe.stall_report import waiting
from ratchet.processes.frames import Connection
from ratchet.processes.process_group import end_group

NONCE_BYTES, PROOF_BYTES = 32, 64
LINE_BYTES = 2**16
ANSWER_S = 10.0  # maximum time until a connected process has identified itself


@dataclass(frozen=True)
class TorchrunRank:
    """The ranks of a process, from the environment variables that torchrun sets."""

    rank: int
    world_size: int
    local_rank: int

    @classmethod
    def from_environment(cls) -> TorchrunRank | None:
        """Return this process's ranks; None unless torchrun started more than one process."""
        values = [
            os.environ.get(name, "")
            for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        ]
        return cls(*map(int, values[:3])) if all(values) and int(values[1]) > 1 else None


class TorchrunExecutor:
    """The executor of rank 0, the driver.

    `plan` waits for the other processes to connect. Always call `close`: they run until then.
    """

    def __init__(self, config: TorchrunClusterConfig, *, threads: int, device: str) -> None:
        """Create the executor. Raises ConfigError unless torchrun started several processes."""
        torchrun_rank = TorchrunRank.from_environment()
        if torchrun_rank is None:
            raise ConfigError(
                "cluster.kind=torchrun needs several processes that torchrun started: start the "
                "run as torchrun --nproc-per-node N -m ratchet train RECIPE, or set "
                "cluster.kind=local"
            )
        self.config = config
        self.threads = threads
        self.device = device
        self._hub = _Hub(torchrun_rank, config)
        self._cluster: VirtualCluster | None = None
        self._groups: list[WorkerGroup] = []

    def plan(self, requests: Sequence[ResourceRequest]) -> None:
        """Assign processes to all roles. Call it before `group`.

        Raises ConfigError if there are too few processes or if a rank needs several accelerators,
        and WorkerError if a process does not connect.
        """
        multi_gpu_request = next((request for request in requests if request.gpus > 1), None)
        if multi_gpu_request is not None:
            raise ConfigError(
                f"role '{multi_gpu_request.role}' needs {multi_gpu_request}, but under torchrun "
                "each rank has one accelerator. Set cluster.kind=ray or local"
            )
        n_processes_by_host = Counter(process.host for process in self._hub.processes)
        nodes = [
            ClusterNode(host, count, tuple(map(Accelerator, range(count))))
            for host, count in n_processes_by_host.items()
        ]
        self._cluster = VirtualCluster(ResourceManager(nodes))
        # In this inventory an accelerator stands for a process.
        self._cluster.plan([replace(request, gpus=1, cpus=0.0) for request in requests])

    def group(self, role: str, rank: int | None = None) -> WorkerGroup:
        """Start and return the worker group of a planned role, or of one rank of it."""
        assert self._cluster is not None, "`plan` must be called before `group`"
        bundles = self._cluster.bundles(role)
        n_processes_by_host = Counter(process.host for process in self._hub.processes)
        ports = "{}-{}".format(*self.config.ports) if self.config.ports else ""
        places, members = [], []
        for rank_number in range(len(bundles)) if rank is None else (rank,):
            bundle = bundles[rank_number]
            process = self._hub.get_process(bundle.node, bundle.accelerators[0].index)
            device = "cpu" if self.device == "cpu" else f"cuda:{process.local_rank}"
            places.append(
                WorkerPlace(
                    role,
                    rank_number,
                    len(bundles),
                    bundle.local_rank,
                    process.host,
                    f"{process.host}:{ports}",
                    max(1, self.threads // n_processes_by_host[process.host]),
                    device,
                )
            )
            members.append(
                self._hub.start_worker(
                    process, WorkerName(role, rank_number, len(bundles), process.host)
                )
            )
        group = WorkerGroup(places, members, timeout_s=self.config.timeout_s)
        self._groups.append(group)
        return group

    def close(self) -> None:
        """End all groups, and the other processes."""
        for group in self._groups:
            group.close()
        self._hub.close()
        self._groups = []


def serve_rank(torchrun_rank: TorchrunRank) -> int:
    """Serve rank 0 from this rank until rank 0 orders it to end. Returns the exit status.

    torchrun sends SIGTERM, SIGINT and SIGHUP to all ranks. Only rank 0 handles them, because it
    needs the other ranks to finish its step.
    """
    # The handler is not SIG_IGN, because programs that this process starts would inherit that.
    with keep_handlers(dict.fromkeys(STOP_SIGNALS, lambda number, frame: None)):
        return _serve_rank(torchrun_rank)


def _serve_rank(torchrun_rank: TorchrunRank) -> int:
    driver = json.loads(_connect_store(torchrun_rank).get("driver"))
    address = driver["host"], driver["port"]
    secret = driver["secret"]
    host = _find_own_address()

    def connect(purpose: str) -> socket.socket:
        connection = socket.create_connection(address, timeout=START_S)
        proof = hmac.new(
            secret.encode(), connection.recv(NONCE_BYTES, socket.MSG_WAITALL), "sha256"
        ).hexdigest()
        identity = {
            "rank": torchrun_rank.rank,
            "local_rank": torchrun_rank.local_rank,
            "host": host,
            "purpose": purpose,
        }
        connection.sendall(proof.encode() + json.dumps(identity).encode() + b"\n")
        _keep_open(connection)
        return connection

    def serve_group(number: str) -> None:
        serve(Connection(connect(number)), on_driver_lost=_exit_orphaned)

    with connect("control") as control, control.makefile("r") as orders:
        for order in orders:
            if order == "end\n":
                return 0
            threading.Thread(
                target=serve_group,
                args=(order.strip(),),
                name=f"group-{order.strip()}",
                daemon=True,
            ).start()
    return _exit_orphaned()


def _exit_orphaned() -> NoReturn:
    """End this process, and its group if it leads one, because the driver is gone."""
    if os.getpgid(0) == os.getpid():
        end_group()
    os._exit(1)


def _keep_open(connection: socket.socket) -> None:
    """Remove a connection's timeout, and close it by keep-alive if the other machine is gone."""
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        for option, value in (
            (socket.TCP_KEEPIDLE, 30),
            (socket.TCP_KEEPINTVL, 10),
            (socket.TCP_KEEPCNT, 3),
        ):
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _find_own_address() -> str:
    """Return this machine's address on the route to rank 0."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
        return probe.getsockname()[0]


def _connect_store(torchrun_rank: TorchrunRank) -> Any:
    """Return torchrun's key-value store, in which the ranks find the driver's address."""
    import torch.distributed as dist

    # torchrun's agent serves the store; if another program set the variables, rank 0 does. The
    # variable is removed because with it `init_process_group` would expect a running server at its
    # address, and worker groups have addresses without one.
    is_server = (
        os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", "") != "True" and torchrun_rank.rank == 0
    )
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(
        address, port, None, is_server, timedelta(seconds=START_S), wait_for_workers=False
    )
    return dist.PrefixStore(f"ratchet/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


@dataclass(frozen=True)
class _Process:
    """A process that torchrun started."""

    rank: int
    local_rank: int  # torchrun's LOCAL_RANK
    host: str
    control: socket.socket | None = None  # the connection for orders; None: the driver's process


class _Hub:
    """The driver's connections to all other processes."""

    def __init__(self, torchrun_rank: TorchrunRank, config: TorchrunClusterConfig) -> None:
        self._silence_s = config.silence_s
        host = _find_own_address()
        self._listener = bind_socket(host, config.ports)
        self._listener.listen()
        self._secret = secrets.token_hex(32)
        self._store = _connect_store(torchrun_rank)
        driver = {"host": host, "port": self._listener.getsockname()[1], "secret": self._secret}
        self._store.set("driver", json.dumps(driver))
        self._n_workers = 0
        self._connected: Future[list[_Process]] = Future()
        this_process = _Process(0, torchrun_rank.local_rank, host)
        threading.Thread(
            target=self._accept_all,
            args=(this_process, torchrun_rank.world_size),
            name="torchrun",
            daemon=True,
        ).start()

    @property
    def processes(self) -> list[_Process]:
        """Wait for all processes and return them by rank.

        Raises WorkerError if one does not connect.
        """
        with waiting("driver", "connect", "the other ranks of torchrun", START_S):
            return self._connected.result()

    def _accept_all(self, this_process: _Process, world_size: int) -> None:
        """Accept the other processes, in a thread because they connect before they are needed."""
        try:
            other_processes = [self._accept("control") for _ in range(world_size - 1)]
            processes = sorted([this_process, *other_processes], key=lambda process: process.rank)
            self._connected.set_result(processes)
        except WorkerError as error:
            self._connected.set_exception(error)

    def get_process(self, host: str, position: int) -> _Process:
        """Return a host's process by its position among the host's processes."""
        return [process for process in self.processes if process.host == host][position]

    def start_worker(self, process: _Process, name: WorkerName) -> SocketWorkerHandle:
        """Start a worker in a process and return its handle."""
        if process.control is None:
            driver_end, worker_end = socket.socketpair()
            threading.Thread(
                target=serve,
                args=(Connection(worker_end),),
                kwargs={"on_driver_lost": lambda: None},
                name=str(name),
                daemon=True,
            ).start()
            return SocketWorkerHandle(
                name,
                Connection(driver_end),
                self._silence_s,
                lambda: ("its thread in the driver ended", ""),
            )
        self._n_workers += 1
        process.control.sendall(f"{self._n_workers}\n".encode())
        connection = self._accept(str(self._n_workers)).control
        assert connection is not None
        return _RemoteWorkerHandle(
            name, Connection(connection), self._silence_s, lambda: ("its connection was closed", "")
        )

    def close(self) -> None:
        """Order all other processes to end."""
        with contextlib.suppress(WorkerError):  # a process that did not connect needs no order
            for process in self.processes:
                if process.control is not None:
                    with contextlib.suppress(OSError):
                        process.control.sendall(b"end\n")
                    process.control.close()
        self._listener.close()

    def _accept(self, purpose: str) -> _Process:
        """Accept the next process that proves it has the secret and connects for this purpose.

        Raises WorkerError if none connects in time.
        """
        deadline = time.monotonic() + START_S
        while (remaining_s := deadline - time.monotonic()) > 0:
            self._listener.settimeout(remaining_s)
            with contextlib.suppress(OSError, ValueError):
                connection, _ = self._listener.accept()
                connection.settimeout(min(remaining_s, ANSWER_S))
                nonce = secrets.token_bytes(NONCE_BYTES)
                connection.sendall(nonce)
                proof = connection.recv(PROOF_BYTES, socket.MSG_WAITALL)
                expected = hmac.new(self._secret.encode(), nonce, "sha256").hexdigest().encode()
                if not hmac.compare_digest(proof, expected):
                    connection.close()
                    continue
                identity = json.loads(_read_line(connection))
                if identity["purpose"] == purpose:
                    _keep_open(connection)
                    return _Process(
                        identity["rank"], identity["local_rank"], identity["host"], connection
                    )
        raise WorkerError(
            f"a process of torchrun did not connect to rank 0 within {START_S:g} s; look at its "
            "output"
        )


def _read_line(connection: socket.socket) -> bytes:
    """Read a line byte by byte, because the bytes after it belong to another reader."""
    line = bytearray()
    while not line.endswith(b"\n") and len(line) < LINE_BYTES:
        piece = connection.recv(1)
        if not piece:
            raise OSError("closed")
        line += piece
    return bytes(line)


class _RemoteWorkerHandle(SocketWorkerHandle):
    """The handle of a worker in another process of torchrun."""

    def kill(self) -> None:
        """Send SIGKILL too, if the process is on this host.

        A stopped process does not notice that its connection ended.
        """
        super().kill()
        if self.pid is not None and self.reported_host == socket.gethostname():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
