"""Groups as actors of Ray: on several machines, or on this one. Only this and `ray_actor.py` import
Ray."""

from __future__ import annotations

import logging
import os
import queue
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

from ratchet.errors import ConfigError, MissingDependency, WorkerError
from ratchet.executors.config import RayClusterConfig
from ratchet.executors.devices import this_node
from ratchet.executors.placement import (
    Accelerator,
    Bundle,
    Need,
    Node,
    ResourceManager,
    VirtualCluster,
)
from ratchet.executors.protocol import Kind, Parcel
from ratchet.executors.signals import spares_programs
from ratchet.executors.worker import Place
from ratchet.executors.worker_group import WorkerGroup
from ratchet.executors.worker_handle import Member, Name
from ratchet.executors.worker_main import BEAT_S
from ratchet.observe.stall_report import waiting
from ratchet.utils.temp_dirs import TemporaryFolder

# before it is imported: nothing is reported to anybody
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
try:
    import ray
    from ray.exceptions import RayActorError, RayError
    from ray.util.placement_group import (
        PlacementGroup,
        placement_group,
        placement_group_table,
        remove_placement_group,
    )
    from ray.util.scheduling_strategies import (
        NodeAffinitySchedulingStrategy,
        PlacementGroupSchedulingStrategy,
    )
except ModuleNotFoundError as missing:
    raise MissingDependency("ray", extra="ray", needed_for="cluster.kind: ray") from missing

from ratchet.executors.ray_actor import (
    ACTOR,
    boxed,
    devices_here,
    ended_process,
    last_lines,
    opened,
)

log = logging.getLogger(__name__)

MIB = 2**20
ROOM_S = 120.0  # for other jobs of the cluster to make room
REACH_S = 10.0  # for a cluster to answer
LOOK_S = 5.0  # for a node to say what its dead actor wrote
MAX_PARENT = 18  # bytes of a path: a socket of Ray has 85 more, of at most 103
STRATEGIES = {"pack": "PACK", "spread": "SPREAD", "per_node": "STRICT_SPREAD"}


