"""Add LoRA to Megatron's parallel linear layers: out + scale B A x (arXiv:2106.09685, eq. 3).

A and B are divided like the layer. If the layer's outputs are divided over tensor-parallel ranks,
the rows of B are divided too, and each rank has the whole A. If its inputs are divided, the
columns of A are divided too, and each rank has the whole B. In both cases ranks exchange only A x,
which is r numbers per token. Of experts they exchange nothing here, because Megatron's dispatcher
of tokens gathers the inputs and sums the outputs of experts; the gradients of whole factors are
summed with those of the norms under sequence parallelism.

t = input tokens, u = output tokens (differs from t under sequence parallelism), 1 = Megatron's
batch dimension, r = rank of the adapter, i = inputs and o = outputs of the layer on this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
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

from ratchet.config.lora import LoRAConfig
from ratchet.models.lora.layers import SeededDropout, SwitchableAdapter, place_columns
from ratchet.models.weights.weight_layout import WeightPiece, make_factor_piece

FACTORS = ("lora_A", "lora_B")


def belongs_to_expert(parameter: Tensor) -> bool:
    """True if expert parallelism may give other ranks other parameters in this one's place."""
    return not getattr(parameter, "allreduce", True)  # only parameters of experts have it


@dataclass(frozen=True)
class FactorSharding:
    """The tensor-parallel sharding of an adapter's factors, for one kind of linear layer."""

    divided_factor: str  # the name of the divided factor
    # Communication of A x before B multiplies it, without and with sequence parallelism.
    communicate: Callable[..., Tensor]
    communicate_sequence: Callable[..., Tensor]

    @property
    def whole_factor(self) -> str:
        """The name of the factor that each rank has as a whole."""
        return FACTORS[1 - FACTORS.index(self.divided_factor)]


# The backward pass of each communication is the forward pass of its counterpart, so the gradient
# of A x is complete on every rank.
DIVIDED_OUTPUTS = FactorSharding(
    "lora_B", copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
)
DIVIDED_INPUTS = FactorSharding(
    "lora_A",
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)


class LoRAFactors(nn.Module):
    """The factors A [r, i] and B [rows, r] of one target, such as q_proj. They are uninitialised.

    The rows are those rows of the layer's matrix that belong to the target.
    """

    # The dimension in which a factor is divided, if it is.
    divided_dims: Mapping[str, int] = MappingProxyType({"lora_A": 1, "lora_B": 0})
    pieces: Mapping[str, tuple[WeightPiece, ...]]  # by factor

    def __init__(self, weight: Tensor, adapted: Sequence[WeightPiece], rank: int) -> None:
        """Allocate the factors; `adapted` are the target's blocks in the layer's matrix."""
        super().__init__()
        self.spans = [piece.rows for piece in adapted]
        empty = {"dtype": weight.dtype, "device": weight.device}
        self.lora_A = nn.Parameter(torch.empty(rank, weight.shape[1], **empty))
        self.lora_B = nn.Parameter(torch.empty(sum(map(len, self.spans)), rank, **empty))
        b_pieces: list[WeightPiece] = []
        for piece in adapted:
            b_pieces.append(
                make_factor_piece(piece, "lora_B", rank, b_pieces[-1].rows.stop if b_pieces else 0)
            )
        self.pieces = {
            "lora_A": (make_factor_piece(adapted[0], "lora_A", rank),),
            "lora_B": tuple(b_pieces),
        }

    def multiply_b(self, ax_ur: Tensor) -> list[tuple[range, Tensor]]:
        """Return (columns of the layer's output, B A x for these columns), computed from A x."""
        outputs = F.linear(ax_ur, self.b_rows).split([len(span) for span in self.spans], dim=-1)
        return list(zip(self.spans, outputs, strict=True))

    @property
    def b_rows(self) -> Tensor:
        """B [rows, r], in the order of the layer's rows."""
        return self.lora_B


