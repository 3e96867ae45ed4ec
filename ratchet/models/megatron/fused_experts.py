"""Keep adapters of transformers' fused experts (`lora.target_parameters`) expert by expert.

Megatron has the matrices of each expert in layers of their own, and so it has the adapters. In
files and weight syncs they have peft's form: one A [E r, i] with the rows of one expert after those
of another, and one B [o, r E] with the columns of all experts side by side for each rank
(`ratchet.models.lora.experts`). Gate and up projection share A; GPT-OSS alternates their outputs.

E = experts, r = rank, i = inputs and o = outputs of an expert's fused matrix.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import Tensor, nn

from ratchet.models.convert.stacked_experts import SINGLE
from ratchet.models.lora.experts import ExpertFactors
from ratchet.models.megatron.low_rank import LoRAFactors
from ratchet.models.weights.weight_layout import PEFT_PREFIX, WeightPiece
from ratchet.protocols import Shard

# peft's names of the factors of fused experts. Group 1 is the path of the experts' module.
FUSED_FACTOR = re.compile(r"(.+\.mlp\.experts)(\.base_layer)?\.lora_[AB]\.weight")


class FusedLoRAFactors(LoRAFactors):
    """One expert's A [r, i] and B of a fused parameter.

    B is [parts, rows, r], for gate and up two parts, or [rows, parts, r] where files alternate the
    outputs of the parts. So ranks of any tensor parallelism have blocks of a regular grid.
    """

    def __init__(
        self,
        weight: Tensor,
        adapted: Sequence[WeightPiece],
        rank: int,
        factors: ExpertFactors,
        expert: int,
    ) -> None:
        """Allocate the factors.

        Args:
            adapted: the blocks of gate and up, or of down, in the expert's matrix.
            factors: those of the fused parameter.
            expert: the expert's index in the layer.
        """
        super().__init__(weight, adapted, rank)
        n_parts, rows = len(adapted), len(adapted[0].rows)
        self.is_alternating = factors.is_transposed and n_parts > 1
        shape = (rows, n_parts, rank) if self.is_alternating else (n_parts, rows, rank)
        self.lora_B = nn.Parameter(self.lora_B.detach().view(shape))
        rows_dim = 0 if self.is_alternating else 1
        self.divided_dims = MappingProxyType({"lora_A": 1, "lora_B": rows_dim})
        name = f"{PEFT_PREFIX}{factors.path}.lora_{{}}.weight"
        (outputs, inputs), (row, column) = adapted[0].shape, adapted[0].offsets
        n_experts = factors.n_experts
        # The first row of B in files, and the rows here, of each run of rows.
        runs = (
            [(n_parts * row, range(n_parts * rows))]
            if self.is_alternating
            else [(outputs * part + row, piece.rows) for part, piece in enumerate(adapted)]
        )
        a_shape, b_shape = (n_experts * rank, inputs), (n_parts * outputs, rank * n_experts)
        self.pieces = {
            "lora_A": (
                WeightPiece(name.format("A"), a_shape, (expert * rank, column), range(rank)),
            ),
            "lora_B": tuple(
                WeightPiece(
                    name.format("B"),
                    b_shape,
                    (first, k * n_experts + expert),
                    local_rows,
                    range(k, k + 1),
                )
                for first, local_rows in runs
                for k in range(rank)
            ),
        }

    @property
    def b_rows(self) -> Tensor:
        b = self.lora_B.transpose(0, 1) if self.is_alternating else self.lora_B
        return b.flatten(0, 1)


def make_fused_factors(
    fused: Mapping[str, ExpertFactors], weight: Tensor, pieces: Sequence[WeightPiece], rank: int
) -> dict[str, LoRAFactors]:
    """Return the factors of an expert's matrix, by target; {} if its parameter gets no adapter.

    Args:
        fused: the factors of the fused parameters that get an adapter, by name.
        weight: the matrix of this rank.
        pieces: its blocks.
    """
    match = SINGLE.fullmatch(pieces[0].name)
    assert match is not None, "the pieces are of an expert's matrix"
    kind = "down_proj" if match[3] == "down" else "gate_up_proj"
    factors = fused.get(f"{match[1]}.{kind}")
    if factors is None:
        return {}
    return {kind: FusedLoRAFactors(weight, pieces, rank, factors, int(match[2]))}


def join_fused_blocks(blocks: Iterable[Shard]) -> Iterator[Shard]:
    """Yield blocks, with the adjacent ones of a fused factor joined, in as few as they fill.

    A rank has several blocks of each factor for each of its experts.
    """
    pending: dict[str, list[Shard]] = {}
    module = ""  # the layer of the pending blocks
    for block in blocks:
        match = FUSED_FACTOR.fullmatch(block.name)
        if match is None:
            yield block
            continue
        if match[1] != module:
            yield from _join_all(pending)
            pending, module = {}, match[1]
        pending.setdefault(block.name, []).append(block)
    yield from _join_all(pending)


def _join_all(blocks_by_name: dict[str, list[Shard]]) -> Iterator[Shard]:
    for blocks in blocks_by_name.values():
        yield from _join(_join(blocks, dim=1), dim=0)


def _join(blocks: Sequence[Shard], *, dim: int) -> list[Shard]:
    """Return the blocks of a matrix, with those that adjoin in a dimension joined."""
    other = 1 - dim
    rows: list[list[Shard]] = []
    for block in sorted(blocks, key=lambda block: (block.offsets[other], block.offsets[dim])):
        before = rows[-1][-1] if rows else None
        if (
            before is not None
            and before.offsets[other] == block.offsets[other]
            and before.tensor.shape[other] == block.tensor.shape[other]
            and before.offsets[dim] + before.tensor.shape[dim] == block.offsets[dim]
        ):
            rows[-1].append(block)
        else:
            rows.append([block])
    return [replace(row[0], tensor=torch.cat([block.tensor for block in row], dim)) for row in rows]
