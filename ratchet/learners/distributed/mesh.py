"""The mesh: the process groups of a rank."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ratchet.learners.distributed.topology import Coordinates, Topology
from ratchet.models.parallel.sharding import ModelShard, ShardIndex

Group = dist.ProcessGroup


class Mesh:
    """The process groups of a rank; None stands for a group of one rank.

    Every rank creates its mesh at the same time, after `init_process_group`.
    """

    def __init__(self, topology: Topology, device: str) -> None:
        assert dist.get_world_size() == topology.world, (
            f"{dist.get_world_size()} ranks for a mesh of {topology.world}"
        )
        self.topology = topology
        self.rank = dist.get_rank()
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
        # All ranks whose gradients are added up.
        self.sums = self._group(lambda c: (c.pipeline, c.tensor), topology.summands)
        place = self.at.shard * topology.context + self.at.context
        outer = ranks // topology.experts
        self.part = ModelShard(
            ShardIndex(self.at.tensor, topology.tensor),
            ShardIndex(self.at.pipeline, topology.pipeline),
            ShardIndex(place % topology.experts, topology.experts),
        )
        # This rank's share of the rows of every parameter, and of those of its experts.
        self.share = ShardIndex(place, ranks)
        self.expert_share = ShardIndex(place // topology.experts, outer)
        self.fsdp = self._fsdp_mesh(self._mesh, ranks)
        self.expert_fsdp = self.fsdp
        self.experts = None
        if topology.experts > 1:
            sizes = (topology.pipeline, topology.replicas, outer, topology.experts, topology.tensor)
            names = ("pipeline", "replica", "rows", "experts", "tensor")
            divided = init_device_mesh(device, sizes, mesh_dim_names=names)
            self.experts = divided.get_group("experts")
            self.expert_fsdp = self._fsdp_mesh(divided, outer)

    def _ends(self) -> Group | None:
        """Return the group of the pipeline's first and last rank; None for ranks between."""
        last = self.topology.pipeline - 1
        if not last:
            return None

        def group_key(at: Coordinates) -> tuple[int, ...]:
            return (
                at.replica,
                at.shard,
                at.context,
                at.tensor,
                0 if at.pipeline in (0, last) else at.pipeline,
            )

        group = self._group(group_key, 2)
        return group if self.at.pipeline in (0, last) else None

    def _fsdp_mesh(self, mesh: DeviceMesh, ranks: int) -> DeviceMesh | None:
        """Return the mesh over which weights are divided and repeated.

        None: one rank has them alone.
        """
        if self.topology.replicas > 1:
            return mesh["replica", "rows"]
        return mesh["rows"] if ranks > 1 else None

    def _group(
        self, group_key: Callable[[Coordinates], tuple[int, ...]], size: int
    ) -> Group | None:
        """Return the group of the ranks with the same key as this rank.

        All ranks create all groups, in the same order.
        """
        if size == 1:
            return None
        members: dict[tuple[int, ...], list[int]] = {}
        for rank, at in enumerate(self.topology.coordinates()):
            members.setdefault(group_key(at), []).append(rank)
        groups = {key: dist.new_group(ranks) for key, ranks in members.items()}
        group = groups[group_key(self.at)]
        assert isinstance(group, dist.ProcessGroup)
        return group