class ParallelLoRA(SwitchableAdapter):
    """The adapter of one parallel linear layer, with factors for each target in its matrix."""

    def __init__(
        self,
        linear: AdaptableLinear,
        targets: Mapping[str, LoRAFactors],
        lora: LoRAConfig,
        name: str,
    ) -> None:
        """Mark the factors for Megatron.

        Args:
            targets: the factors of each target, by name.
            name: see `SeededDropout`.
        """
        super().__init__()
        weight = linear.weight
        self.sharding = linear.sharding
        self.group = linear.tp_group
        self.is_expert = linear.is_expert
        self.sequence = linear.sequence_parallel and not self.is_expert
        self.outputs = len(weight)
        self.scale = lora.scale
        self.targets = nn.ModuleDict(targets)
        # Ranks with different inputs need different dropout masks.
        has_own_inputs = self.sequence or self.sharding is DIVIDED_INPUTS
        suffix = f".{self.group.rank()}" if has_own_inputs else ""
        self.dropout = SeededDropout(lora.dropout, f"{name}{suffix}")
        for factors in targets.values():
            divided = self.sharding.divided_factor
            set_tensor_model_parallel_attributes(
                getattr(factors, divided), True, factors.divided_dims[divided], 1
            )
            # Under sequence parallelism each rank sees only some of the tokens, and of experts only
            # a part of the matrix. Megatron sums the gradients of parameters with this mark over
            # the ranks.
            whole = getattr(factors, self.sharding.whole_factor)
            whole.sequence_parallel = linear.sequence_parallel
            allreduce = not belongs_to_expert(weight)
            for parameter in factors.parameters():
                parameter.allreduce = allreduce  # pyright: ignore[reportAttributeAccessIssue]

    def forward(self, x_t1i: Tensor, out_u1o: Tensor) -> Tensor:
        if self.is_off:
            return out_u1o
        adapters = [cast(LoRAFactors, factors) for factors in self.targets.values()]
        a = torch.cat([factors.lora_A for factors in adapters])
        ax = F.linear(self.dropout(x_t1i), a) * self.scale
        sharding = self.sharding
        communicate = sharding.communicate_sequence if self.sequence else sharding.communicate
        if not self.is_expert:
            ax = communicate(ax, group=self.group)
        ax_parts = ax.split([len(factors.lora_A) for factors in adapters], dim=-1)
        parts = [
            part
            for factors, ax_part in zip(adapters, ax_parts, strict=True)
            for part in factors.multiply_b(ax_part)
        ]
        return out_u1o + place_columns(sorted(parts, key=lambda part: part[0].start), self.outputs)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> dict[str, Any]:
        """Return the factors in the form of Megatron's distributed checkpoints."""
        state: dict[str, Any] = {}
        divided = self.sharding.divided_factor
        for name, module in self.targets.items():
            factors = cast(LoRAFactors, module)
            state |= make_sharded_tensors_for_checkpoint(
                factors.state_dict(keep_vars=True),
                f"{prefix}targets.{name}.",
                {divided: factors.divided_dims[divided]},
                sharded_offsets,
                tp_group=self.group,
                dp_cp_group=metadata["dp_cp_group"],
            )
        return state


class AdaptableLinear(nn.Module):
    """A mixin of Megatron's parallel linear layers that lets them have an adapter."""

    sharding: FactorSharding
    weight: Tensor
    is_expert: bool
    sequence_parallel: bool
    tp_group: Any

    def __init__(self, *arguments: Any, **keys: Any) -> None:
        super().__init__(*arguments, **keys)
        self.adapter: ParallelLoRA | None = None

    def forward(self, x: Tensor, *arguments: Any, **keys: Any) -> tuple[Tensor, Any]:
        out, bias = super().forward(x, *arguments, **keys)  # pyright: ignore[reportAttributeAccessIssue]
        return (out if self.adapter is None else self.adapter(x, out)), bias

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> dict[str, Any]:
        """Return the map and its adapter in the form of Megatron's distributed checkpoints."""
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)  # pyright: ignore[reportAttributeAccessIssue]
        if self.adapter is not None:
            state |= self.adapter.sharded_state_dict(f"{prefix}adapter.", sharded_offsets, metadata)
        return state


class ColumnLinear(AdaptableLinear, ColumnParallelLinear):
    """A column-parallel linear layer, whose outputs are divided."""

    sharding = DIVIDED_OUTPUTS


class RowLinear(AdaptableLinear, RowParallelLinear):
    """A row-parallel linear layer, whose inputs are divided."""

    sharding = DIVIDED_INPUTS
