"""Groups on the processes that torchrun started: that of rank 0 drives, and works too; the others
serve it through sockets.

Ranks meet at the store of torchrun's own, where rank 0 leaves its address and a secret. Who knows
the secret may connect, so a run is as private as its store is: a matter of the network, as with
everything that torchrun starts.
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
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, NoReturn

from ratchet.errors import ConfigError, WorkerError
from ratchet.executors.config import TorchrunClusterConfig
from ratchet.executors.placement import Accelerator, Need, Node, ResourceManager, VirtualCluster
from ratchet.executors.signals import STOPPING, kept
from ratchet.executors.worker import Place, bound
from ratchet.executors.worker_group import WorkerGroup
from ratchet.executors.worker_handle import START_S, Name, SocketMember
from ratchet.executors.worker_main import end_group, serve
from ratchet.observe.stall_report import waiting

NONCE_BYTES, PROOF_BYTES = 32, 64
LINE_BYTES = 2**16
ANSWER_S = 10.0  # for who has connected to say who it is


@dataclass(frozen=True)
class Launched:
    """What torchrun says to each process, by environment variables."""

    rank: int
    world_size: int
    local_rank: int

    @classmethod
    def here(cls) -> Launched | None:
        """None where this process is none of several that torchrun started."""
        said = [
            os.environ.get(name, "")
            for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        ]
        return cls(*map(int, said[:3])) if all(said) and int(said[1]) > 1 else None


class TorchrunExecutor:
    """Made in the process of rank 0; `close` then is a must, as the others wait for it. `plan`
    waits for them to come."""

    def __init__(self, config: TorchrunClusterConfig, *, threads: int, device: str) -> None:
        """Raises ConfigError where torchrun did not start this process."""
        launched = Launched.here()
        if launched is None:
            raise ConfigError(
                "cluster.kind is torchrun, and this process is none of several that torchrun "
                "started: start it as "
                "torchrun --nproc-per-node N -m ratchet train RECIPE, or set cluster.kind=local"
            )
        self.config, self.threads, self.device = config, threads, device
        self._hub = _Hub(launched, config)
        self._cluster: VirtualCluster | None = None
        self._groups: list[WorkerGroup] = []

    def spawn(self, factory: Callable[..., Any], /, **arguments: Any) -> Any:
        """A component of this process."""
        return factory(**arguments)

    def plan(self, needs: Sequence[Need]) -> None:
        """Says what the groups will need, all of them. Raises ConfigError where there are not
        enough processes, and WorkerError where one of them does not come."""
        wide = next((need for need in needs if need.gpus > 1), None)
        if wide is not None:
            raise ConfigError(
                f"role '{wide.role}' asks for {wide}: under torchrun a rank has one; use "
                "cluster.kind=ray or local"
            )
        here: Counter[str] = Counter(process.host for process in self._hub.processes)
        nodes = [
            Node(host, count, tuple(map(Accelerator, range(count)))) for host, count in here.items()
        ]
        self._cluster = VirtualCluster(ResourceManager(nodes))
        # an accelerator stands for a process
        self._cluster.plan([replace(need, gpus=1, cpus=0.0) for need in needs])

    def group(self, role: str, rank: int | None = None) -> WorkerGroup:
        """On processes that are there already: of a role, or of one rank of it."""
        assert self._cluster is not None, "a group before the plan"
        bundles = self._cluster.bundles(role)
        on_host: Counter[str] = Counter(process.host for process in self._hub.processes)
        ports = "{}-{}".format(*self.config.ports) if self.config.ports else ""
        places, members = [], []
        for number in range(len(bundles)) if rank is None else (rank,):
            bundle = bundles[number]
            process = self._hub.at(bundle.node, bundle.accelerators[0].index)
            device = "cpu" if self.device == "cpu" else f"cuda:{process.local_rank}"
            threads, where = (
                max(1, self.threads // on_host[process.host]),
                f"{process.host}:{ports}",
            )
            places.append(
                Place(
                    role,
                    number,
                    len(bundles),
                    bundle.local_rank,
                    process.host,
                    where,
                    threads,
                    device,
                )
            )
            members.append(
                self._hub.member(process, Name(role, number, len(bundles), process.host))
            )
        group = WorkerGroup(places, members, timeout_s=self.config.timeout_s)
        self._groups.append(group)
        return group

    def close(self) -> None:
        """Ends all groups, and the other processes."""
        for group in self._groups:
            group.close()
        self._hub.close()
        self._groups = []


def serve_rank(launched: Launched) -> int:
    """What the process of another rank than 0 does: it works for rank 0 until that ends it. Returns
    the exit status.

    SIGTERM, SIGINT and SIGHUP, which torchrun sends to all ranks, are for rank 0, which needs the
    others to end its step.
    """
    # Not SIG_IGN, which programs that it starts would inherit.
    with kept(dict.fromkeys(STOPPING, lambda number, frame: None)):
        return _serve_rank(launched)


def _serve_rank(launched: Launched) -> int:
    said = json.loads(_store(launched).get("driver"))
    address, secret = (said["host"], said["port"]), said["secret"]
    own = _own_host()

    def connect(purpose: str) -> socket.socket:
        connection = socket.create_connection(address, timeout=START_S)
        proof = hmac.new(
            secret.encode(), connection.recv(NONCE_BYTES, socket.MSG_WAITALL), "sha256"
        ).hexdigest()
        who = {
            "rank": launched.rank,
            "local_rank": launched.local_rank,
            "host": own,
            "purpose": purpose,
        }
        connection.sendall(proof.encode() + json.dumps(who).encode() + b"\n")
        _keep(connection)
        return connection

    def work(number: str) -> None:
        serve(connect(number), lost=_end)

    with connect("control") as control, control.makefile("r") as orders:
        for order in orders:
            if order == "end\n":
                return 0
            threading.Thread(
                target=work, args=(order.strip(),), name=f"group-{order.strip()}", daemon=True
            ).start()
    return _end()


def _end() -> NoReturn:
    """The driver is gone."""
    if os.getpgid(0) == os.getpid():
        end_group()
    os._exit(1)


def _keep(connection: socket.socket) -> None:
    """Without a deadline, but not beyond the other machine's end."""
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


