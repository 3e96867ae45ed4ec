"""The shards of parameters that a rank holds, and the reduction of their gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ratchet.learners.distributed.mesh import Mesh
from ratchet.models.lora.decoder import is_adapter_parameter
from ratchet.models.lora.transformers import get_canonical_name
from ratchet.models.parallel.collectives import Group
from ratchet.models.parallel.sharded_policy import DistributedPolicy
from ratchet.models.parallel.sharding import ShardIndex
from ratchet.models.policy import PolicyModel
from ratchet.models.scalar_head import ScalarHead
from ratchet.models.weights.weight_layout import (
    WeightPiece,
    cut_blocks,
    is_tensor_parallel,
    list_pieces,
    make_whole_piece,
)
from ratchet.protocols import Shard


@dataclass(frozen=True)
class ParamShard:
    """The shard of a parameter that this rank holds.

    pieces: the blocks of the model's named weights (Hugging Face) that make up the parameter,
      before FSDP divides it by rows.
    rows: the parameter's rows on this rank if FSDP divides it; None: all rows.
    copies: number of ranks that hold the same shard.
    reduce_groups: groups over which the gradient must still be summed after FSDP's own reduction.
    gradient_divisor: divisor that makes the gradient a plain sum over ranks. The loss is multiplied
      by the number of ranks over which FSDP averages gradients of dense matrices, so these are
      already sums (divisor 1). FSDP averages gradients of experts over fewer ranks, and does not
      average gradients of vectors and adapters: without the divisor these are too large.
    is_owner: True on the one rank that saves and sends the shard, among the ranks that hold it.
    """

    name: str
    parameter: nn.Parameter
    pieces: tuple[WeightPiece, ...]
    rows: range | None
    copies: int
    reduce_groups: tuple[Group, ...]
    gradient_divisor: int
    is_owner: bool

    @property
    def local(self) -> Tensor:
        """This rank's part of the parameter, detached."""
        return get_local_tensor(self.parameter.detach())

    def blocks(self, tensor: Tensor) -> Iterator[Shard]:
        """Yield the blocks of a tensor that has the layout of the parameter's local part."""
        return cut_blocks(self.pieces, tensor, self.rows)


def get_local_tensor(x: Tensor) -> Tensor:
    """Return this rank's part of a tensor."""
    return x.to_local() if isinstance(x, DTensor) else x