class RayExecutor:
    """Ray is started, or connected to, by `plan`. What was there before the executor is left as it
    was."""

    def __init__(self, config: RayClusterConfig, *, threads: int, device: str) -> None:
        self.config, self.threads, self.device = config, threads, device
        self._manager: ResourceManager | None = None
        self._cluster: VirtualCluster | None = None
        self._room: list[PlacementGroup] = []
        self._groups: list[WorkerGroup] = []
        self._started = False
        self._temporary: TemporaryFolder | None = None  # of a Ray that was started here

    def spawn(self, factory: Callable[..., Any], /, **arguments: Any) -> Any:
        """A component of this process."""
        return factory(**arguments)

    def plan(self, needs: Sequence[Need]) -> None:
        """Says what the groups will need, all of them, before the first is started, and takes that
        room. Raises ConfigError with what is missing, and where the room is there and others have
        it."""
        self._inventory().check(needs)
        self._connect()
        self.release()
        # By now Ray has named the nodes itself.
        self._cluster = VirtualCluster(self._inventory())
        self._cluster.plan(needs)
        for need in needs:
            if need.beside is None:
                self._cluster.settle(need.role, self._taken(need))

    def group(self, role: str, rank: int | None = None) -> WorkerGroup:
        """Starts the actors of a planned role, or of one rank of it. Does not wait for them: the
        first call does."""
        assert self._cluster is not None, "a group before the plan"
        bundles = self._cluster.bundles(role)
        hosts = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        ports = "{}-{}".format(*self.config.ports) if self.config.ports else ""
        places, members = [], []
        for number in range(len(bundles)) if rank is None else (rank,):
            bundle = bundles[number]
            host = hosts[bundle.node]
            device = "cuda:0" if bundle.accelerators else "cpu"
            places.append(
                Place(
                    role,
                    number,
                    len(bundles),
                    bundle.local_rank,
                    host,
                    f"{host}:{ports}",
                    bundle.threads,
                    device,
                )
            )
            name = Name(role, number, len(bundles), host)
            members.append(RayMember(name, bundle, self.config.silence_s, _environment(bundle)))
        group = WorkerGroup(places, members, timeout_s=self.config.timeout_s)
        self._groups.append(group)
        return group

    def release(self) -> None:
        """The room of the plan."""
        for room in self._room:
            remove_placement_group(room)
        self._room = []

    def close(self) -> None:
        """Ends all groups; and Ray, where it was started here."""
        for group in self._groups:
            group.close()
        self._groups = []
        if ray.is_initialized():
            self.release()
        if self._started:
            ray.shutdown()
            self._started = False
        if self._temporary is not None:
            self._temporary.close()
            self._temporary = None

    # --- Ray itself

    def _inventory(self) -> ResourceManager:
        if self.config.address is None and not ray.is_initialized():
            return ResourceManager(
                [self._limited(this_node(self.threads, self.device))], self.config.strategy
            )
        self._connect()
        nodes = [self._limited(_node(said)) for said in ray.nodes() if said["Alive"]]
        wanted = self.config.nodes
        if len(nodes) < wanted:
            raise ConfigError(
                f"cluster.nodes={wanted}, and the Ray cluster has {len(nodes)}: start more, or ask "
                "for fewer"
            )
        nodes.sort(key=lambda node: (-len(node.accelerators), -node.cpus))
        return ResourceManager(nodes[:wanted], self.config.strategy)

    def _limited(self, node: Node) -> Node:
        gpus, cpus = self.config.gpus_per_node, self.config.cpus_per_node
        for what, asked, there in (
            ("gpus", gpus, len(node.accelerators)),
            ("cpus", cpus, node.cpus),
        ):
            if asked is not None and asked > there:
                raise ConfigError(
                    f"cluster.{what}_per_node={asked:g}, and node {node.name} has {there:g}: ask "
                    "for fewer"
                )
        return replace(node, cpus=cpus or node.cpus, accelerators=node.accelerators[:gpus])

    def _connect(self) -> None:
        """A new Ray listens with its token authentication left on; its dashboard does not start."""
        if ray.is_initialized():
            return
        self._started = True
        quiet: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
        if self.config.address is not None:
            _reach(self.config.address)
        try:
            if self.config.address is not None:
                ray.init(address=self.config.address, **quiet)
                return
            node = self._limited(this_node(self.threads, self.device))
            self._temporary = _temporary()
            with spares_programs():
                ray.init(
                    num_cpus=max(1, round(node.cpus)),
                    num_gpus=len(node.accelerators),
                    object_store_memory=self.config.object_store_mib * MIB,
                    include_dashboard=False,
                    runtime_env={
                        "env_vars": {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
                    },
                    _temp_dir=self._temporary and str(self._temporary.path),
                    **quiet,
                )
        except (ConnectionError, RuntimeError, ValueError, RayError) as error:
            where = (
                f"the Ray cluster at {self.config.address} can't be reached"
                if self.config.address
                else "Ray does not start"
            )
            raise ConfigError(f"{where}: {error}") from error

    # --- room on nodes

    def _taken(self, need: Need) -> list[Bundle]:
        """Bundles of a placement group, with the nodes and accelerators that Ray gave them."""
        assert self._cluster is not None
        cpus = min(bundle.cpus for bundle in self._cluster.bundles(need.role))
        asked = {"CPU": max(0.01, cpus)} | ({"GPU": need.gpus} if need.gpus else {})
        strategy = need.strategy or self.config.strategy
        room = placement_group([asked] * need.ranks, strategy=STRATEGIES[strategy])
        self._room.append(room)
        with waiting("driver", f"room for {need.role}", "Ray", ROOM_S):
            there = room.wait(ROOM_S)
        if not there:
            free = ", ".join(
                f"{count:g} {name}"
                for name, count in sorted(ray.available_resources().items())
                if name in asked
            )
            raise ConfigError(
                f"role '{need.role}' asks for {need}, which the cluster has, and other jobs use: "
                f"free are {free or 'none'}. "
                "Wait for them, or ask for less"
            )
        nodes: Mapping[int, str] = placement_group_table(room)["bundles_to_node_id"]
        devices = self._devices(room, need) if need.gpus else [()] * need.ranks
        return [
            Bundle(nodes[i], tuple(map(Accelerator, devices[i])), cpus) for i in range(need.ranks)
        ]

    def _devices(self, room: PlacementGroup, need: Need) -> list[Sequence[int]]:
        return ray.get(
            [
                devices_here.options(
                    num_gpus=need.gpus,
                    scheduling_strategy=PlacementGroupSchedulingStrategy(
                        room, placement_group_bundle_index=index
                    ),
                ).remote()
                for index in range(need.ranks)
            ],
            timeout=ROOM_S,
        )


def _reach(address: str) -> None:
    """Raises ConfigError where nothing listens: Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if not port.isdecimal():  # "auto"
        return
    try:
        socket.create_connection((host.rpartition("/")[2], int(port)), REACH_S).close()
    except OSError as error:
        raise ConfigError(
            f"cluster.address={address}: nothing answers there ({error}): start Ray there (ray "
            "start --head), or remove it "
            "for a Ray of this machine"
        ) from error


def _temporary() -> TemporaryFolder | None:
    """Make the folder of a new Ray's logs and sockets, which Ray itself never removes; None where
    paths would be too long."""
    for place in (os.environ.get("RAY_TMPDIR") or tempfile.gettempdir(), "/tmp"):
        if len(os.fsencode(place)) <= MAX_PARENT and os.access(place, os.W_OK):
            return TemporaryFolder("ray", place)
    return None


def _environment(bundle: Bundle) -> dict[str, str]:
    seen = {"CUDA_VISIBLE_DEVICES": bundle.visible} if bundle.accelerators else {}
    return {"OMP_NUM_THREADS": str(bundle.threads), **seen}


def _node(said: Mapping[str, Any]) -> Node:
    has = said["Resources"]
    return Node(
        said["NodeID"], has.get("CPU", 0.0), tuple(map(Accelerator, range(int(has.get("GPU", 0)))))
    )


class RayMember(Member):
    """Its room is the placement group's: the actor itself asks for nothing but the node. What Ray
    says is dealt with in a thread of its own: in Ray's, which brings it, most calls of Ray would
    wait for themselves."""

    def __init__(
        self, name: Name, bundle: Bundle, silence_s: float, environment: Mapping[str, str]
    ) -> None:
        super().__init__(name, silence_s)
        self._jobs: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, name=f"{name.role}-{name.rank}", daemon=True).start()
        self._here = NodeAffinitySchedulingStrategy(bundle.node, soft=False)
        self._actor = ACTOR.options(
            scheduling_strategy=self._here, runtime_env={"env_vars": dict(environment)}
        ).remote()
        self._logs = ""
        # whether it is being asked for a sign of life, and the time since the last
        self._asked, self._passed_s = True, 0.0
        self._on(self._actor.greet.remote(), self._welcome)

    def check(self, passed_s: float) -> None:
        super().check(passed_s)
        self._passed_s += passed_s
        if not self._asked and self._passed_s >= BEAT_S:
            self._asked, self._passed_s = True, 0.0
            self._on(self._actor.beat.remote(), self._alive)

    def share(self, request: Parcel) -> Any:
        return ray.put(boxed(request))

    def close(self) -> None:
        self.closing = True
        self._on(self._actor.close.remote(), lambda _: self._left())

    def kill(self) -> None:
        self._jobs.put(self._kill)
        self._jobs.put(None)

    def tail(self) -> str:
        if not self._logs:
            return ""
        try:
            return ray.get(
                last_lines.options(scheduling_strategy=self._here).remote(self._logs),
                timeout=LOOK_S,
            )
        except RayError:  # the node is gone too
            return ""

    def _send(self, number: int, request: Any) -> None:
        box = boxed(request) if isinstance(request, Parcel) else request
        self._on(
            self._actor.answer.remote(box),
            lambda said: self._take(number, (Kind(said[0]), opened(said[1]))),
        )

    def _on(self, reference: Any, then: Callable[[Any], object]) -> None:
        """Then do so with what the actor answers."""

        def take(future: Future[Any]) -> None:
            error = future.exception()
            if error is None:
                self._heard()
                then(future.result())
            elif not isinstance(error, RayActorError):
                self.give_up(WorkerError(f"{self.name} can't be called: {error}"))
            elif not self.gone.done():
                self._end(None if self.closing else self.died(f"died ({_reason(error)})"))
                self.kill()

        reference.future().add_done_callback(lambda future: self._jobs.put(partial(take, future)))

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def _kill(self) -> None:
        """By its node too: a process that is stopped does not hear Ray."""
        if not ray.is_initialized():
            return
        ray.kill(self._actor)
        if self.pid is not None:
            ended_process.options(scheduling_strategy=self._here).remote(self.pid)

    def _welcome(self, said: Mapping[str, Any]) -> None:
        self._logs, self._asked = said["log"], False
        try:
            self._greet(said)
        except WorkerError as error:
            self.give_up(error)

    def _alive(self, _: Any) -> None:
        self._asked = False

    def _left(self) -> None:
        self._end(None)
        self.kill()


def _reason(error: BaseException) -> str:
    """The part of Ray's message that says how it ended, without its advice."""
    detail = str(error).partition("Worker exit detail: ")[2] or str(error).splitlines()[0]
    return (
        detail.partition(" Some common causes")[0]
        .partition(" There are some potential")[0]
        .strip()
        .rstrip(".")
    )
