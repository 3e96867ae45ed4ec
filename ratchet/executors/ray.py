"""Run worker groups as Ray actors, on this machine or on several.

Only this module, `ray_handle.py` and `ray_actor.py` import Ray.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import tempfile
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ratchet.errors import ConfigError, MissingDependency, NoRoomError, WorkerError
from ratchet.executors.config import RayClusterConfig
from ratchet.executors.devices import find_node
from ratchet.executors.placement import (
    Accelerator,
    ClusterNode,
    ResourceBundle,
    ResourceManager,
    ResourceRequest,
    VirtualCluster,
)
from ratchet.executors.signals import shield_programs
from ratchet.executors.worker import WorkerPlace
from ratchet.executors.worker_group import WorkerGroup
from ratchet.executors.worker_handle import WorkerName
from ratchet.observe.stall_report import waiting
from ratchet.utils.temp_dirs import TemporaryFolder

# Set before Ray is imported, so that it sends no usage reports.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
try:
    import ray
    from ray.exceptions import RayError
    from ray.util.placement_group import (
        PlacementGroup,
        placement_group,
        placement_group_table,
        remove_placement_group,
    )
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ModuleNotFoundError as missing:
    raise MissingDependency("ray", extra="ray", needed_for="cluster.kind: ray") from missing

from ratchet.executors.ray_actor import find_assigned_devices
from ratchet.executors.ray_handle import RayWorkerHandle

log = logging.getLogger(__name__)

MIB = 2**20
# Longest waits, in seconds:
ROOM_S = 120.0  # until other jobs of the cluster free resources
MOVE_S = 2.0  # until Ray has moved the bundles of a lost node
REACH_S = 10.0  # until a cluster answers
# Maximum length of the parent folder's path. A socket's path may have 103 bytes, and Ray needs 85.
MAX_PARENT_BYTES = 18
STRATEGIES = {"pack": "PACK", "spread": "SPREAD", "per_node": "STRICT_SPREAD"}


class RayExecutor:
    """The executor on Ray. `plan` starts Ray or connects to it.

    `close` ends Ray only if this executor started it.
    """

    def __init__(self, config: RayClusterConfig, *, threads: int, device: str) -> None:
        self.config = config
        self.threads = threads
        self.device = device
        self._manager: ResourceManager | None = None
        self._cluster: VirtualCluster | None = None
        self._placements: dict[str, PlacementGroup] = {}  # by role
        # Bundles of ranks whose planned node was lost.
        self._moved_bundles: dict[tuple[str, int], ResourceBundle] = {}
        self._groups: list[WorkerGroup] = []
        self._owns_connection = False
        # The folder of a Ray that this executor has started.
        self._temporary_folder: TemporaryFolder | None = None

    def plan(self, requests: Sequence[ResourceRequest]) -> None:
        """Reserve the resources of all roles, before the first group is started.

        Raises ConfigError if the cluster lacks resources, or if other jobs use them.
        """
        self._take_inventory().check(requests)
        self._connect()
        self.release()
        # Take the inventory again: nodes have Ray's names only after connecting.
        self._cluster = VirtualCluster(self._take_inventory())
        self._cluster.plan(requests)
        for request in self._cluster.own_requests:
            self._cluster.set_bundles(request.role, self._allocate(request))
        for request in requests:
            n_placed = len(self._cluster.bundles(request.role))
            if n_placed < request.ranks:  # the partner's ranks lie on other nodes than planned
                raise ConfigError(
                    f"Ray's nodes for '{request.colocated_with}' have room for {n_placed} of "
                    f"{request.role}'s {request}. Set cluster.strategy=pack, or "
                    "cluster.colocated=false"
                )

    def group(self, role: str, rank: int | None = None) -> WorkerGroup:
        """Start the actors of a planned role, or of one rank of it.

        It does not wait until they have started; the first call does. A rank whose node was lost
        starts on the node that Ray has found for it.

        Raises:
            NoRoomError: The node of `rank` was lost, and no other has room for it.
        """
        assert self._cluster is not None, "`plan` must be called before `group`"
        bundles = [
            self._moved_bundles.get((role, number), bundle)
            for number, bundle in enumerate(self._cluster.bundles(role))
        ]
        hosts = {n["NodeID"]: n["NodeManagerAddress"] for n in ray.nodes() if n["Alive"]}
        ports = "{}-{}".format(*self.config.ports) if self.config.ports else ""
        interpreter = self._cluster.find_interpreter(role)
        places, members = [], []
        for rank_number in range(len(bundles)) if rank is None else (rank,):
            bundle = bundles[rank_number]
            if bundle.node not in hosts:
                bundle = self._find_other_bundle(role, rank_number, bundles, hosts)
                self._moved_bundles[role, rank_number] = bundle
            host = hosts[bundle.node]
            device = "cuda:0" if bundle.accelerators else "cpu"
            places.append(
                WorkerPlace(
                    role,
                    rank_number,
                    len(bundles),
                    bundle.local_rank,
                    host,
                    f"{host}:{ports}",
                    bundle.threads,
                    device,
                )
            )
            name = WorkerName(role, rank_number, len(bundles), host)
            members.append(RayWorkerHandle(name, bundle, self.config.silence_s, interpreter))
        group = WorkerGroup(places, members, timeout_s=self.config.timeout_s)
        self._groups.append(group)
        return group

    def release(self) -> None:
        """Free the resources of the plan."""
        for placement in self._placements.values():
            remove_placement_group(placement)
        self._placements, self._moved_bundles = {}, {}

    def close(self) -> None:
        """End all groups and disconnect from Ray. End Ray itself if this executor started it."""
        for group in self._groups:
            group.close()
        self._groups = []
        if ray.is_initialized():
            self.release()
        if self._owns_connection:
            ray.shutdown()
            self._owns_connection = False
        if self._temporary_folder is not None:
            self._temporary_folder.close()
            self._temporary_folder = None

    # --- Ray itself

    def _take_inventory(self) -> ResourceManager:
        """Return the nodes that the run may use: this machine, if Ray is yet to be started here."""
        if self.config.address is None and not ray.is_initialized():
            return ResourceManager(
                [self._limit_resources(find_node(self.threads, self.device))], self.config.strategy
            )
        self._connect()
        nodes = [
            self._limit_resources(_make_node(entry)) for entry in ray.nodes() if entry["Alive"]
        ]
        count = self.config.nodes
        if len(nodes) < count:
            raise ConfigError(
                f"cluster.nodes={count}, but the Ray cluster has {len(nodes)}. Set "
                f"cluster.nodes={len(nodes)}, or start more nodes."
            )
        nodes.sort(key=lambda node: (-len(node.accelerators), -node.cpus))
        return ResourceManager(nodes[:count], self.config.strategy)

    def _limit_resources(self, node: ClusterNode) -> ClusterNode:
        """Return a node with the resources that the run may use."""
        gpus = self.config.gpus_per_node
        cpus = self.config.cpus_per_node
        for kind, requested, available in (
            ("gpus", gpus, len(node.accelerators)),
            ("cpus", cpus, node.cpus),
        ):
            if requested is not None and requested > available:
                raise ConfigError(
                    f"cluster.{kind}_per_node={requested:g}, but node {node.name} has "
                    f"{available:g}. Set cluster.{kind}_per_node={available:g}."
                )
        return replace(node, cpus=cpus or node.cpus, accelerators=node.accelerators[:gpus])

    def _connect(self) -> None:
        """Start Ray or connect to it.

        A new Ray keeps its token authentication on, and starts no dashboard.
        """
        if ray.is_initialized():
            return
        self._owns_connection = True
        quiet_options: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
        if self.config.address is not None:
            _check_reachable(self.config.address)
        try:
            if self.config.address is not None:
                ray.init(address=self.config.address, **quiet_options)
                return
            node = self._limit_resources(find_node(self.threads, self.device))
            self._temporary_folder = _create_temporary_folder()
            with shield_programs():
                ray.init(
                    num_cpus=max(1, round(node.cpus)),
                    num_gpus=len(node.accelerators),
                    object_store_memory=self.config.object_store_mib * MIB,
                    include_dashboard=False,
                    runtime_env={
                        "env_vars": {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
                    },
                    _temp_dir=self._temporary_folder and str(self._temporary_folder.path),
                    **quiet_options,
                )
        except (ConnectionError, RuntimeError, ValueError, RayError) as error:
            failure = (
                f"the Ray cluster at {self.config.address} can't be reached"
                if self.config.address
                else "Ray does not start"
            )
            raise ConfigError(f"{failure}: {error}") from error
        # Ray raises a bare Exception where its processes take too long to start.
        except Exception as error:
            raise WorkerError(f"Ray does not start: {error}") from error

    # --- resources of nodes

    def _allocate(self, request: ResourceRequest) -> list[ResourceBundle]:
        """Create a role's placement group and return its bundles.

        The bundles have the nodes and accelerators that Ray assigned.
        """
        assert self._cluster is not None
        cpus = min(bundle.cpus for bundle in self._cluster.bundles(request.role))
        resources = {"CPU": max(0.01, cpus)} | ({"GPU": request.gpus} if request.gpus else {})
        strategy = request.strategy or self.config.strategy
        placement = placement_group([resources] * request.ranks, strategy=STRATEGIES[strategy])
        self._placements[request.role] = placement
        with waiting("driver", f"room for {request.role}", "Ray", ROOM_S):
            is_ready = placement.wait(ROOM_S)
        if not is_ready:
            free = ", ".join(
                f"{count:g} {name}"
                for name, count in sorted(ray.available_resources().items())
                if name in resources
            )
            raise ConfigError(
                f"role '{request.role}' needs {request}; the cluster has these, but other jobs "
                f"use them (free: {free or 'none'}). Wait for those jobs, or request less"
            )
        return _read_bundles(placement, request.gpus, cpus)

    def _find_other_bundle(
        self,
        role: str,
        rank: int,
        bundles: Sequence[ResourceBundle],
        live_nodes: Container[str],
    ) -> ResourceBundle:
        """Return a bundle on a live node for a rank whose node was lost.

        Ray moves the bundles of a lost node to others by itself, or to a node that joins later.

        bundles: those of all ranks of the role.
        """
        placement = self._placements.get(role)
        if placement is None or not placement.wait(MOVE_S):
            raise NoRoomError(
                f"the node of {role} rank {rank} was lost, and no other node has room for it"
            )
        # Ranks without accelerators share places: (a node, ()) occurs once for each of them.
        n_unseen = Counter((bundle.node, bundle.accelerators) for bundle in bundles)
        lost = bundles[rank]
        for candidate in _read_bundles(placement, len(lost.accelerators), lost.cpus):
            place = (candidate.node, candidate.accelerators)
            n_unseen[place] -= 1
            if candidate.node in live_nodes and n_unseen[place] < 0:
                return candidate
        raise NoRoomError(f"the node of {role} rank {rank} was lost, and Ray gave it no other")


def _read_bundles(placement: PlacementGroup, gpus: int, cpus: float) -> list[ResourceBundle]:
    """Return a placement group's bundles, with the nodes and accelerators that Ray assigned."""
    nodes: Mapping[int, str] = placement_group_table(placement)["bundles_to_node_id"]
    devices: list[Sequence[int]] = [()] * len(nodes)
    if gpus:
        devices = ray.get(
            [
                find_assigned_devices.options(
                    num_gpus=gpus,
                    scheduling_strategy=PlacementGroupSchedulingStrategy(
                        placement, placement_group_bundle_index=index
                    ),
                ).remote()
                for index in range(len(nodes))
            ],
            timeout=ROOM_S,
        )
    return [
        ResourceBundle(nodes[i], tuple(map(Accelerator, devices[i])), cpus)
        for i in range(len(nodes))
    ]


