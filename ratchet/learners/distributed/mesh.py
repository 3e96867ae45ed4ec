"""The process groups of a rank."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ratchet.learners.distributed.topology import Coordinates, Topology
from ratchet.models.parallel.sharding import Part, Share

Group = dist.ProcessGroup


class Mesh:
    """Every rank makes one at the same time, after `init_process_group`. A group of one rank is
    None."""

    def __init__(self, topology: Topology, device: str) -> None:
        assert dist.get_world_size() == topology.world, (
            f"{dist.get_world_size()} ranks for a mesh of {topology.world}"
        )
        self.topology, self.rank = topology, dist.get_rank()
        self.at = list(topology.coordinates())[self.rank]
        ranks = topology.shards * topology.context
        sizes = (topology.pipeline, topology.replicas, ranks, topology.tensor)
        self._mesh = init_device_mesh(
            device, sizes, mesh_dim_names=("pipeline", "replica", "rows", "tensor")
        )
        self.tensor = self._mesh.get_group("tensor") if topology.tensor > 1 else None
        self.context = self._group(
            lambda c: (c.pipeline, c.replica, c.shard, c.tensor), topology.context
        )
        self.pipeline = self._mesh.get_group("pipeline") if topology.pipeline > 1 else None
        self.ends = self._ends()
        # all that add up to one gradient
        self.sums = self._group(lambda c: (c.pipeline, c.tensor), topology.summands)
        place = self.at.shard * topology.context + self.at.context
        outer = ranks // topology.experts
        self.part = Part(
            Share(self.at.tensor, topology.tensor),
            Share(self.at.pipeline, topology.pipeline),
            Share(place % topology.experts, topology.experts),
        )
        self.share = Share(place, ranks)  # of the rows of every parameter ...
        # ... and of the experts that this rank helps to hold
        self.expert_share = Share(place // topology.experts, outer)
        self.fsdp = self._weights(self._mesh, ranks)
        self.expert_fsdp, self.experts = self.fsdp, None
        if topology.experts > 1:
            sizes = (topology.pipeline, topology.replicas, outer, topology.experts, topology.tensor)
            names = ("pipeline", "replica", "rows", "experts", "tensor")
            divided = init_device_mesh(device, sizes, mesh_dim_names=names)
            self.experts, self.expert_fsdp = (
                divided.get_group("experts"),
                self._weights(divided, outer),
            )

    def _ends(self) -> Group | None:
        """The first and the last rank of our pipeline; None for those between them."""
        last = self.topology.pipeline - 1
        if not last:
            return None

        def alike(at: Coordinates) -> tuple[int, ...]:
            return (
                at.replica,
                at.shard,
                at.context,
                at.tensor,
                0 if at.pipeline in (0, last) else at.pipeline,
            )

        made = self._group(alike, 2)
        return made if self.at.pipeline in (0, last) else None

    def _weights(self, mesh: DeviceMesh, ranks: int) -> DeviceMesh | None:
        """Over which weights are divided and repeated; None where a rank has them alone."""
        if self.topology.replicas > 1:
            return mesh["replica", "rows"]
        return mesh["rows"] if ranks > 1 else None

    def _group(self, alike: Callable[[Coordinates], tuple[int, ...]], size: int) -> Group | None:
        """Of the ranks that have this in common with us. All ranks make all groups, in the same
        order."""
        if size == 1:
            return None
        members: dict[tuple[int, ...], list[int]] = {}
        for rank, at in enumerate(self.topology.coordinates()):
            members.setdefault(alike(at), []).append(rank)
        made = {key: dist.new_group(ranks) for key, ranks in members.items()}
        group = made[alike(self.at)]
        assert isinstance(group, dist.ProcessGroup)
        return group