def compute_fsdp_rows(parameter: Tensor, row_shard: ShardIndex) -> range | None:
    """Return the rows of a parameter that FSDP gives to this rank; None if FSDP divides no rows.

    Each rank gets ceil(rows / ranks) rows; the last ranks may get fewer or none.
    """
    if not isinstance(parameter, DTensor):
        return None
    total = parameter.shape[0]
    size = -(-total // row_shard.count)
    return range(min(size * row_shard.index, total), min(size * (row_shard.index + 1), total))


def complete_gradients(param_shards: Sequence[ParamShard]) -> None:
    """Sum each gradient over its `reduce_groups`, and divide it by its `gradient_divisor`."""
    for shard in param_shards:
        # A tied embedding has no gradient on a pipeline stage if it is not used there.
        if shard.reduce_groups and shard.parameter.grad is None:
            shard.parameter.grad = torch.zeros_like(shard.parameter)
        if shard.parameter.grad is not None:
            for group in shard.reduce_groups:
                dist.all_reduce(get_local_tensor(shard.parameter.grad), group=group)
            if shard.gradient_divisor > 1:
                get_local_tensor(shard.parameter.grad).div_(shard.gradient_divisor)


def scale_gradients(param_shards: Sequence[ParamShard], factor: float) -> None:
    """Multiply the gradients by a factor."""
    for shard in param_shards:
        if shard.parameter.grad is not None and factor != 1.0:
            get_local_tensor(shard.parameter.grad).mul_(factor)


def compute_global_norm(
    param_shards: Sequence[ParamShard], loss: float, device: torch.device
) -> tuple[float, float]:
    """Return (norm of the whole gradient, sum over all ranks of `loss`), equal on every rank."""
    total = torch.zeros(2, dtype=torch.float64, device=device)
    for shard in param_shards:
        if shard.parameter.grad is not None:
            total[0] += (
                torch.linalg.vector_norm(get_local_tensor(shard.parameter.grad)).double().square()
                / shard.copies
            )
    total[1] = loss
    dist.all_reduce(total)
    return float(total[0].sqrt()), float(total[1])


def collect_param_shards(
    model: PolicyModel, head: ScalarHead | None, mesh: Mesh
) -> list[ParamShard]:
    """Return the shards of the model's parameters in order, then those of the scalar head."""
    param_shards: list[ParamShard] = []
    if isinstance(model, DistributedPolicy):
        for decoder in (stage.decoder for stage in model.local_stages):
            pieces = list_pieces(decoder)
            is_tied = decoder.config.tied
            for name, parameter in decoder.named_parameters():
                param_shards.append(
                    _make_decoder_shard(
                        name,
                        parameter,
                        pieces[name],
                        mesh,
                        sequence=model.shard.sequence,
                        is_tied=is_tied,
                    )
                )
    else:
        for name, parameter in model.named_parameters():
            # Drop the wrapper's prefix "model.".
            model_name = get_canonical_name(name.partition(".")[2])
            param_shards.append(_make_transformers_shard(model_name, parameter, mesh, model))
    for name, parameter in () if head is None else head.named_parameters():
        head_name = f"head.{name}"
        pieces = (make_whole_piece(head_name, parameter),)
        shard = _make_shard(head_name, parameter, pieces, mesh, ())
        # Every pipeline stage has the scalar head, but only the last one trains it.
        is_owner = shard.is_owner and mesh.coordinates.pipeline == mesh.topology.pipeline - 1
        param_shards.append(replace(shard, is_owner=is_owner))
    return param_shards


def _make_decoder_shard(
    name: str,
    parameter: nn.Parameter,
    pieces: tuple[WeightPiece, ...],
    mesh: Mesh,
    *,
    sequence: bool,
    is_tied: bool,
) -> ParamShard:
    """Return the shard of a parameter of Ratchet's decoder.

    sequence: True under sequence parallelism.
    is_tied: True if the head is the embedding.
    """
    reduce_groups: tuple[Group, ...] = ()
    if mesh.tensor is not None and not is_tensor_parallel(name):
        # Some undivided parameters get only a part of their gradient on each rank: the norms of
        # queries and keys (from its heads), the router (from its experts), all norms under sequence
        # parallelism (from its tokens), and the undivided factor of an adapter.
        has_partial_gradient = name.endswith(("q_norm.weight", "k_norm.weight", "mlp.gate.weight"))
        reduce_groups = (
            (mesh.tensor,)
            if has_partial_gradient or is_adapter_parameter(name) or (sequence and "norm" in name)
            else ()
        )
    is_expert = mesh.experts is not None and ".experts." in name
    shard = _make_shard(
        name,
        parameter,
        pieces,
        mesh,
        reduce_groups,
        is_divided=is_tensor_parallel(name),
        is_expert=is_expert,
    )
    return _tie_end_stages(shard, mesh) if is_tied and name.startswith("embed_tokens") else shard


def _tie_end_stages(shard: ParamShard, mesh: Mesh) -> ParamShard:
    """Return the shard of a tied embedding, which the last pipeline stage has too, as its head."""
    if mesh.end_stages_group is None:
        return shard
    return replace(
        shard,
        reduce_groups=(*shard.reduce_groups, mesh.end_stages_group),
        copies=shard.copies * 2,
        is_owner=shard.is_owner and mesh.coordinates.pipeline == 0,
    )


def _make_transformers_shard(
    name: str, parameter: nn.Parameter, mesh: Mesh, model: PolicyModel
) -> ParamShard:
    """Return the shard of a parameter of a Hugging Face transformers model.

    name: the canonical name.
    """
    division = model.tp_division
    divided_pieces = division.divided_pieces if division is not None else {}
    is_divided = name in divided_pieces
    is_partial = division is not None and name in division.partial_gradients
    reduce_groups = (mesh.tensor,) if is_partial and mesh.tensor is not None else ()
    expert_pieces = {} if model.expert_division is None else model.expert_division.pieces
    pieces = expert_pieces.get(name) or divided_pieces.get(name)
    shard = _make_shard(
        name,
        parameter,
        pieces or (make_whole_piece(name, parameter),),
        mesh,
        reduce_groups,
        is_divided=is_divided,
        is_expert=name in expert_pieces,
    )
    return _tie_end_stages(shard, mesh) if name in model.tied_stage_weights else shard


def _make_shard(
    name: str,
    parameter: nn.Parameter,
    pieces: tuple[WeightPiece, ...],
    mesh: Mesh,
    reduce_groups: tuple[Group, ...],
    *,
    is_divided: bool = False,
    is_expert: bool = False,
) -> ParamShard:
    """Return the shard of a parameter.

    is_divided: True if tensor parallelism divides the parameter.
    """
    gradient_divisor = mesh.topology.experts if is_expert else 1
    # FSDP does not divide vectors and adapters.
    if (parameter.dim() < 2 or is_adapter_parameter(name)) and mesh.gradient_group is not None:
        group = mesh.expert_gradient_group if is_expert else mesh.gradient_group
        reduce_groups = reduce_groups if group is None else (*reduce_groups, group)
        gradient_divisor = mesh.topology.gradient_ranks
    row_shard = mesh.expert_row_shard if is_expert else mesh.row_shard
    rows = compute_fsdp_rows(parameter, row_shard)
    copies = (
        mesh.topology.replicas
        * (1 if is_divided else mesh.topology.tensor)
        * (row_shard.count if rows is None else 1)
    )
    is_owner = (
        mesh.coordinates.replica == 0
        and (is_divided or mesh.coordinates.tensor == 0)
        and (rows is not None or row_shard.index == 0)
    )
    return ParamShard(
        name, parameter, pieces, rows, copies, reduce_groups, gradient_divisor, is_owner
    )


def fill_param_shards(
    param_shards: Sequence[ParamShard], read: Callable[[str, Sequence[int], Sequence[int]], Tensor]
) -> None:
    """Fill the parameters block by block.

    read: returns a block, given its name, offsets and shape.
    """
    with torch.no_grad():
        for shard in param_shards:
            for block in shard.blocks(shard.local):
                block.tensor.copy_(read(block.name, block.offsets, block.tensor.shape))
