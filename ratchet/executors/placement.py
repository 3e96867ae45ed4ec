"""Accelerator placement: assign accelerators and cores of nodes to the ranks of each role.

The rules are the same for every executor. `ResourceManager` compares the recipe's requests with the
inventory before anything starts. `VirtualCluster` assigns a bundle to each rank, with neighbouring
accelerators next to each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ratchet.errors import ConfigError
from ratchet.executors.config import Strategy


@dataclass(frozen=True)
class Accelerator:
    """An accelerator of a node."""

    index: int  # on its node
    numa: int | None = None  # NUMA node of the nearest memory; None: unknown
    island: int | None = None  # group fully connected by fast links (NVLink); None: unknown
    # Its entry in this process's CUDA_VISIBLE_DEVICES, a number or a UUID; None: the index.
    cuda_name: str | None = None

    @property
    def neighbourhood(self) -> tuple[int, int, int]:
        """Return a sort key that puts neighbours next to each other."""
        return (
            -1 if self.island is None else self.island,
            -1 if self.numa is None else self.numa,
            self.index,
        )


@dataclass(frozen=True)
class ClusterNode:
    """A machine of the cluster with its cores and accelerators."""

    name: str
    cpus: float
    accelerators: tuple[Accelerator, ...] = ()


@dataclass(frozen=True)
class ResourceRequest:
    """The resources that one role requests; all accelerators of a rank are on one node."""

    role: str
    ranks: int
    gpus: int = 0  # accelerators of each rank
    cpus: float = 0.0  # cores of each rank; 0: an equal share of the cores that are left
    # Role whose accelerators and cores this one uses too, in turns, before it takes further ones;
    # None: no sharing.
    colocated_with: str | None = None
    strategy: Strategy | None = None  # None: the cluster's
    accelerator: int | None = None  # index of the one that the role's only rank needs; None: any
    interpreter: str | None = None  # Python that runs the ranks; None: the driver's

    def __str__(self) -> str:
        resources = [f"{self.gpus} accelerator{'s' * (self.gpus != 1)}"] if self.gpus else []
        resources += [f"{self.cpus:g} cores"] if self.cpus else []
        colocation = f" colocated with {self.colocated_with}" if self.colocated_with else ""
        return f"{self.ranks} x {' and '.join(resources) or 'a process'}{colocation}"


@dataclass(frozen=True)
class ResourceBundle:
    """The resources of one rank."""

    node: str
    accelerators: tuple[Accelerator, ...] = ()
    cpus: float = 0.0
    local_rank: int = 0  # among the role's ranks on the node

    @property
    def threads(self) -> int:
        """Return the number of CPU threads for the rank's cores."""
        return max(1, int(self.cpus))

    @property
    def visible_devices(self) -> str:
        """Return the value of CUDA_VISIBLE_DEVICES."""
        return ",".join(
            accelerator.cuda_name or str(accelerator.index) for accelerator in self.accelerators
        )

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment variables of the rank's process, which sees no other accelerator.

        Libraries choose CUDA where they find it, so a rank without accelerators must find none.
        """
        return {"OMP_NUM_THREADS": str(self.threads), "CUDA_VISIBLE_DEVICES": self.visible_devices}


class ResourceManager:
    """An inventory of nodes that assigns their resources to roles."""

    def __init__(self, nodes: Sequence[ClusterNode], strategy: Strategy = "pack") -> None:
        self.nodes = tuple(nodes)
        self.strategy: Strategy = strategy

    def check(self, requests: Sequence[ResourceRequest]) -> None:
        """Raise ConfigError with a table of missing resources if the requests do not fit."""
        self.assign(requests)

    def assign(self, requests: Sequence[ResourceRequest]) -> dict[str, list[ResourceBundle]]:
        """Return each role's bundles that are on no other role's accelerators (`combine`).

        Raises ConfigError as `check` does.
        """
        layout = _Layout(self.nodes)
        # The number of ranks that fit, for each role that does not fit as a whole.
        ranks_that_fit: dict[str, int] = {}
        for request in _partners_first(requests):
            n_assigned = layout.assign_role(request, request.strategy or self.strategy)
            if n_assigned < request.ranks:
                ranks_that_fit[request.role] = n_assigned
        if ranks_that_fit:
            raise ConfigError(self._describe_shortage(requests, ranks_that_fit))
        return layout.share_cores()

    def combine(
        self,
        requests: Sequence[ResourceRequest],
        own_bundles: Mapping[str, Sequence[ResourceBundle]],
    ) -> dict[str, tuple[ResourceBundle, ...]]:
        """Return all bundles of each role by rank, those on a partner's accelerators included.

        own_bundles: what `assign` returns, or what another scheduler chose in its place.
        """
        position_by_node = {node.name: position for position, node in enumerate(self.nodes)}
        bundles: dict[str, tuple[ResourceBundle, ...]] = {}
        for request in _partners_first(requests):
            partner = request.colocated_with
            shared = [] if partner is None else assign_colocated(request, bundles[partner])
            own = own_bundles[request.role]
            bundles[request.role] = sort_bundles([*shared, *own], position_by_node)
        return bundles

    def _describe_shortage(
        self, requests: Sequence[ResourceRequest], ranks_that_fit: Mapping[str, int]
    ) -> str:
        rows = [("role", "requests", "ranks that fit")]
        rows += [
            (
                request.role,
                str(request),
                f"{ranks_that_fit.get(request.role, request.ranks)} of {request.ranks}",
            )
            for request in requests
        ]
        node_descriptions = ", ".join(
            f"{n.name} ({len(n.accelerators)} accelerators, {n.cpus:g} cores)" for n in self.nodes
        )
        return (
            f"the cluster has too few resources for the recipe:\n{format_table(rows)}\n"
            f"The cluster has: {node_descriptions or 'no node'}. Request fewer ranks, colocate "
            "roles (cluster.colocated=true), or add nodes"
        )


class VirtualCluster:
    """The assignment of roles to an inventory. Only colocated roles share resources."""

    def __init__(self, manager: ResourceManager) -> None:
        self.manager = manager
        self._requests: tuple[ResourceRequest, ...] = ()
        self._own_bundles: dict[str, list[ResourceBundle]] = {}
        self._bundles: dict[str, tuple[ResourceBundle, ...]] = {}

    def plan(self, requests: Sequence[ResourceRequest]) -> None:
        """Assign bundles to all roles. Raises ConfigError as `ResourceManager.check` does."""
        self._requests = tuple(requests)
        self._own_bundles = self.manager.assign(requests)
        self._bundles = self.manager.combine(requests, self._own_bundles)

    def find_interpreter(self, role: str) -> str | None:
        """Return the Python that runs a planned role's ranks; None: the driver's."""
        return next(request.interpreter for request in self._requests if request.role == role)

    @property
    def own_requests(self) -> list[ResourceRequest]:
        """Return what the roles request beside the resources that they share with a partner."""
        return [
            replace(request, ranks=len(own), colocated_with=None)
            for request in self._requests
            if (own := self._own_bundles[request.role])
        ]

    def set_bundles(self, role: str, bundles: Sequence[ResourceBundle]) -> None:
        """Replace a role's own bundles by those that an external scheduler, such as Ray, chose.

        The bundles may be in any order. Roles colocated with this one get new bundles too.
        """
        self._own_bundles[role] = list(bundles)
        self._bundles = self.manager.combine(self._requests, self._own_bundles)

    def bundles(self, role: str) -> tuple[ResourceBundle, ...]:
        """Return a planned role's bundles by rank: in inventory order, neighbours together."""
        assert role in self._bundles, (
            f"role '{role}' was not planned: pass its ResourceRequest to `plan`"
        )
        return self._bundles[role]


