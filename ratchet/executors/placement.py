"""What nodes offer, whether that is enough, and which rank gets what.

The same rules for every executor: `ResourceManager` compares what a recipe's roles ask for with the
inventory before anything starts; `VirtualCluster` lays their ranks out as bundles, neighbours
beside each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ratchet.errors import ConfigError
from ratchet.executors.config import Strategy


@dataclass(frozen=True)
class Accelerator:
    """index: on its node. numa: the memory that it is near to. island: accelerators of one have a
    fast link, as NVLink, from each to each. None: not known."""

    index: int
    numa: int | None = None
    island: int | None = None

    @property
    def neighbourhood(self) -> tuple[int, int, int]:
        """Sorts neighbours beside each other."""
        return (
            -1 if self.island is None else self.island,
            -1 if self.numa is None else self.numa,
            self.index,
        )


@dataclass(frozen=True)
class Node:
    name: str
    cpus: float
    accelerators: tuple[Accelerator, ...] = ()


@dataclass(frozen=True)
class Need:
    """What one role asks for: `ranks` times so many accelerators, all of a rank on one node, and
    cores.

    cpus: of each rank; 0: an equal share of what others leave. beside: the role whose accelerators
    and cores it shares, by turns; None: its own. strategy: None: the cluster's.
    """

    role: str
    ranks: int
    gpus: int = 0
    cpus: float = 0.0
    beside: str | None = None
    strategy: Strategy | None = None

    def __str__(self) -> str:
        each = [f"{self.gpus} accelerator{'s' * (self.gpus != 1)}"] if self.gpus else []
        each += [f"{self.cpus:g} cores"] if self.cpus else []
        place = f" beside {self.beside}" if self.beside else ""
        return f"{self.ranks} x {' and '.join(each) or 'a process'}{place}"


@dataclass(frozen=True)
class Bundle:
    """What one rank has. local_rank: among its role's on the node."""

    node: str
    accelerators: tuple[Accelerator, ...] = ()
    cpus: float = 0.0
    local_rank: int = 0

    @property
    def threads(self) -> int:
        return max(1, int(self.cpus))

    @property
    def visible(self) -> str:
        """For CUDA_VISIBLE_DEVICES."""
        return ",".join(str(accelerator.index) for accelerator in self.accelerators)


class ResourceManager:
    """The inventory."""

    def __init__(self, nodes: Sequence[Node], strategy: Strategy = "pack") -> None:
        self.nodes = tuple(nodes)
        self.strategy: Strategy = strategy

    def check(self, needs: Sequence[Need]) -> None:
        """Raises ConfigError with a table of what is missing."""
        self.laid_out(needs)

    def laid_out(self, needs: Sequence[Need]) -> dict[str, tuple[Bundle, ...]]:
        """The bundles of each role, by rank. Raises ConfigError as `check`."""
        layout = _Layout(self.nodes)
        short: dict[str, int] = {}
        # those that others are beside come first
        for need in sorted(needs, key=lambda need: need.beside is not None):
            placed = layout.place(need, need.strategy or self.strategy)
            if placed < need.ranks:
                short[need.role] = placed
        if short:
            raise ConfigError(self._lacking(needs, short))
        return layout.shared_out()

    def _lacking(self, needs: Sequence[Need], short: Mapping[str, int]) -> str:
        rows = [("role", "asks for", "ranks that find room")]
        rows += [
            (need.role, str(need), f"{short.get(need.role, need.ranks)} of {need.ranks}")
            for need in needs
        ]
        offers = ", ".join(
            f"{n.name} ({len(n.accelerators)} accelerators, {n.cpus:g} cores)" for n in self.nodes
        )
        return (
            f"the cluster has too little room for what the recipe asks for:\n{aligned(rows)}\n"
            f"There is: {offers or 'no node'}. Ask for fewer ranks, let roles share (beside), or "
            "add nodes"
        )


class VirtualCluster:
    """Ranks of roles on an inventory. Roles that say so share bundles, others never do."""

    def __init__(self, manager: ResourceManager) -> None:
        self.manager = manager
        self._bundles: dict[str, tuple[Bundle, ...]] = {}
        self._needs: tuple[Need, ...] = ()

    def plan(self, needs: Sequence[Need]) -> None:
        """Raises ConfigError with a table of what is missing."""
        self._bundles = self.manager.laid_out(needs)
        self._needs = tuple(needs)

    def settle(self, role: str, bundles: Sequence[Bundle]) -> None:
        """For a scheduler that decides itself where ranks go: what it gave a role of the plan, in
        any order. Roles beside it follow."""
        order = {node.name: position for position, node in enumerate(self.manager.nodes)}
        self._bundles[role] = in_order(bundles, order)
        for need in self._needs:
            if need.beside == role:
                self._bundles[need.role] = in_order(beside(need, self._bundles[role]), order)

    def bundles(self, role: str) -> tuple[Bundle, ...]:
        """By rank: nodes in the order of the inventory, on each of them neighbours in a row."""
        assert role in self._bundles, f"'{role}' is started without a plan: give `plan` its Need"
        return self._bundles[role]


