"""Groups as processes of this machine, without Ray: a nursery forks them, and each is reached
through a pair of sockets."""

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

from ratchet.errors import WorkerError
from ratchet.executors.config import LocalClusterConfig
from ratchet.executors.devices import this_node
from ratchet.executors.fork_server import MESSAGE_BYTES
from ratchet.executors.placement import Need, ResourceManager, VirtualCluster
from ratchet.executors.worker import Place
from ratchet.executors.worker_group import WorkerGroup
from ratchet.executors.worker_handle import Name, SocketMember
from ratchet.executors.worker_main import tail_of
from ratchet.observe.exit_status import ended_how
from ratchet.utils.temp_dirs import TemporaryFolder

HOST = "127.0.0.1"
PRELOAD = ("torch", "torch.distributed.tensor", "torch.distributed.fsdp", "ratchet.models.decoder")
END_S = 5.0  # for a process whose connection has closed to be gone
BOOTSTRAP = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]); "
    "from ratchet.executors.fork_server import main; main(int(sys.argv[2]), int(sys.argv[3]), "
    "*sys.argv[4:])"
)


class LocalExecutor:
    """Nothing is started before the first group. preload: modules that the processes find
    imported."""

    def __init__(
        self,
        config: LocalClusterConfig,
        *,
        threads: int,
        device: str,
        preload: Sequence[str] = PRELOAD,
    ) -> None:
        self.config, self.device = config, device
        self.cluster = VirtualCluster(ResourceManager([this_node(threads, device, config.devices)]))
        self.preload = tuple(preload)
        self._nursery: Nursery | None = None
        self._groups: list[WorkerGroup] = []

    def spawn(self, factory: Callable[..., Any], /, **arguments: Any) -> Any:
        """A component of this process."""
        return factory(**arguments)

    def plan(self, needs: Sequence[Need]) -> None:
        """Says what the groups will need, all of them, before the first is started. Raises
        ConfigError with what is missing."""
        self.cluster.plan(needs)

    def group(self, role: str, rank: int | None = None) -> WorkerGroup:
        """Starts the processes of a planned role, or of one rank of it. Does not wait for them: the
        first call does."""
        if self._nursery is None:
            self._nursery = Nursery(self.preload)
        bundles = self.cluster.bundles(role)
        ports = "{}-{}".format(*self.config.ports) if self.config.ports else ""
        places, members = [], []
        for number in range(len(bundles)) if rank is None else (rank,):
            bundle = bundles[number]
            device = "cuda:0" if bundle.accelerators else "cpu"
            place = Place(
                role,
                number,
                len(bundles),
                bundle.local_rank,
                HOST,
                f"{HOST}:{ports}",
                bundle.threads,
                device,
            )
            seen = {"CUDA_VISIBLE_DEVICES": bundle.visible} if self.device != "cpu" else {}
            places.append(place)
            members.append(
                self._nursery.start(
                    Name(role, number, len(bundles), socket.gethostname()),
                    {"OMP_NUM_THREADS": str(bundle.threads), **seen},
                    self.config.silence_s,
                )
            )
        group = WorkerGroup(places, members, timeout_s=self.config.timeout_s)
        self._groups.append(group)
        return group

    def close(self) -> None:
        """Ends all groups, and the processes with them."""
        for group in self._groups:
            group.close()
        if self._nursery is not None:
            self._nursery.close()
        self._groups, self._nursery = [], None


class LocalMember(SocketMember):
    def __init__(
        self, name: Name, connection: socket.socket, silence_s: float, child: Child, log: Path
    ) -> None:
        self.child, self._log = child, log
        super().__init__(name, connection, silence_s, self._how_it_ended)

    def kill(self) -> None:
        super().kill()
        self.child.kill()

    def tail(self) -> str:
        return tail_of(self._log)

    def state(self) -> str:
        try:
            stat = Path(f"/proc/{self.child.pid.result(0)}/stat").read_text()
        except (OSError, TimeoutError):
            return ""
        return (
            " (it is stopped, by SIGSTOP say)" if stat.rpartition(")")[2].split()[0] in "Tt" else ""
        )

    def _how_it_ended(self) -> tuple[str, str]:
        try:
            return ended_how(self.child.status.result(END_S))
        except TimeoutError:
            return "it closed its connection", ""
        except WorkerError as error:
            return str(error), ""


class Child:
    """A process of the nursery. status: as `subprocess` gives it."""

    def __init__(self, tell: Callable[[dict[str, Any]], None]) -> None:
        self.pid: Future[int] = Future()
        self.status: Future[int] = Future()
        self._tell = tell

    def kill(self) -> None:
        """As soon as it is there."""
        self.pid.add_done_callback(lambda pid: self._tell({"kill": pid.result()}))


class Nursery:
    """The driver's end. Whatever happens to it, the workers end with it."""

    def __init__(self, preload: Sequence[str]) -> None:
        # the nursery removes it where it outlives this process
        self._temporary = TemporaryFolder("nursery")
        self.folder = self._temporary.path
        self._control, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._started: dict[int, Child] = {}  # by number, until it has a process
        self._living: dict[int, Child] = {}  # by process
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(
            target=self._keep, args=(preload,), name="nursery", daemon=True
        )
        self._thread.start()

    def start(self, name: Name, environment: dict[str, str], silence_s: float) -> LocalMember:
        number = next(self._numbers)
        log = self.folder / f"{name.role}-{name.rank}-{number}.log"
        child = self._started[number] = Child(self._tell)
        ours, theirs = socket.socketpair()
        with theirs:
            message = json.dumps(
                {"start": number, "log": str(log), "environment": environment}
            ).encode()
            with self._lock:
                socket.send_fds(self._control, [message], [theirs.fileno()])
        return LocalMember(name, ours, silence_s, child, log)

    def close(self) -> None:
        """Blocks until all its processes are gone, and their logs."""
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)
        if self._process is not None:
            self._process.terminate()  # it may be importing
        self._thread.join()
        self._temporary.close()

    def _tell(self, what: dict[str, Any]) -> None:
        # a nursery that is gone has taken all of them along
        with contextlib.suppress(OSError), self._lock:
            self._control.send(json.dumps(what).encode())

    def _keep(self, preload: Sequence[str]) -> None:
        """The thread that starts the nursery lives as long as that: on Linux a process may end with
        its parent's thread."""
        with self._theirs as theirs:
            arguments = [
                json.dumps(sys.path),
                str(theirs.fileno()),
                str(os.getpid()),
                str(self.folder),
                ",".join(preload),
            ]
            process = self._process = subprocess.Popen(
                [sys.executable, "-c", BOOTSTRAP, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=2,  # the driver's is not for whatever an import prints
                pass_fds=(theirs.fileno(),),
                # The numerical libraries that it loads must start no threads: they would not be
                # there after a fork.
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                start_new_session=True,  # Ctrl-C is for the driver
            )
        with contextlib.suppress(OSError):
            while message := self._control.recv(MESSAGE_BYTES):
                self._hear(json.loads(message))
        how, _ = ended_how(process.wait())
        for child in (*self._started.values(), *self._living.values()):
            child.status.set_exception(WorkerError(f"the process that started it ended: {how}"))

    def _hear(self, said: dict[str, int]) -> None:
        if "started" in said:
            child = self._living[said["pid"]] = self._started.pop(said["started"])
            child.pid.set_result(said["pid"])
        else:
            self._living.pop(said["ended"]).status.set_result(said["status"])
