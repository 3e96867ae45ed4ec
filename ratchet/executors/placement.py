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
    # Role whose accelerators and cores this role uses in turns (colocation); None: no sharing.
    beside: str | None = None
    strategy: Strategy | None = None  # None: the cluster's

    def __str__(self) -> str:
        each = [f"{self.gpus} accelerator{'s' * (self.gpus != 1)}"] if self.gpus else []
        each += [f"{self.cpus:g} cores"] if self.cpus else []
        place = f" beside {self.beside}" if self.beside else ""
        return f"{self.ranks} x {' and '.join(each) or 'a process'}{place}"


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
        return ",".join(str(accelerator.index) for accelerator in self.accelerators)


class ResourceManager:
    """An inventory of nodes that assigns their resources to roles."""

    def __init__(self, nodes: Sequence[ClusterNode], strategy: Strategy = "pack") -> None:
        self.nodes = tuple(nodes)
        self.strategy: Strategy = strategy

    def check(self, needs: Sequence[ResourceRequest]) -> None:
        """Raise ConfigError with a table of missing resources if the requests do not fit."""
        self.assign(needs)

    def assign(self, needs: Sequence[ResourceRequest]) -> dict[str, tuple[ResourceBundle, ...]]:
        """Return the bundles of each role, by rank. Raises ConfigError as `check` does."""
        layout = _Layout(self.nodes)
        short: dict[str, int] = {}
        # Colocated roles come last: they need the bundles of the role that they share with.
        for need in sorted(needs, key=lambda need: need.beside is not None):
            placed = layout.place(need, need.strategy or self.strategy)
            if placed < need.ranks:
                short[need.role] = placed
        if short:
            raise ConfigError(self._describe_shortage(needs, short))
        return layout.share_cores()

    def _describe_shortage(self, needs: Sequence[ResourceRequest], short: Mapping[str, int]) -> str:
        rows = [("role", "asks for", "ranks that find room")]
        rows += [
            (need.role, str(need), f"{short.get(need.role, need.ranks)} of {need.ranks}")
            for need in needs
        ]
        offers = ", ".join(
            f"{n.name} ({len(n.accelerators)} accelerators, {n.cpus:g} cores)" for n in self.nodes
        )
        return (
            f"the cluster has too little room for what the recipe asks for:\n{format_table(rows)}\n"
            f"There is: {offers or 'no node'}. Ask for fewer ranks, let roles share (beside), or "
            "add nodes"
        )


class VirtualCluster:
    """The assignment of roles to an inventory. Only roles with `beside` share resources."""

    def __init__(self, manager: ResourceManager) -> None:
        self.manager = manager
        self._bundles: dict[str, tuple[ResourceBundle, ...]] = {}
        self._needs: tuple[ResourceRequest, ...] = ()

    def plan(self, needs: Sequence[ResourceRequest]) -> None:
        """Assign bundles to all roles. Raises ConfigError as `ResourceManager.check` does."""
        self._bundles = self.manager.assign(needs)
        self._needs = tuple(needs)

    def set_bundles(self, role: str, bundles: Sequence[ResourceBundle]) -> None:
        """Replace a planned role's bundles by those that an external scheduler, such as Ray, chose.

        The bundles may be in any order. Roles colocated with this one get new bundles too.
        """
        order = {node.name: position for position, node in enumerate(self.manager.nodes)}
        self._bundles[role] = sort_bundles(bundles, order)
        for need in self._needs:
            if need.beside == role:
                self._bundles[need.role] = sort_bundles(
                    assign_beside(need, self._bundles[role]), order
                )

    def bundles(self, role: str) -> tuple[ResourceBundle, ...]:
        """Return a planned role's bundles by rank: in inventory order, neighbours together."""
        assert role in self._bundles, (
            f"'{role}' is started without a plan: give `plan` its ResourceRequest"
        )
        return self._bundles[role]