def _own_host() -> str:
    """The address that this machine has on the way to rank 0."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
        return probe.getsockname()[0]


def _store(launched: Launched) -> Any:
    import torch.distributed as dist

    # torchrun's agent serves it; where somebody else set the variables, rank 0 does. Taken out of
    # the environment: with it init_process_group would look for a server at every address, and
    # groups have addresses of their own.
    serves = os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", "") != "True" and launched.rank == 0
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(
        address, port, None, serves, timedelta(seconds=START_S), wait_for_workers=False
    )
    return dist.PrefixStore(f"ratchet/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


@dataclass(frozen=True)
class _Process:
    """local_rank: torchrun's. control: None for the driver's own."""

    rank: int
    local_rank: int
    host: str
    control: socket.socket | None = None


class _Hub:
    """The driver's end of all connections."""

    def __init__(self, launched: Launched, config: TorchrunClusterConfig) -> None:
        self._silence_s = config.silence_s
        host = _own_host()
        self._listener = bound(host, config.ports)
        self._listener.listen()
        self._secret = secrets.token_hex(32)
        self._store = _store(launched)
        where = {"host": host, "port": self._listener.getsockname()[1], "secret": self._secret}
        self._store.set("driver", json.dumps(where))
        self._numbers = 0
        self._come: Future[list[_Process]] = Future()
        own = _Process(0, launched.local_rank, host)
        threading.Thread(
            target=self._gather, args=(own, launched.world_size), name="torchrun", daemon=True
        ).start()

    @property
    def processes(self) -> list[_Process]:
        """By rank. Waits for them. Raises WorkerError where one does not come."""
        with waiting("driver", "connect", "the other ranks of torchrun", START_S):
            return self._come.result()

    def _gather(self, own: _Process, world_size: int) -> None:
        """In a thread of its own: the others come before the driver has anything for them to do."""
        try:
            others = [self._accept("control") for _ in range(world_size - 1)]
            self._come.set_result(sorted([own, *others], key=lambda process: process.rank))
        except WorkerError as error:
            self._come.set_exception(error)

    def at(self, host: str, position: int) -> _Process:
        return [process for process in self.processes if process.host == host][position]

    def member(self, process: _Process, name: Name) -> SocketMember:
        if process.control is None:
            ours, theirs = socket.socketpair()
            threading.Thread(
                target=serve,
                args=(theirs,),
                kwargs={"lost": lambda: None},
                name=str(name),
                daemon=True,
            ).start()
            return SocketMember(
                name, ours, self._silence_s, lambda: ("its thread in the driver ended", "")
            )
        self._numbers += 1
        process.control.sendall(f"{self._numbers}\n".encode())
        connection = self._accept(str(self._numbers)).control
        assert connection is not None
        return _Remote(name, connection, self._silence_s, lambda: ("its connection was closed", ""))

    def close(self) -> None:
        with contextlib.suppress(WorkerError):  # who did not come needs no end
            for process in self.processes:
                if process.control is not None:
                    with contextlib.suppress(OSError):
                        process.control.sendall(b"end\n")
                    process.control.close()
        self._listener.close()

    def _accept(self, purpose: str) -> _Process:
        """The next who knows the secret. Raises WorkerError where nobody comes in time."""
        end = time.monotonic() + START_S
        while (left := end - time.monotonic()) > 0:
            self._listener.settimeout(left)
            with contextlib.suppress(OSError, ValueError):
                connection, _ = self._listener.accept()
                connection.settimeout(min(left, ANSWER_S))
                nonce = secrets.token_bytes(NONCE_BYTES)
                connection.sendall(nonce)
                proof = connection.recv(PROOF_BYTES, socket.MSG_WAITALL)
                wanted = hmac.new(self._secret.encode(), nonce, "sha256").hexdigest().encode()
                if not hmac.compare_digest(proof, wanted):
                    connection.close()
                    continue
                who = json.loads(_line(connection))
                if who["purpose"] == purpose:
                    _keep(connection)
                    return _Process(who["rank"], who["local_rank"], who["host"], connection)
        raise WorkerError(
            f"a process of torchrun did not connect to rank 0 within {START_S:g} s; look at what "
            "it printed"
        )


def _line(connection: socket.socket) -> bytes:
    """Byte by byte: what comes after it is not for us."""
    read = bytearray()
    while not read.endswith(b"\n") and len(read) < LINE_BYTES:
        piece = connection.recv(1)
        if not piece:
            raise OSError("closed")
        read += piece
    return bytes(read)


class _Remote(SocketMember):
    def kill(self) -> None:
        """One that is stopped does not see its connection end."""
        super().kill()
        if self.pid is not None and self.said_host == socket.gethostname():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
