"""The blocks of weights that a weight sync moves, and the parts in which a rank sends them.

They are plain values, which any call can carry.
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

# Bytes of a cache line, which is enough for every dtype.
ALIGNMENT = 64


# A tuple, like `ModelShard`: hundreds travel with a push, and tuples are serialised fastest.
class WeightBlock(NamedTuple):
    """A rank's block of one weight.

    shape: of the whole weight.
    dtype: torch's name of the dtype that is sent.
    """

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: str

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.sizes)

    @property
    def n_bytes(self) -> int:
        """The size in bytes, as sent."""
        return self.numel * torch_dtype(self.dtype).itemsize

    def shard(self, tensor: Tensor) -> Shard:
        """Return the block as a shard with these numbers."""
        return Shard(self.name, self.shape, self.offsets, tensor.view(self.sizes))

    def cut(self, whole: Tensor) -> Tensor:
        """Return the view of this block in a whole weight."""
        for axis, (offset, size) in enumerate(zip(self.offsets, self.sizes, strict=True)):
            whole = whole.narrow(axis, offset, size)
        return whole


@dataclass(frozen=True, slots=True)
class OutgoingPart:
    """A part that a rank is about to send.

    block: number of the rank's block.
    kind: "whole" is the block. A change is two parts: "at", the changed positions in the flattened
      block, and "to", their new values.
    dtype: what the tensor is converted to for sending.
    result: of a change, the checksum of the whole block after it.
    """

    block: int
    kind: str
    tensor: Tensor
    dtype: torch.dtype
    result: str = ""

    @property
    def n_bytes(self) -> int:
        return self.tensor.numel() * self.dtype.itemsize

    def to_part(self, place: int, checksum: str) -> SentPart:
        """Return the description of this part once it has been sent."""
        return SentPart(
            self.block,
            self.kind,
            dtype_name(self.dtype),
            self.tensor.numel(),
            place,
            checksum,
            self.result,
        )


class SentPart(NamedTuple):
    """A part that a rank has sent.

    place: first byte, in all that the rank sent.
    checksum: of the sent bytes.
    """

    block: int
    kind: str
    dtype: str
    numel: int
    place: int
    checksum: str
    result: str = ""

    @property
    def n_bytes(self) -> int:
        return self.numel * torch_dtype(self.dtype).itemsize

    def read_from(self, bytes_n: Tensor) -> Tensor:
        """Return the part's numbers, from all the bytes that the rank sent."""
        return bytes_n.narrow(0, self.place, self.n_bytes).view(torch_dtype(self.dtype))


# (outgoing, rank, **options) -> what was sent
PartWriter = Callable[..., list[SentPart]]
# (rank, part) -> its numbers, flat
PartReader = Callable[[int, SentPart], Tensor]


def torch_dtype(name: str) -> torch.dtype:
    """Return torch's dtype of a name."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of torch's dtype."""
    return str(dtype).removeprefix("torch.")


def resolve_sent_dtype(tensor: Tensor, dtype: str | None) -> torch.dtype:
    """Return the dtype in which a tensor is sent; only floating-point tensors are converted."""
    return torch_dtype(dtype) if dtype is not None and tensor.is_floating_point() else tensor.dtype


def align_bytes(n_bytes: int) -> int:
    """Return the bytes, rounded up to the alignment."""
    return -(-n_bytes // ALIGNMENT) * ALIGNMENT


def describe_block(shard: Shard, dtype: str | None) -> WeightBlock:
    """Return the block of a shard, as it would be sent."""
    name = dtype_name(resolve_sent_dtype(shard.tensor, dtype))
    return WeightBlock(
        shard.name, tuple(shard.shape), tuple(shard.offsets), tuple(shard.tensor.shape), name
    )


def check_cover(by_rank: Sequence[Sequence[WeightBlock]]) -> None:
    """Raise WeightSyncError unless the ranks together have each number of each weight once."""
    blocks_by_name: dict[str, list[tuple[int, WeightBlock]]] = {}
    for rank, blocks in enumerate(by_rank):
        for block in blocks:
            blocks_by_name.setdefault(block.name, []).append((rank, block))
    for name, weight_blocks in blocks_by_name.items():
        first = weight_blocks[0][1]
        for rank, block in weight_blocks:
            if (block.shape, block.dtype) != (first.shape, first.dtype):
                raise WeightSyncError(
                    f"weight '{name}' is {block.dtype} {block.shape} on rank {rank}, and "
                    f"{first.dtype} {first.shape} on rank "
                    f"{weight_blocks[0][0]}: the ranks run different models",
                    tensor=name,
                    rank=rank,
                )
        for (_, a), (rank, b) in itertools.combinations(weight_blocks, 2):
            if _overlap(a, b):
                raise WeightSyncError(
                    f"two ranks send the same numbers of weight '{name}'", tensor=name, rank=rank
                )
        missing = math.prod(first.shape) - sum(block.numel for _, block in weight_blocks)
        if missing:
            raise WeightSyncError(
                f"no rank sends {missing} of the numbers of weight '{name}' {first.shape}",
                tensor=name,
            )


def _overlap(a: WeightBlock, b: WeightBlock) -> bool:
    """True if two blocks of a weight share numbers."""
    spans = zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True)
    return all(max(x, y) < min(x + n, y + m) for x, n, y, m in spans)


def list_whole_blocks(shards: Iterator[Shard], dtype: str | None) -> Iterator[OutgoingPart]:
    """Yield every block as a whole."""
    for index, shard in enumerate(shards):
        yield OutgoingPart(
            index, "whole", shard.tensor.detach(), resolve_sent_dtype(shard.tensor, dtype)
        )
