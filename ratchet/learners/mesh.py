"""The process groups of a rank."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ratchet.learners.topology import Coordinates, Topology
from ratchet.models.parts import Part, Share

Group = dist.ProcessGroup


class Mesh:
    """Every rank makes one at the same time, after `init_process_group`. A group of one rank is None."""

    def __init__(self, topology: Topology, device: str) -> None:
        assert dist.get_world_size() == topology.world, f"{dist.get_world_size()} ranks for a mesh of {topology.world}"
        self.topology, self.rank = topology, dist.get_rank()
        self.at = list(topology.coordinates())[self.rank]
        sizes = (topology.pipeline, topology.replicas, topology.shards * topology.context, topology.tensor)
        self.mesh = init_device_mesh(device, sizes, mesh_dim_names=("pipeline", "replica", "fsdp", "tensor"))
        self.tensor = self._group(lambda c: (c.pipeline, c.replica, c.shard, c.context), topology.tensor)
        self.context = self._group(lambda c: (c.pipeline, c.replica, c.shard, c.tensor), topology.context)
        self.pipeline = self._group(lambda c: (c.replica, c.shard, c.context, c.tensor), topology.pipeline)
        self.rows = self._group(lambda c: (c.pipeline, c.tensor), topology.summands)  # all that add up to one gradient
        self.experts = self._group(self._experts, topology.experts)

    def _group(self, alike: Callable[[Coordinates], tuple[int, ...]], size: int) -> Group | None:
        """Of the ranks that have this in common with us. All ranks make all groups, in the same order."""
        if size == 1:
            return None
        members: dict[tuple[int, ...], list[int]] = {}
        for rank, at in enumerate(self.topology.coordinates()):
            members.setdefault(alike(at), []).append(rank)
        made = {key: dist.new_group(ranks) for key, ranks in members.items()}
        group = made[alike(self.at)]
        assert isinstance(group, dist.ProcessGroup)
        return group

    def _experts(self, at: Coordinates) -> tuple[int, ...]:
        place = at.shard * self.topology.context + at.context
        return (at.pipeline, at.replica, place // self.topology.experts, at.tensor)

    @property
    def part(self) -> Part:
        topology, at = self.topology, self.at
        place = at.shard * topology.context + at.context
        return Part(
            Share(at.tensor, topology.tensor),
            Share(at.pipeline, topology.pipeline),
            Share(place % topology.experts, topology.experts),
        )

    @property
    def fsdp(self) -> DeviceMesh | None:
        """Over which weights are divided and repeated; None where a rank has them alone."""
        if self.topology.summands == 1:
            return None
        return self.mesh["replica", "fsdp"] if self.topology.replicas > 1 else self.mesh["fsdp"]

    @property
    def share(self) -> Share:
        """Of the rows of every parameter."""
        topology = self.topology
        return Share(self.at.shard * topology.context + self.at.context, topology.shards * topology.context)