def _partners_first(requests: Iterable[ResourceRequest]) -> list[ResourceRequest]:
    """Return the requests with colocated roles last: they need their partners' bundles."""
    return sorted(requests, key=lambda request: request.colocated_with is not None)


class _Layout:
    """A partial assignment of roles: the nodes' free resources, and the bundles so far."""

    def __init__(self, nodes: Sequence[ClusterNode]) -> None:
        self._free_resources = [_FreeResources(node) for node in nodes]
        self._requests: dict[str, ResourceRequest] = {}
        self._own_bundles: dict[str, list[ResourceBundle]] = {}

    def assign_role(self, request: ResourceRequest, strategy: Strategy) -> int:
        """Assign as many ranks of a role as fit, and return their number.

        A colocated role's ranks that find no room on its partner's accelerators get free ones.
        """
        if request.role in self._requests:
            raise ConfigError(f"two roles are called '{request.role}'")
        n_shared = 0
        if request.colocated_with is not None:
            partner = self._requests.get(request.colocated_with)
            if partner is None or partner.colocated_with is not None:
                raise ConfigError(
                    f"role '{request.role}' can't be colocated with '{request.colocated_with}', "
                    "which has no accelerators of its own"
                )
            n_shared = len(assign_colocated(request, self._own_bundles[request.colocated_with]))
        self._requests[request.role] = request
        self._own_bundles[request.role] = [
            bundle
            for _ in range(request.ranks - n_shared)
            if (bundle := self._assign_rank(request, strategy)) is not None
        ]
        return n_shared + len(self._own_bundles[request.role])

    def _assign_rank(self, request: ResourceRequest, strategy: Strategy) -> ResourceBundle | None:
        """Assign one rank to a node and return its bundle; None if it fits on no node."""
        candidates = [free for free in self._free_resources if free.fits(request)]
        if strategy == "per_node":
            candidates = [free for free in candidates if not free.rank_count_by_role[request.role]]
        if not candidates:
            return None
        if strategy == "spread":
            return max(
                candidates,
                key=lambda free: (
                    -free.rank_count_by_role[request.role],
                    free.count_fitting_ranks(request),
                ),
            ).assign_rank(request)
        # Prefer a node that already has ranks of the role, then the tightest node with room for all
        # ranks of the role, then the node with most room.
        return max(
            candidates,
            key=lambda free: (
                free.rank_count_by_role[request.role] > 0,
                _make_fit_key(free.count_fitting_ranks(request), request.ranks),
            ),
        ).assign_rank(request)

    def share_cores(self) -> dict[str, list[ResourceBundle]]:
        """Divide each node's free cores among its ranks, and return the own bundles of all roles.

        Ranks that requested no number of cores get equal shares.
        """
        cores_per_rank_by_node = {
            free.node.name: free.cpus / max(1, free.n_ranks_without_cores)
            for free in self._free_resources
        }
        return {
            role: [
                replace(bundle, cpus=bundle.cpus or cores_per_rank_by_node[bundle.node])
                for bundle in bundles
            ]
            for role, bundles in self._own_bundles.items()
        }


