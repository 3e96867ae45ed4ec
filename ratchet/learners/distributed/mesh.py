"""The device mesh and the process groups of a rank (tensor, context, pipeline, expert, FSDP)."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ratchet.learners.distributed.topology import Coordinates, Topology
from ratchet.models.parallel.sharding import ModelShard, ShardIndex, StageIndex

Group = dist.ProcessGroup


class Mesh:
    """The process groups of a rank, one for each kind of parallelism. A group of one rank is None.

    All ranks create their mesh at the same time, after `init_process_group`.
    """

    def __init__(self, topology: Topology, device: str) -> None:
        assert dist.get_world_size() == topology.world_size, (
            f"{dist.get_world_size()} ranks for a mesh of {topology.world_size}"
        )
        self.topology = topology
        self.rank = dist.get_rank()
        self.coordinates = list(topology.coordinates())[self.rank]
        # Number of ranks of a replica over which FSDP divides the rows of a parameter.
        row_ranks = topology.shards * topology.context
        sizes = (topology.pipeline, topology.replicas, row_ranks, topology.tensor)
        self._mesh = init_device_mesh(
            device, sizes, mesh_dim_names=("pipeline", "replica", "rows", "tensor")
        )
        self.tensor = self._mesh.get_group("tensor") if topology.tensor > 1 else None
        self.context = self._create_group(
            lambda c: (c.pipeline, c.replica, c.shard, c.tensor), topology.context
        )
        self.pipeline = self._mesh.get_group("pipeline") if topology.pipeline > 1 else None
        self.end_stages_group = self._create_end_stages_group()
        # The ranks over which gradients are summed.
        self.gradient_group = self._create_group(
            lambda c: (c.pipeline, c.tensor), topology.gradient_ranks
        )
        # The ranks that hold parts of the same parameters.
        self.stage_group = self._create_group(
            lambda c: (c.pipeline,), topology.world_size // topology.pipeline
        )
        row_index = self.coordinates.shard * topology.context + self.coordinates.context
        # Number of ranks over which FSDP divides the rows of an expert's parameters.
        expert_row_ranks = row_ranks // topology.experts
        self.model_shard = ModelShard(
            ShardIndex(self.coordinates.tensor, topology.tensor),
            StageIndex(self.coordinates.pipeline, topology.pipeline),
            ShardIndex(row_index % topology.experts, topology.experts),
        )
        # This rank's shard of the rows of a dense parameter, and of an expert's parameter.
        self.row_shard = ShardIndex(row_index, row_ranks)
        self.expert_row_shard = ShardIndex(row_index // topology.experts, expert_row_ranks)
        self.fsdp = self._select_fsdp_mesh(self._mesh, row_ranks)
        self.expert_fsdp = self.fsdp
        self.expert_gradient_group = self.gradient_group
        self.experts = None
        if topology.experts > 1:
            sizes = (
                topology.pipeline,
                topology.replicas,
                expert_row_ranks,
                topology.experts,
                topology.tensor,
            )
            names = ("pipeline", "replica", "rows", "experts", "tensor")
            expert_mesh = init_device_mesh(device, sizes, mesh_dim_names=names)
            self.experts = expert_mesh.get_group("experts")
            self.expert_fsdp = self._select_fsdp_mesh(expert_mesh, expert_row_ranks)
            # The ranks over which gradients of the same experts are summed.
            self.expert_gradient_group = self._create_group(
                lambda c: (
                    c.pipeline,
                    c.tensor,
                    (c.shard * topology.context + c.context) % topology.experts,
                ),
                topology.gradient_ranks // topology.experts,
            )

    def _create_end_stages_group(self) -> Group | None:
        """Return the group of the first and last pipeline stage; None if this rank has neither."""
        last = self.topology.pipeline - 1
        if not last:
            return None

        def group_key(coordinates: Coordinates) -> tuple[int, ...]:
            return (
                coordinates.replica,
                coordinates.shard,
                coordinates.context,
                coordinates.tensor,
                0 if coordinates.pipeline in (0, last) else coordinates.pipeline,
            )

        group = self._create_group(group_key, 2)
        return group if self.coordinates.pipeline in (0, last) else None

    def _select_fsdp_mesh(self, mesh: DeviceMesh, row_ranks: int) -> DeviceMesh | None:
        """Return the mesh over which FSDP shards weights; None if one rank holds all weights.

        With replicas its first dimension is the replicas (HSDP).
        """
        if self.topology.replicas > 1:
            return mesh["replica", "rows"]
        return mesh["rows"] if row_ranks > 1 else None

    def _create_group(
        self, group_key: Callable[[Coordinates], tuple[int, ...]], size: int
    ) -> Group | None:
        """Return the group of the ranks with the same key as this rank.

        All ranks create all groups, in the same order.
        """
        if size == 1:
            return None
        ranks_by_key: dict[tuple[int, ...], list[int]] = {}
        for rank, coordinates in enumerate(self.topology.coordinates()):
            ranks_by_key.setdefault(group_key(coordinates), []).append(rank)
        groups = {key: dist.new_group(ranks) for key, ranks in ranks_by_key.items()}
        group = groups[group_key(self.coordinates)]
        assert isinstance(group, dist.ProcessGroup)
        return group
