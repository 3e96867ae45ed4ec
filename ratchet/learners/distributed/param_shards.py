"""The parameters of a rank: how much of each it holds, and who holds the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ratchet.learners.distributed.mesh import Mesh
from ratchet.models.lora.decoder import of_adapter
from ratchet.models.parallel.collectives import Group
from ratchet.models.parallel.sharded_policy import SpreadPolicy
from ratchet.models.parallel.sharding import Share
from ratchet.models.policy import PolicyModel
from ratchet.models.scalar_head import ScalarHead
from ratchet.models.transformers.tensor_parallel import Divided
from ratchet.models.weights.weight_layout import Piece, divided, pieces, shards
from ratchet.protocols import Shard


@dataclass(frozen=True)
class Held:
    """rows: of the whole parameter that lie here, where FSDP divides it; None: all of them. copies:
    ranks that hold the same block. partial: groups whose ranks have a summand of the gradient each,
    beside those over which FSDP has summed it. excess: what its gradient is to be divided by, as a
    loss is multiplied by the number of ranks over which FSDP averages: of experts these are fewer,
    and of vectors, which it leaves alone, none. first: whether this rank speaks for all that hold
    the same."""

    name: str
    parameter: nn.Parameter
    pieces: tuple[Piece, ...]
    rows: range | None
    copies: int
    partial: tuple[Group, ...]
    excess: int
    first: bool

    @property
    def local(self) -> Tensor:
        return local(self.parameter.detach())

    def blocks(self, like: Tensor) -> Iterator[Shard]:
        """Of a tensor that lies as the parameter's local part does."""
        return shards(self.pieces, like, self.rows)


def local(x: Tensor) -> Tensor:
    """What of it is on this rank."""
    return x.to_local() if isinstance(x, DTensor) else x


def own_rows(parameter: Tensor, share: Share) -> range | None:
    """FSDP gives each rank as many rows as the first, as long as there are any."""
    if not isinstance(parameter, DTensor):
        return None
    total = parameter.shape[0]
    size = -(-total // share.count)
    return range(min(size * share.index, total), min(size * (share.index + 1), total))


def complete_gradients(held: Sequence[Held]) -> None:
    """Adds up those that are divided between ranks that hold the same parameter."""
    for item in held:
        # an embedding that is no head here, and yet one elsewhere
        if item.partial and item.parameter.grad is None:
            item.parameter.grad = torch.zeros_like(item.parameter)
        if item.parameter.grad is not None:
            for group in item.partial:
                dist.all_reduce(local(item.parameter.grad), group=group)
            if item.excess > 1:
                local(item.parameter.grad).div_(item.excess)


def scale_gradients(held: Sequence[Held], factor: float) -> None:
    for item in held:
        if item.parameter.grad is not None and factor != 1.0:
            local(item.parameter.grad).mul_(factor)


def global_norm(held: Sequence[Held], loss: float, device: torch.device) -> tuple[float, float]:
    """(norm of the whole gradient, sum over all ranks of `loss`), the same on every rank."""
    total = torch.zeros(2, dtype=torch.float64, device=device)
    for item in held:
        if item.parameter.grad is not None:
            total[0] += (
                torch.linalg.vector_norm(local(item.parameter.grad)).double().square() / item.copies
            )
    total[1] = loss
    dist.all_reduce(total)
    return float(total[0].sqrt()), float(total[1])


def held_parameters(model: PolicyModel, head: ScalarHead | None, mesh: Mesh) -> list[Held]:
    """In the order of the model's parameters; those of the scalar head come last."""
    made: list[Held] = []
    if isinstance(model, SpreadPolicy):
        for decoder in (stage.decoder for stage in model.runs):
            where, tied = pieces(decoder), decoder.config.tied
            for name, parameter in decoder.named_parameters():
                made.append(
                    _of_decoder(
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
            short = name.partition(".")[2]  # as the model itself calls it
            made.append(_of_plan(short, parameter, mesh, model.divided))
    for name, parameter in () if head is None else head.named_parameters():
        made.append(_held(f"head.{name}", parameter, _whole(f"head.{name}", parameter), mesh, ()))
    return made


def _of_decoder(
    name: str,
    parameter: nn.Parameter,
    where: tuple[Piece, ...],
    mesh: Mesh,
    *,
    sequence: bool,
    tied: bool,
) -> Held:
    partial: tuple[Group, ...] = ()
    if mesh.tensor is not None and not divided(name):
        # Some see some of the heads only, some of the experts' outputs, or some of the tokens,
        # though each rank has them whole. What of an adapter is not divided meets what is: it sees
        # some outputs of a product, or a summand of its inputs.
        heads = name.endswith(("q_norm.weight", "k_norm.weight", "mlp.gate.weight"))
        partial = (
            (mesh.tensor,) if heads or of_adapter(name) or (sequence and "norm" in name) else ()
        )
    of_experts = mesh.experts is not None and ".experts." in name
    made = _held(
        name, parameter, where, mesh, partial, divided=divided(name), of_experts=of_experts
    )
    if mesh.ends is None or not (tied and name.startswith("embed_tokens")):
        return made
    # The last stage has the embedding too, as its head.
    first = made.first and mesh.at.pipeline == 0
    return replace(made, partial=(*partial, mesh.ends), copies=made.copies * 2, first=first)


def _of_plan(name: str, parameter: nn.Parameter, mesh: Mesh, divided: Divided | None) -> Held:
    if divided is None or mesh.tensor is None:
        return _held(name, parameter, _whole(name, parameter), mesh, ())
    if name in divided.blocks:
        return _held(name, parameter, (divided.blocks[name],), mesh, (), divided=True)
    return _held(
        name,
        parameter,
        _whole(name, parameter),
        mesh,
        (mesh.tensor,) if name in divided.partial else (),
    )


def _held(
    name: str,
    parameter: nn.Parameter,
    where: tuple[Piece, ...],
    mesh: Mesh,
    partial: tuple[Group, ...],
    *,
    divided: bool = False,
    of_experts: bool = False,
) -> Held:
    """divided: over the tensor-parallel ranks."""
    excess = mesh.topology.experts if of_experts else 1
    # which FSDP leaves alone
    if (parameter.dim() < 2 or of_adapter(name)) and mesh.sums is not None:
        partial, excess = (*partial, mesh.sums), mesh.topology.summands
    share = mesh.expert_share if of_experts else mesh.share
    rows = own_rows(parameter, share)
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
    return Held(name, parameter, where, rows, copies, partial, excess, first)


def _whole(name: str, parameter: Tensor) -> tuple[Piece, ...]:
    shape = tuple(parameter.shape)
    return (Piece(name, shape, (0,) * len(shape), range(shape[0])),)


def fill_held(
    held: Sequence[Held], read: Callable[[str, Sequence[int], Sequence[int]], Tensor]
) -> None:
    """Copies every block from where its name, offsets and sizes are found."""
    with torch.no_grad():
        for item in held:
            for block in item.blocks(item.local):
                block.tensor.copy_(read(block.name, block.offsets, block.tensor.shape))
