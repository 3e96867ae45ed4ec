"""The parameters of a rank: the part of each that it holds, and how gradients are reduced."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ratchet.learners.distributed.mesh import Mesh
from ratchet.models.lora.decoder import is_adapter_parameter
from ratchet.models.parallel.collectives import Group
from ratchet.models.parallel.sharded_policy import DistributedPolicy
from ratchet.models.parallel.sharding import ShardIndex
from ratchet.models.policy import PolicyModel
from ratchet.models.scalar_head import ScalarHead
from ratchet.models.transformers.tensor_parallel import TPDivision
from ratchet.models.weights.weight_layout import (
    WeightPiece,
    cut_blocks,
    is_tensor_parallel,
    list_pieces,
)
from ratchet.protocols import Shard


@dataclass(frozen=True)
class ParamShards:
    """The part of a parameter that this rank holds.

    rows: rows that this rank holds, if FSDP divides the parameter; None: all of them.
    copies: number of ranks that hold the same block.
    partial: groups over which the gradient must still be summed, after FSDP's own reduction.
    excess: divisor of the gradient. The loss is multiplied by the number of ranks over which FSDP
      averages dense matrices. It averages experts over fewer ranks, and vectors and adapters, which
      it does not divide, over none.
    first: True for the one rank that saves and sends this block, of all that hold it.
    """

    name: str
    parameter: nn.Parameter
    pieces: tuple[WeightPiece, ...]
    rows: range | None
    copies: int
    partial: tuple[Group, ...]
    excess: int
    first: bool

    @property
    def local(self) -> Tensor:
        """This rank's part of the parameter, detached."""
        return get_local_tensor(self.parameter.detach())

    def blocks(self, like: Tensor) -> Iterator[Shard]:
        """Yield the blocks of a tensor that has the layout of the parameter's local part."""
        return cut_blocks(self.pieces, like, self.rows)


def get_local_tensor(x: Tensor) -> Tensor:
    """Return this rank's part of a tensor."""
    return x.to_local() if isinstance(x, DTensor) else x


