"""Read GPT-OSS's packed experts as the matrices of single experts, and the reverse.

Files of GPT-OSS have the experts of a layer in one tensor [experts, inputs, outputs], and the
outputs of gate and up alternate in it. The conversion tables have a matrix [outputs, inputs] of
each expert and projection. Their names are those of other families:
`mlp.experts.3.gate_proj.weight`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ratchet.models.model_source import ReadBlock
from ratchet.protocols import Shard

SINGLE = re.compile(r"(.+\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.(weight|bias)")
PACKED = re.compile(r"(.+\.mlp\.experts)\.(gate_up|down)_proj(_bias)?")


def find_packed_name(name: str) -> str:
    """Return the name of the tensor in files that has a weight: its own, unless it is packed."""
    match = SINGLE.fullmatch(name)
    if match is None:
        return name
    parent, _, projection, kind = match.groups()
    packed = "down" if projection == "down" else "gate_up"
    return f"{parent}.{packed}_proj{'_bias' if kind == 'bias' else ''}"


def pack_shapes(
    shapes: Mapping[str, tuple[int, ...]], n_experts: int
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors in files, from those of single experts' matrices."""
    packed_shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        packed = find_packed_name(name)
        if packed != name:
            n_alternating = 2 if "gate_up" in packed else 1
            shape = (n_experts, *shape[:0:-1], n_alternating * shape[0])
        packed_shapes[packed] = shape
    return packed_shapes


def read_single_experts(read: ReadBlock) -> ReadBlock:
    """Return a reader of single experts' matrices, given a reader of packed tensors."""

    def read_block(name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        match = SINGLE.fullmatch(name)
        if match is None:
            return read(name, offsets, sizes)
        n_alternating = 1 if match[3] == "down" else 2
        packed = read(
            find_packed_name(name),
            (int(match[2]), *offsets[:0:-1], n_alternating * offsets[0]),
            (1, *sizes[:0:-1], n_alternating * sizes[0]),
        )
        return packed[0, ..., int(match[3] == "up") :: n_alternating].t().contiguous()

    return read_block


def read_packed_experts(read: ReadBlock) -> ReadBlock:
    """Return a reader of packed tensors, given a reader of single experts' matrices."""

    def read_block(name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        match = PACKED.fullmatch(name)
        if match is None:
            return read(name, offsets, sizes)
        parent, packed, is_bias = match.groups()
        projections = ("down",) if packed == "down" else ("gate", "up")
        # Rows of single matrices, some of which may be needed of only one projection.
        first = offsets[-1] // len(projections)
        stop = -(-(offsets[-1] + sizes[-1]) // len(projections))

        def read_expert(expert: int) -> Tensor:
            blocks = [
                read(
                    f"{parent}.{expert}.{projection}_proj.{'bias' if is_bias else 'weight'}",
                    (first, *offsets[-2:0:-1]),
                    (stop - first, *sizes[-2:0:-1]),
                ).t()
                for projection in projections
            ]
            start = offsets[-1] - first * len(projections)
            return torch.stack(blocks, -1).flatten(-2)[..., start : start + sizes[-1]]

        return torch.stack([read_expert(e) for e in range(offsets[0], offsets[0] + sizes[0])])

    return read_block


def pack_blocks(blocks: Iterable[Shard], n_experts: int) -> Iterator[Shard]:
    """Yield blocks of packed tensors, given blocks of single experts' matrices.

    A block of gate is followed by the block of up with the same rows, because a Megatron parameter
    has both. The blocks of packed tensors are copies.
    """
    gate: Shard | None = None
    for block in blocks:
        match = SINGLE.fullmatch(block.name)
        if match is None:
            yield block
        elif match[3] == "gate":
            gate = block
        else:
            alternating = [block.tensor.t()]
            if match[3] == "up":
                assert gate is not None, "up follows gate in the tables"
                alternating.insert(0, gate.tensor.t())
            count = len(alternating)
            yield replace(
                block,
                name=find_packed_name(block.name),
                shape=(n_experts, *block.shape[:0:-1], count * block.shape[0]),
                offsets=(int(match[2]), *block.offsets[:0:-1], count * block.offsets[0]),
                tensor=torch.stack(alternating, -1).flatten(-2)[None],
            )