def _check_reachable(address: str) -> None:
    """Raise ConfigError if nothing listens at an address; Ray itself would retry for minutes."""
    host, _, port = address.rpartition(":")
    if not port.isdecimal():  # "auto"
        return
    try:
        socket.create_connection((host.rpartition("/")[2], int(port)), REACH_S).close()
    except OSError as error:
        raise ConfigError(
            f"cluster.address={address}: nothing answers there ({error}): start Ray there (ray "
            "start --head), or remove the key to start Ray on this machine"
        ) from error


def _create_temporary_folder() -> TemporaryFolder | None:
    """Create the folder of a new Ray's logs and sockets, which Ray itself never removes.

    Returns None if the paths of its sockets would be too long.
    """
    for parent in (os.environ.get("RAY_TMPDIR") or tempfile.gettempdir(), "/tmp"):
        if len(os.fsencode(parent)) <= MAX_PARENT_BYTES and os.access(parent, os.W_OK):
            return TemporaryFolder("ray", parent)
    return None


def _make_node(entry: Mapping[str, Any]) -> ClusterNode:
    """Return a node from an entry of `ray.nodes()`."""
    resources = entry["Resources"]
    accelerators = tuple(map(Accelerator, range(int(resources.get("GPU", 0)))))
    return ClusterNode(entry["NodeID"], resources.get("CPU", 0.0), accelerators)