def compute_fsdp_rows(parameter: Tensor, share: ShardIndex) -> range | None:
    """Return the rows of a parameter that FSDP gives to this rank.

    Each rank gets ceil(rows / ranks) rows; the last ranks may get fewer or none.
    """
    if not isinstance(parameter, DTensor):
        return None
    total = parameter.shape[0]
    size = -(-total // share.count)
    return range(min(size * share.index, total), min(size * (share.index + 1), total))


def complete_gradients(held: Sequence[ParamShards]) -> None:
    """Sum each gradient over its `partial` groups, and divide it by its `excess`."""
    for item in held:
        # A tied embedding has no gradient on pipeline stages without the head.
        if item.partial and item.parameter.grad is None:
            item.parameter.grad = torch.zeros_like(item.parameter)
        if item.parameter.grad is not None:
            for group in item.partial:
                dist.all_reduce(get_local_tensor(item.parameter.grad), group=group)
            if item.excess > 1:
                get_local_tensor(item.parameter.grad).div_(item.excess)


def scale_gradients(held: Sequence[ParamShards], factor: float) -> None:
    """Multiply the gradients by a factor."""
    for item in held:
        if item.parameter.grad is not None and factor != 1.0:
            get_local_tensor(item.parameter.grad).mul_(factor)


def compute_global_norm(
    held: Sequence[ParamShards], loss: float, device: torch.device
) -> tuple[float, float]:
    """Return (norm of the whole gradient, sum over all ranks of `loss`), equal on every rank."""
    total = torch.zeros(2, dtype=torch.float64, device=device)
    for item in held:
        if item.parameter.grad is not None:
            total[0] += (
                torch.linalg.vector_norm(get_local_tensor(item.parameter.grad)).double().square()
                / item.copies
            )
    total[1] = loss
    dist.all_reduce(total)
    return float(total[0].sqrt()), float(total[1])


def collect_param_shards(
    model: PolicyModel, head: ScalarHead | None, mesh: Mesh
) -> list[ParamShards]:
    """Return the shards of the model's parameters in their order.

    Those of the scalar head come last.
    """
    param_shards: list[ParamShards] = []
    if isinstance(model, DistributedPolicy):
        for decoder in (stage.decoder for stage in model.runs):
            where = list_pieces(decoder)
            tied = decoder.config.tied
            for name, parameter in decoder.named_parameters():
                param_shards.append(
                    _decoder_shard(
                        name,
                        parameter,
                        where[name],
                        mesh,
                        sequence=model.spread.sequence,
                        tied=tied,
                    )
                )
    else:
        for name, parameter in model.named_parameters():
            # Drop the wrapper's prefix.
            own_name = name.partition(".")[2]
            param_shards.append(_transformers_shard(own_name, parameter, mesh, model.divided))
    for name, parameter in () if head is None else head.named_parameters():
        param_shards.append(
            _param_shard(f"head.{name}", parameter, _whole(f"head.{name}", parameter), mesh, ())
        )
    return param_shards


def _decoder_shard(
    name: str,
    parameter: nn.Parameter,
    where: tuple[WeightPiece, ...],
    mesh: Mesh,
    *,
    sequence: bool,
    tied: bool,
) -> ParamShards:
    """Return the shard of a parameter of Ratchet's decoder."""
    partial: tuple[Group, ...] = ()
    if mesh.tensor is not None and not is_tensor_parallel(name):
        # Each rank has these parameters whole, but computes their gradient from only some of the
        # heads, experts' outputs or tokens. An adapter's undivided matrix is multiplied with a
        # divided one, so its gradient comes from some outputs or a summand of the inputs.
        sees_some_heads = name.endswith(("q_norm.weight", "k_norm.weight", "mlp.gate.weight"))
        partial = (
            (mesh.tensor,)
            if sees_some_heads or is_adapter_parameter(name) or (sequence and "norm" in name)
            else ()
        )
    is_expert = mesh.experts is not None and ".experts." in name
    shard = _param_shard(
        name, parameter, where, mesh, partial, divided=is_tensor_parallel(name), is_expert=is_expert
    )
    if mesh.ends is None or not (tied and name.startswith("embed_tokens")):
        return shard
    # The last pipeline stage has the tied embedding too, as its head.
    first = shard.first and mesh.at.pipeline == 0
    return replace(shard, partial=(*partial, mesh.ends), copies=shard.copies * 2, first=first)


def _transformers_shard(
    name: str, parameter: nn.Parameter, mesh: Mesh, divided: TPDivision | None
) -> ParamShards:
    """Return the shard of a parameter of a Hugging Face transformers model."""
    if divided is None or mesh.tensor is None:
        return _param_shard(name, parameter, _whole(name, parameter), mesh, ())
    if name in divided.blocks:
        return _param_shard(name, parameter, (divided.blocks[name],), mesh, (), divided=True)
    return _param_shard(
        name,
        parameter,
        _whole(name, parameter),
        mesh,
        (mesh.tensor,) if name in divided.partial else (),
    )


def _param_shard(
    name: str,
    parameter: nn.Parameter,
    where: tuple[WeightPiece, ...],
    mesh: Mesh,
    partial: tuple[Group, ...],
    *,
    divided: bool = False,
    is_expert: bool = False,
) -> ParamShards:
    """Return the shard of a parameter.

    divided: True if tensor parallelism divides it.
    """
    excess = mesh.topology.experts if is_expert else 1
    # FSDP does not divide vectors and adapters.
    if (parameter.dim() < 2 or is_adapter_parameter(name)) and mesh.sums is not None:
        partial = (*partial, mesh.sums)
        excess = mesh.topology.summands
    share = mesh.expert_share if is_expert else mesh.share
    rows = compute_fsdp_rows(parameter, share)
    copies = (
        mesh.topology.replicas
        * (1 if divided else mesh.topology.tensor)
        * (share.count if rows is None else 1)
    )
    first = (
        mesh.at.replica == 0
        and (divided or mesh.at.tensor == 0)
        and (rows is not None or share.index == 0)
    )
    return ParamShards(name, parameter, where, rows, copies, partial, excess, first)


def _whole(name: str, parameter: Tensor) -> tuple[WeightPiece, ...]:
    """Return a single piece that covers the whole parameter."""
    shape = tuple(parameter.shape)
    return (WeightPiece(name, shape, (0,) * len(shape), range(shape[0])),)


def fill_param_shards(
    held: Sequence[ParamShards], read: Callable[[str, Sequence[int], Sequence[int]], Tensor]
) -> None:
    """Fill the parameters block by block.

    read: returns a block, given its name, offsets and shape.
    """
    with torch.no_grad():
        for item in held:
            for block in item.blocks(item.local):
                block.tensor.copy_(read(block.name, block.offsets, block.tensor.shape))