def assign_colocated(
    request: ResourceRequest, partner_bundles: Sequence[ResourceBundle]
) -> list[ResourceBundle]:
    """Return a role's bundles on the accelerators of another role (colocation), as many as fit.

    A node's accelerators are regrouped: two ranks with one each make room for one rank with two.
    """
    bundles: list[ResourceBundle] = []
    for node in dict.fromkeys(bundle.node for bundle in partner_bundles):
        node_bundles = [bundle for bundle in partner_bundles if bundle.node == node]
        devices = [device for bundle in node_bundles for device in bundle.accelerators]
        ranks = len(devices) // request.gpus if request.gpus else len(node_bundles)
        cpus = request.cpus or sum(bundle.cpus for bundle in node_bundles) / max(1, ranks)
        bundles += [
            ResourceBundle(node, tuple(devices[i * request.gpus : (i + 1) * request.gpus]), cpus)
            for i in range(ranks)
        ]
    return bundles[: request.ranks]


def sort_bundles(
    bundles: Iterable[ResourceBundle], position_by_node: Mapping[str, int]
) -> tuple[ResourceBundle, ...]:
    """Return bundles sorted by node, neighbours together, with their local ranks.

    position_by_node: position of each node in the inventory, by name.
    """

    def key(bundle: ResourceBundle) -> tuple[int, tuple[int, int, int]]:
        return position_by_node[bundle.node], min(
            (a.neighbourhood for a in bundle.accelerators), default=(0, 0, 0)
        )

    rank_count_by_node: Counter[str] = Counter()  # ranks so far, by node
    ranked: list[ResourceBundle] = []
    for bundle in sorted(bundles, key=key):
        ranked.append(replace(bundle, local_rank=rank_count_by_node[bundle.node]))
        rank_count_by_node[bundle.node] += 1
    return tuple(ranked)


def _make_fit_key(n_fitting: int, ranks: int) -> tuple[bool, int]:
    """Return a node's sort key: largest for the tightest node on which all `ranks` ranks fit.

    If they fit on no node, it is largest for the node with most room. n_fitting: number of ranks
    that fit on the node.
    """
    return (n_fitting >= ranks, -n_fitting if n_fitting >= ranks else n_fitting)


@dataclass
class _FreeResources:
    """The free resources of a node."""

    node: ClusterNode
    accelerators: list[Accelerator] = field(init=False)
    cpus: float = field(init=False)
    rank_count_by_role: Counter[str] = field(default_factory=Counter)  # ranks assigned so far
    n_ranks_without_cores: int = 0  # assigned ranks that requested no number of cores

    def __post_init__(self) -> None:
        self.accelerators = sorted(
            self.node.accelerators, key=lambda accelerator: accelerator.neighbourhood
        )
        self.cpus = self.node.cpus

    def fits(self, request: ResourceRequest) -> bool:
        has_accelerators = len(self._list_eligible(request)) >= request.gpus
        return has_accelerators and self.cpus + 1e-9 >= request.cpus

    def count_fitting_ranks(self, request: ResourceRequest) -> int:
        """Return the number of further ranks of a role that fit."""
        limits = [len(self.accelerators) // request.gpus] if request.gpus else []
        limits += [int((self.cpus + 1e-9) / request.cpus)] if request.cpus else []
        return min(limits, default=int(self.node.cpus) + 1 - self.n_ranks_without_cores)

    def assign_rank(self, request: ResourceRequest) -> ResourceBundle:
        accelerators = self._pick_accelerators(request)
        self.accelerators = [
            accelerator for accelerator in self.accelerators if accelerator not in accelerators
        ]
        self.cpus -= request.cpus
        self.n_ranks_without_cores += not request.cpus
        self.rank_count_by_role[request.role] += 1
        return ResourceBundle(self.node.name, accelerators, request.cpus)

    def _list_eligible(self, request: ResourceRequest) -> list[Accelerator]:
        """Return the free accelerators that a rank may get."""
        return [a for a in self.accelerators if request.accelerator in (None, a.index)]

    def _pick_accelerators(self, request: ResourceRequest) -> tuple[Accelerator, ...]:
        """Return free accelerators of the smallest NUMA node, else island, that has enough.

        If no island has enough, take the accelerators from several, in order.
        """
        eligible, count = self._list_eligible(request), request.gpus
        for group_key in (lambda a: (a.island, a.numa), lambda a: a.island):
            groups: dict[object, list[Accelerator]] = {}
            for accelerator in eligible:
                groups.setdefault(group_key(accelerator), []).append(accelerator)
            large_groups = [group for group in groups.values() if len(group) >= count]
            if large_groups:
                return tuple(min(large_groups, key=len)[:count])
        return tuple(eligible[:count])


def format_table(rows: Sequence[Sequence[str]]) -> str:
    """Return a text table with its columns two spaces apart."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )
