"""LoRA on Megatron's parallel linear maps: out + scale B A x (arXiv:2106.09685, eq. 3), with A and
B divided as the map is.

Where a map's outputs are divided over tensor-parallel ranks, so are the rows of B, and each rank
has all of A; where its inputs are, so are the columns of A, and each has all of B. Either way ranks
exchange nothing but A x: r numbers for a token.

t = tokens that come in here, u = that go out (fewer or more than t under sequence parallelism), r =
rank, i = inputs and o = outputs of the map on this rank, p = its targets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from ratchet.config.schema import LoRAConfig
from ratchet.models.lora.layers import SeededDropout, Switched, side_by_side
from ratchet.models.weights.weight_layout import Piece, factor_of

FACTORS = ("lora_A", "lora_B")


@dataclass(frozen=True)
class Way:
    """How a kind of map is divided. divided: which of the factors is too, along which dimension.
    alone, sequence: what becomes of A x on its way to B, without and with sequence parallelism."""

    divided: str
    dim: int
    alone: Callable[..., Tensor]
    sequence: Callable[..., Tensor]

    @property
    def whole(self) -> str:
        return FACTORS[1 - FACTORS.index(self.divided)]


# Backward, each of these is the other's forward: so the gradient of A x is complete wherever it
# arrives.
OUTPUTS = Way(
    "lora_B", 0, copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
)
INPUTS = Way(
    "lora_A",
    1,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)


class Factors(nn.Module):
    """A [r, i] and B [rows, r] of one target, the rows of the map's matrix that are its own.
    Uninitialised."""

    def __init__(self, weight: Tensor, adapted: Sequence[Piece], rank: int) -> None:
        """adapted: the blocks of the target in the map's matrix."""
        super().__init__()
        self.spans = [piece.rows for piece in adapted]
        empty = {"dtype": weight.dtype, "device": weight.device}
        self.lora_A = nn.Parameter(torch.empty(rank, weight.shape[1], **empty))
        self.lora_B = nn.Parameter(torch.empty(sum(map(len, self.spans)), rank, **empty))
        below: list[Piece] = []
        for piece in adapted:
            below.append(factor_of(piece, "lora_B", rank, below[-1].rows.stop if below else 0))
        self.pieces = {"lora_A": (factor_of(adapted[0], "lora_A", rank),), "lora_B": tuple(below)}

    def parts(self, low_ur: Tensor) -> list[tuple[range, Tensor]]:
        """(columns of the map's output, what is added there)"""
        out = F.linear(low_ur, self.lora_B).split([len(span) for span in self.spans], dim=-1)
        return list(zip(self.spans, out, strict=True))


class ParallelLowRank(Switched):
    """The adapter of one map: of each target that lies in its matrix."""

    def __init__(
        self, linear: Adapted, targets: Mapping[str, Sequence[Piece]], lora: LoRAConfig, place: int
    ) -> None:
        """place: see `SeededDropout`; the same on all ranks."""
        super().__init__()
        weight = linear.weight
        self.way, self.group, self.sequence = linear.way, linear.tp_group, linear.sequence_parallel
        self.outputs, self.scale = len(weight), lora.scale
        self.targets = nn.ModuleDict(
            {name: Factors(weight, pieces, lora.rank) for name, pieces in targets.items()}
        )
        # x is another on each rank then
        own = self.group.rank() if self.sequence or self.way is INPUTS else 0
        self.dropout = SeededDropout(lora.dropout, place * self.group.size() + own)
        for factors in self.targets.values():
            set_tensor_model_parallel_attributes(
                getattr(factors, self.way.divided), True, self.way.dim, 1
            )
            # Each rank sees some of the tokens there: Megatron adds up the gradients of parameters
            # that are marked so.
            getattr(factors, self.way.whole).sequence_parallel = self.sequence

    def forward(self, x_t1i: Tensor, out_u1o: Tensor) -> Tensor:
        if self.off:
            return out_u1o
        found = [cast(Factors, factors) for factors in self.targets.values()]
        low = (
            F.linear(self.dropout(x_t1i), torch.cat([factors.lora_A for factors in found]))
            * self.scale
        )
        low = (self.way.sequence if self.sequence else self.way.alone)(low, group=self.group)
        each = low.split([len(factors.lora_A) for factors in found], dim=-1)
        parts = [
            part for factors, own in zip(found, each, strict=True) for part in factors.parts(own)
        ]
        return out_u1o + side_by_side(sorted(parts, key=lambda part: part[0].start), self.outputs)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for name, factors in self.targets.items():
            made |= make_sharded_tensors_for_checkpoint(
                factors.state_dict(keep_vars=True),
                f"{prefix}targets.{name}.",
                {self.way.divided: self.way.dim},
                sharded_offsets,
                tp_group=self.group,
                dp_cp_group=metadata["dp_cp_group"],
            )
        return made


class Adapted(nn.Module):
    """Beside a class of Megatron's: its maps may have adapters."""

    way: Way
    weight: Tensor
    is_expert: bool
    sequence_parallel: bool
    tp_group: Any

    def __init__(self, *arguments: Any, **keys: Any) -> None:
        super().__init__(*arguments, **keys)
        self.adapter: ParallelLowRank | None = None

    def forward(self, x: Tensor, *arguments: Any, **keys: Any) -> tuple[Tensor, Any]:
        out, bias = super().forward(x, *arguments, **keys)  # pyright: ignore[reportAttributeAccessIssue]
        return (out if self.adapter is None else self.adapter(x, out)), bias

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> dict[str, Any]:
        made = super().sharded_state_dict(prefix, sharded_offsets, metadata)  # pyright: ignore[reportAttributeAccessIssue]
        if self.adapter is not None:
            made |= self.adapter.sharded_state_dict(f"{prefix}adapter.", sharded_offsets, metadata)
        return made


class Column(Adapted, ColumnParallelLinear):
    way = OUTPUTS


class Row(Adapted, RowParallelLinear):
    way = INPUTS