class _Layout:
    """Nodes as they fill up."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._order = {node.name: position for position, node in enumerate(nodes)}
        self._rooms = [_Room(node) for node in nodes]
        self._needs: dict[str, Need] = {}
        self._bundles: dict[str, tuple[Bundle, ...]] = {}

    def place(self, need: Need, strategy: Strategy) -> int:
        """As many ranks as find room. Returns how many."""
        if need.role in self._needs:
            raise ConfigError(f"two roles are called '{need.role}'")
        self._needs[need.role] = need
        if need.beside is None:
            found = [
                bundle
                for _ in range(need.ranks)
                if (bundle := self._one_more(need, strategy)) is not None
            ]
        elif need.beside in self._bundles:
            found = beside(need, self._bundles[need.beside])
        else:
            raise ConfigError(
                f"role '{need.role}' is to be beside '{need.beside}', which has no place of its own"
            )
        self._bundles[need.role] = in_order(found, self._order)
        return len(found)

    def _one_more(self, need: Need, strategy: Strategy) -> Bundle | None:
        rooms = [room for room in self._rooms if room.fits(need)]
        if strategy == "per_node":
            rooms = [room for room in rooms if not room.ranks[need.role]]
        if not rooms:
            return None
        if strategy == "spread":
            return max(rooms, key=lambda room: (-room.ranks[need.role], room.space(need))).take(
                need
            )
        # A node that already has some of them; then the fullest that has room for all; then the
        # emptiest.
        return max(
            rooms,
            key=lambda room: (room.ranks[need.role] > 0, _rating(room.space(need), need.ranks)),
        ).take(need)

    def shared_out(self) -> dict[str, tuple[Bundle, ...]]:
        """With the cores that nobody asked for in equal parts to those who left the number open."""
        share = {room.node.name: room.cpus / max(1, room.open_ranks) for room in self._rooms}
        for need in self._needs.values():
            own = (
                self._bundles[need.role]
                if need.beside is None
                else beside(need, self._bundles[need.beside])
            )
            shared = need.beside is None and not need.cpus
            filled = [
                replace(bundle, cpus=share[bundle.node]) if shared else bundle for bundle in own
            ]
            self._bundles[need.role] = in_order(filled, self._order)
        return self._bundles


def beside(need: Need, others: Sequence[Bundle]) -> list[Bundle]:
    """Bundles of a role that shares the accelerators of another, dealt out anew: two ranks with one
    each make room for one with two."""
    found: list[Bundle] = []
    for node in dict.fromkeys(bundle.node for bundle in others):
        here = [bundle for bundle in others if bundle.node == node]
        devices = [device for bundle in here for device in bundle.accelerators]
        ranks = len(devices) // need.gpus if need.gpus else len(here)
        cpus = need.cpus or sum(bundle.cpus for bundle in here) / max(1, ranks)
        found += [
            Bundle(node, tuple(devices[i * need.gpus : (i + 1) * need.gpus]), cpus)
            for i in range(ranks)
        ]
    return found[: need.ranks]


def in_order(bundles: Iterable[Bundle], order: Mapping[str, int]) -> tuple[Bundle, ...]:
    """By node, and on each of them neighbours in a row. order: of the nodes, by name."""

    def key(bundle: Bundle) -> tuple[int, tuple[int, int, int]]:
        return order[bundle.node], min(
            (a.neighbourhood for a in bundle.accelerators), default=(0, 0, 0)
        )

    seen: Counter[str] = Counter()
    found: list[Bundle] = []
    for bundle in sorted(bundles, key=key):
        found.append(replace(bundle, local_rank=seen[bundle.node]))
        seen[bundle.node] += 1
    return tuple(found)


def _rating(space: int, ranks: int) -> tuple[bool, int]:
    return (space >= ranks, -space if space >= ranks else space)


@dataclass
class _Room:
    """What is left of a node."""

    node: Node
    free: list[Accelerator] = field(init=False)
    cpus: float = field(init=False)
    ranks: Counter[str] = field(default_factory=Counter)
    open_ranks: int = 0

    def __post_init__(self) -> None:
        self.free = sorted(
            self.node.accelerators, key=lambda accelerator: accelerator.neighbourhood
        )
        self.cpus = self.node.cpus

    def fits(self, need: Need) -> bool:
        return len(self.free) >= need.gpus and self.cpus + 1e-9 >= need.cpus

    def space(self, need: Need) -> int:
        """Ranks of this role that it has room for."""
        counts = [len(self.free) // need.gpus] if need.gpus else []
        counts += [int((self.cpus + 1e-9) / need.cpus)] if need.cpus else []
        return min(counts, default=int(self.node.cpus) + 1 - self.open_ranks)

    def take(self, need: Need) -> Bundle:
        taken = self._near(need.gpus)
        self.free = [accelerator for accelerator in self.free if accelerator not in taken]
        self.cpus -= need.cpus
        self.open_ranks += not need.cpus
        self.ranks[need.role] += 1
        return Bundle(self.node.name, taken, need.cpus)

    def _near(self, count: int) -> tuple[Accelerator, ...]:
        """Of the smallest neighbourhood that has so many; else of several, in a row."""
        for part in (lambda a: (a.island, a.numa), lambda a: a.island):
            parts: dict[object, list[Accelerator]] = {}
            for accelerator in self.free:
                parts.setdefault(part(accelerator), []).append(accelerator)
            enough = [own for own in parts.values() if len(own) >= count]
            if enough:
                return tuple(min(enough, key=len)[:count])
        return tuple(self.free[:count])


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Lines of a table, its columns two spaces apart."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )
