"""The blocks of weights that a weight sync moves, and the parts in which a rank sends them.

`WeightBlock` and `SentPart` are plain values, so a call to any process can carry them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ratchet.errors import WeightSyncError
from ratchet.protocols import Shard

# Alignment in bytes: a cache line, which is enough for every dtype.
ALIGNMENT = 64


# A tuple, because a push carries hundreds of blocks, and tuples are serialised fastest.
class WeightBlock(NamedTuple):
    """A rank's block of one weight."""

    name: str
    shape: tuple[int, ...]
    """Shape of the whole weight."""
    offsets: tuple[int, ...]
    """First index of the block along each axis."""
    sizes: tuple[int, ...]
    """Shape of the block."""
    dtype: str
    """Torch's name of the dtype in which the block is sent."""

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return math.prod(self.sizes)

    @property
    def n_bytes(self) -> int:
        """Return the number of bytes sent."""
        return self.numel * torch_dtype(self.dtype).itemsize

    def shard(self, tensor: Tensor) -> Shard:
        """Return a shard of this block with the values of `tensor`."""
        return Shard(self.name, self.shape, self.offsets, tensor.view(self.sizes))

    def select_from(self, whole: Tensor) -> Tensor:
        """Return a view of this block in the whole weight."""
        for axis, (offset, size) in enumerate(zip(self.offsets, self.sizes, strict=True)):
            whole = whole.narrow(axis, offset, size)
        return whole


@dataclass(frozen=True, slots=True)
class OutgoingPart:
    """A part that a rank is about to send."""

    block: int
    """Index of the block among the rank's blocks."""
    kind: str
    """"whole" is the whole block. A change is sent as two parts: "positions", the changed positions
    in the flattened block, and "values", their new values."""
    tensor: Tensor
    dtype: torch.dtype
    """The dtype to which the tensor is converted for sending."""
    block_checksum: str = ""
    """Only on the "values" part of a change: the checksum of the whole block once the change is
    applied. "" on other parts."""

    @property
    def n_bytes(self) -> int:
        return self.tensor.numel() * self.dtype.itemsize

    def as_sent(self, start: int, checksum: str) -> SentPart:
        """Return the `SentPart` of this part, which begins at byte `start`."""
        return SentPart(
            self.block,
            self.kind,
            dtype_name(self.dtype),
            self.tensor.numel(),
            start,
            checksum,
            self.block_checksum,
        )


class SentPart(NamedTuple):
    """A part that a rank has sent.

    Attributes:
        start: Offset of its first byte in the memory that `read_from` gets: all bytes that the rank
            sent, or the shared segment.
        checksum: Checksum of its bytes.
        block, kind, block_checksum: As in `OutgoingPart`.
    """

    block: int
    kind: str
    dtype: str
    numel: int
    start: int
    checksum: str
    block_checksum: str = ""

    @property
    def n_bytes(self) -> int:
        return self.numel * torch_dtype(self.dtype).itemsize

    def read_from(self, bytes_n: Tensor) -> Tensor:
        """Return the part's values as a flat tensor, from the memory that `start` refers to."""
        return bytes_n.narrow(0, self.start, self.n_bytes).view(torch_dtype(self.dtype))


# A function that reads a rank's part: (rank, part) -> the part's values as a flat tensor.
PartReader = Callable[[int, SentPart], Tensor]


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype with a name, such as "bfloat16"."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a torch dtype, without "torch."."""
    return str(dtype).removeprefix("torch.")


def resolve_sent_dtype(tensor: Tensor, dtype: str | None) -> torch.dtype:
    """Return the dtype in which a tensor is sent; only floating-point tensors are converted."""
    return torch_dtype(dtype) if dtype is not None and tensor.is_floating_point() else tensor.dtype


def align_bytes(n_bytes: int) -> int:
    """Return a number of bytes, rounded up to ALIGNMENT."""
    return -(-n_bytes // ALIGNMENT) * ALIGNMENT


def describe_block(shard: Shard, dtype: str | None) -> WeightBlock:
    """Return the description of a shard's block, with the dtype in which it is sent."""
    name = dtype_name(resolve_sent_dtype(shard.tensor, dtype))
    return WeightBlock(
        shard.name, tuple(shard.shape), tuple(shard.offsets), tuple(shard.tensor.shape), name
    )


def check_coverage(blocks_by_rank: Sequence[Sequence[WeightBlock]]) -> None:
    """Raise WeightSyncError unless the ranks together send every element of every weight once."""
    blocks_by_name: dict[str, list[tuple[int, WeightBlock]]] = {}
    for rank, blocks in enumerate(blocks_by_rank):
        for block in blocks:
            blocks_by_name.setdefault(block.name, []).append((rank, block))
    for name, weight_blocks in blocks_by_name.items():
        expected = weight_blocks[0][1]
        for rank, block in weight_blocks:
            if (block.shape, block.dtype) != (expected.shape, expected.dtype):
                raise WeightSyncError(
                    f"weight '{name}' is {block.dtype} {block.shape} on rank {rank}, and "
                    f"{expected.dtype} {expected.shape} on rank "
                    f"{weight_blocks[0][0]}: the ranks run different models",
                    tensor=name,
                    rank=rank,
                )
        for (first_rank, first), (rank, second) in itertools.combinations(weight_blocks, 2):
            if _overlap(first, second):
                raise WeightSyncError(
                    f"ranks {first_rank} and {rank} send the same elements of weight '{name}'",
                    tensor=name,
                    rank=rank,
                )
        missing = math.prod(expected.shape) - sum(block.numel for _, block in weight_blocks)
        if missing:
            raise WeightSyncError(
                f"no rank sends {missing} of the elements of weight '{name}' {expected.shape}",
                tensor=name,
            )


def _overlap(a: WeightBlock, b: WeightBlock) -> bool:
    """True if two blocks of a weight share elements."""
    spans = zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True)
    return all(max(x, y) < min(x + n, y + m) for x, n, y, m in spans)


def list_whole_blocks(shards: Iterator[Shard], dtype: str | None) -> Iterator[OutgoingPart]:
    """Yield every shard as one whole part."""
    for index, shard in enumerate(shards):
        yield OutgoingPart(
            index, "whole", shard.tensor.detach(), resolve_sent_dtype(shard.tensor, dtype)
        )
