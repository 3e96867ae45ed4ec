"""Gather the matrices of a divided model, each on one rank, for optimizers that need them whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ratchet.learners.distributed.param_shards import ParamShard
from ratchet.models.parallel.collectives import Group
from ratchet.models.parallel.sharded_policy import DistributedPolicy
from ratchet.models.policy import PolicyModel
from ratchet.protocols import Shard

# Name and shape of a matrix [rows, columns], under its name in Hugging Face's files.
Matrix = tuple[str, tuple[int, ...]]


def select_matrices(shards: Sequence[ParamShard], model: PolicyModel) -> list[ParamShard]:
    """Return the shards of the matrices of a model's layers, without embeddings and heads."""
    if isinstance(model, DistributedPolicy):
        return [
            shard
            for shard in shards
            if shard.name.startswith("layers.") and len(shard.pieces[0].shape) == 2
        ]
    names = {name.removeprefix("model.") for name in model.matrices()}
    return [shard for shard in shards if shard.name in names]


class WholeMatrices:
    """A function of whole matrices, applied to a model that ranks divide in any way.

    Different ranks compute the matrices of a parameter, at the same time. A gathered matrix is the
    sum of its ranks' blocks, each filled up with zeros, so the sum has the blocks' bits.

    Constructing it and `map` are collective operations of the group.

    Args:
        shards: This rank's shards of the parameters with matrices. All ranks of the group have
            the same parameters, in the same order.
        group: The ranks that hold parts of these parameters; None: this rank alone.
        device: The device on which matrices are gathered.
    """

    def __init__(
        self, shards: Sequence[ParamShard], group: Group | None, device: torch.device
    ) -> None:
        self._shards = {shard.name: shard for shard in shards}
        self._group = group
        self._device = device
        self._matrices = {shard.name: self._list_matrices(shard) for shard in shards}

    def _list_matrices(self, shard: ParamShard) -> list[Matrix]:
        """Return the matrices of a parameter on all ranks, in the same order on each."""
        found = {piece.name: piece.shape for piece in shard.pieces}
        if self._group is None:
            return list(found.items())
        parts: list[dict[str, tuple[int, ...]]] = [{}] * dist.get_world_size(self._group)
        # Ranks of expert parallelism have different experts.
        dist.all_gather_object(parts, found, group=self._group)
        return sorted({name: shape for part in parts for name, shape in part.items()}.items())

    def map(self, name: str, local: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
        """Return this rank's part of `compute(matrix)` for each matrix of a parameter.

        Args:
            name: The parameter.
            local: This rank's part of the parameter's matrices.
            compute: A function of a matrix [rows, columns] that keeps its shape.
        """
        shard = self._shards[name]
        wholes = [
            torch.zeros(shape, dtype=local.dtype, device=self._device)
            for _, shape in self._matrices[name]
        ]
        whole_by_name = dict(
            zip((matrix for matrix, _ in self._matrices[name]), wholes, strict=True)
        )
        if shard.is_owner:
            for block in shard.blocks(local):
                _locate(block, whole_by_name[block.name]).copy_(block.tensor)
        self._compute_shared(wholes, compute)
        result = torch.empty_like(local)
        for block in shard.blocks(result):
            block.tensor.copy_(_locate(block, whole_by_name[block.name]))
        return result

    def _compute_shared(
        self, wholes: Sequence[Tensor], compute: Callable[[Tensor], Tensor]
    ) -> None:
        """Replace matrices, of which each rank has a part, by `compute` of the whole ones."""
        group = self._group
        if group is None:
            for whole in wholes:
                whole.copy_(compute(whole))
            return
        rank, n_ranks = dist.get_rank(group), dist.get_world_size(group)
        for index, whole in enumerate(wholes):
            dist.reduce(whole, group=group, group_dst=index % n_ranks)
        for whole in wholes[rank::n_ranks]:
            whole.copy_(compute(whole))
        for index, whole in enumerate(wholes):
            dist.broadcast(whole, group=group, group_src=index % n_ranks)


def _locate(block: Shard, whole: Tensor) -> Tensor:
    """Return a view of the place of a block in its matrix."""
    spans = zip(block.offsets, block.tensor.shape, strict=True)
    return whole[tuple(slice(start, start + size) for start, size in spans)]