class _Layout:
    """A partial assignment: the nodes' free resources and the bundles so far."""

    def __init__(self, nodes: Sequence[ClusterNode]) -> None:
        self._order = {node.name: position for position, node in enumerate(nodes)}
        self._rooms = [_Room(node) for node in nodes]
        self._needs: dict[str, ResourceRequest] = {}
        self._bundles: dict[str, tuple[ResourceBundle, ...]] = {}

    def place(self, need: ResourceRequest, strategy: Strategy) -> int:
        """Assign as many ranks of a role as fit, and return their number."""
        if need.role in self._needs:
            raise ConfigError(f"two roles are called '{need.role}'")
        self._needs[need.role] = need
        if need.beside is None:
            bundles = [
                bundle
                for _ in range(need.ranks)
                if (bundle := self._assign_rank(need, strategy)) is not None
            ]
        elif need.beside in self._bundles:
            bundles = assign_beside(need, self._bundles[need.beside])
        else:
            raise ConfigError(
                f"role '{need.role}' is to be beside '{need.beside}', which has no place of its own"
            )
        self._bundles[need.role] = sort_bundles(bundles, self._order)
        return len(bundles)

    def _assign_rank(self, need: ResourceRequest, strategy: Strategy) -> ResourceBundle | None:
        rooms = [room for room in self._rooms if room.fits(need)]
        if strategy == "per_node":
            rooms = [room for room in rooms if not room.ranks[need.role]]
        if not rooms:
            return None
        if strategy == "spread":
            return max(rooms, key=lambda room: (-room.ranks[need.role], room.space(need))).take(
                need
            )
        # Prefer a node that already has ranks of the role, then the fullest node with room for all
        # ranks of the role, then the emptiest node.
        return max(
            rooms,
            key=lambda room: (room.ranks[need.role] > 0, _rate_room(room.space(need), need.ranks)),
        ).take(need)

    def share_cores(self) -> dict[str, tuple[ResourceBundle, ...]]:
        """Divide each node's free cores among its ranks, and return the bundles of all roles.

        Ranks that requested no number of cores get equal shares.
        """
        share = {room.node.name: room.cpus / max(1, room.open_ranks) for room in self._rooms}
        for need in self._needs.values():
            if need.beside is not None:
                bundles = assign_beside(need, self._bundles[need.beside])
            elif need.cpus:
                bundles = self._bundles[need.role]
            else:
                bundles = [
                    replace(bundle, cpus=share[bundle.node]) for bundle in self._bundles[need.role]
                ]
            self._bundles[need.role] = sort_bundles(bundles, self._order)
        return self._bundles


def assign_beside(need: ResourceRequest, others: Sequence[ResourceBundle]) -> list[ResourceBundle]:
    """Return a role's bundles on the accelerators of another role (colocation).

    A node's accelerators are regrouped: two ranks with one each make room for one rank with two.
    """
    bundles: list[ResourceBundle] = []
    for node in dict.fromkeys(bundle.node for bundle in others):
        on_node = [bundle for bundle in others if bundle.node == node]
        devices = [device for bundle in on_node for device in bundle.accelerators]
        ranks = len(devices) // need.gpus if need.gpus else len(on_node)
        cpus = need.cpus or sum(bundle.cpus for bundle in on_node) / max(1, ranks)
        bundles += [
            ResourceBundle(node, tuple(devices[i * need.gpus : (i + 1) * need.gpus]), cpus)
            for i in range(ranks)
        ]
    return bundles[: need.ranks]


def sort_bundles(
    bundles: Iterable[ResourceBundle], order: Mapping[str, int]
) -> tuple[ResourceBundle, ...]:
    """Return bundles sorted by node, neighbours together, with their local ranks.

    order: position of each node, by name.
    """

    def key(bundle: ResourceBundle) -> tuple[int, tuple[int, int, int]]:
        return order[bundle.node], min(
            (a.neighbourhood for a in bundle.accelerators), default=(0, 0, 0)
        )

    counts: Counter[str] = Counter()  # ranks so far, by node
    ranked: list[ResourceBundle] = []
    for bundle in sorted(bundles, key=key):
        ranked.append(replace(bundle, local_rank=counts[bundle.node]))
        counts[bundle.node] += 1
    return tuple(ranked)


def _rate_room(space: int, ranks: int) -> tuple[bool, int]:
    return (space >= ranks, -space if space >= ranks else space)


@dataclass
class _Room:
    """The free resources of a node."""

    node: ClusterNode
    free: list[Accelerator] = field(init=False)
    cpus: float = field(init=False)
    ranks: Counter[str] = field(default_factory=Counter)
    open_ranks: int = 0

    def __post_init__(self) -> None:
        self.free = sorted(
            self.node.accelerators, key=lambda accelerator: accelerator.neighbourhood
        )
        self.cpus = self.node.cpus

    def fits(self, need: ResourceRequest) -> bool:
        return len(self.free) >= need.gpus and self.cpus + 1e-9 >= need.cpus

    def space(self, need: ResourceRequest) -> int:
        """Return the number of further ranks of a role that fit."""
        counts = [len(self.free) // need.gpus] if need.gpus else []
        counts += [int((self.cpus + 1e-9) / need.cpus)] if need.cpus else []
        return min(counts, default=int(self.node.cpus) + 1 - self.open_ranks)

    def take(self, need: ResourceRequest) -> ResourceBundle:
        taken = self._pick_accelerators(need.gpus)
        self.free = [accelerator for accelerator in self.free if accelerator not in taken]
        self.cpus -= need.cpus
        self.open_ranks += not need.cpus
        self.ranks[need.role] += 1
        return ResourceBundle(self.node.name, taken, need.cpus)

    def _pick_accelerators(self, count: int) -> tuple[Accelerator, ...]:
        """Return free accelerators of the smallest NUMA node, else island, that has enough.

        If no island has enough, take the accelerators from several, in order.
        """
        for part in (lambda a: (a.island, a.numa), lambda a: a.island):
            parts: dict[object, list[Accelerator]] = {}
            for accelerator in self.free:
                parts.setdefault(part(accelerator), []).append(accelerator)
            enough = [group for group in parts.values() if len(group) >= count]
            if enough:
                return tuple(min(enough, key=len)[:count])
        return tuple(self.free[:count])


def format_table(rows: Sequence[Sequence[str]]) -> str:
    """Return a text table with its columns two spaces apart."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )
