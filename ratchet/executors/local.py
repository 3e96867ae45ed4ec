"""Run worker groups as processes on this machine, without Ray.

A fork server starts them, and the driver reaches each through a pair of sockets.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence
from concurrent.futures import TimeoutError

import psutil

from ratchet.executors.config import LocalClusterConfig
from ratchet.executors.devices import find_node
from ratchet.executors.env_vars import inherit_environment
from ratchet.executors.interpreter import check_interpreter, list_own_paths
from ratchet.executors.placement import ResourceManager, ResourceRequest, VirtualCluster
from ratchet.executors.worker import WorkerPlace
from ratchet.executors.worker_group import WorkerGroup
from ratchet.executors.worker_handle import SocketWorkerHandle, WorkerName
from ratchet.processes.fork_server_client import ForkedProcess, ForkServer

HOST = "127.0.0.1"
WORKER_MODULE = "ratchet.executors.worker_main"
# What ranks of learners and generators import: once, and not in each of their processes.
PRELOAD = (
    "torch",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "ratchet.models.decoder",
    "ratchet.learners.distributed.worker",
    "ratchet.algorithms.policy_gradient",
    "ratchet.generators.engine.engine",
    "ratchet.training.workers.generators",
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
        self.cluster = VirtualCluster(ResourceManager([find_node(threads, device, config.devices)]))
        self.preload = tuple(preload)
        self._servers: list[ForkServer] = []  # a server that was killed is replaced
        # The server in use of each interpreter; None: the driver's.
        self._current_servers: dict[str | None, ForkServer] = {}
        self._servers_lock = threading.Lock()
        self._groups: list[WorkerGroup] = []

    def plan(self, requests: Sequence[ResourceRequest]) -> None:
        """Assign resources to all roles, before the first group is started.

        Raises ConfigError with the missing resources.
        """
        self.cluster.plan(requests)
        for interpreter in {request.interpreter for request in requests} - {None}:
            check_interpreter(str(interpreter))

    def group(self, role: str, rank: int | None = None) -> WorkerGroup:
        """Start the processes of a planned role, or of one rank of it.

        It does not wait until they have started; the first call does.
        """
        server = self._get_server(self.cluster.find_interpreter(role))
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
            places.append(place)
            process = server.start(
                f"{role}-{rank_number}",
                f"{WORKER_MODULE}:main",
                [bundle.environment],
            )
            name = WorkerName(role, rank_number, len(bundles), socket.gethostname())
            members.append(LocalWorkerHandle(name, self.config.silence_s, process))
        group = WorkerGroup(places, members, timeout_s=self.config.timeout_s)
        self._groups.append(group)
        return group

    def close(self) -> None:
        """End all groups and their processes."""
        for group in self._groups:
            group.close()
        for server in self._servers:
            server.close()
        self._groups, self._servers, self._current_servers = [], [], {}

    def _get_server(self, interpreter: str | None) -> ForkServer:
        """Return a running fork server of an interpreter."""
        # Generators are restarted from several threads at once.
        with self._servers_lock:
            server = self._current_servers.get(interpreter)
            if server is None or server.has_ended:
                # Numerical libraries must start no threads in the server: a fork copies no threads.
                environment = inherit_environment(OMP_NUM_THREADS="1")
                preload = (WORKER_MODULE, *self.preload)
                program = None if interpreter is None else (interpreter, list_own_paths())
                server = self._current_servers[interpreter] = ForkServer(
                    preload, environment, program
                )
                self._servers.append(server)
            return server


class LocalWorkerHandle(SocketWorkerHandle):
    """The handle of a worker that the fork server started."""

    def __init__(self, name: WorkerName, silence_s: float, process: ForkedProcess) -> None:
        self.process = process
        super().__init__(name, process.connection, silence_s, process.describe_end)

    def kill(self) -> None:
        super().kill()
        self.process.kill()

    def read_log_tail(self) -> str:
        return self.process.read_log_tail()

    def describe_state(self) -> str:
        try:
            status = psutil.Process(self.process.pid.result(0)).status()
        except (psutil.Error, TimeoutError):
            return ""
        is_stopped = status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
        return " (it is stopped, for example by SIGSTOP)" if is_stopped else ""
