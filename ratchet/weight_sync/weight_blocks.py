"""What moves: blocks of weights, and the parts in which a rank sends them. Plain values, that any
call can carry."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ratchet.errors import LinkError
from ratchet.protocols import Shard

ALIGNMENT = 64  # bytes: of a cache line, and enough for every dtype


# as is Part: hundreds of them travel with a push, and tuples are packed soonest
class Block(NamedTuple):
    """A rank's block of one weight. shape: of the whole weight. dtype: torch's name of what is
    sent."""

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: str

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    @property
    def n_bytes(self) -> int:
        return self.numel * torch_dtype(self.dtype).itemsize

    def shard(self, tensor: Tensor) -> Shard:
        return Shard(self.name, self.shape, self.offsets, tensor.view(self.sizes))

    def cut(self, whole: Tensor) -> Tensor:
        """The block of a whole weight."""
        for axis, (offset, size) in enumerate(zip(self.offsets, self.sizes, strict=True)):
            whole = whole.narrow(axis, offset, size)
        return whole


@dataclass(frozen=True, slots=True)
class Outgoing:
    """What a rank is about to send of its block number `block`.

    kind: "whole", the block; or two parts, "at", the positions in the flattened block that changed,
    and "to", what is there now. dtype: what the tensor is converted to on its way. result: of a
    change, the checksum of the whole block after it.
    """

    block: int
    kind: str
    tensor: Tensor
    dtype: torch.dtype
    result: str = ""

    @property
    def n_bytes(self) -> int:
        return self.tensor.numel() * self.dtype.itemsize

    def at(self, place: int, checksum: str) -> Part:
        return Part(
            self.block,
            self.kind,
            dtype_name(self.dtype),
            self.tensor.numel(),
            place,
            checksum,
            self.result,
        )


class Part(NamedTuple):
    """What a rank has sent. place: in bytes, in all that it sent. checksum: of what was sent."""

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

    def of(self, bytes_n: Tensor) -> Tensor:
        """Its numbers, among all the bytes that the rank sent."""
        return bytes_n.narrow(0, self.place, self.n_bytes).view(torch_dtype(self.dtype))


Write = Callable[..., list[Part]]  # (outgoing, rank, **options)
Open = Callable[[int, Part], Tensor]  # by (rank, part): its numbers, flat


def torch_dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def sent_dtype(tensor: Tensor, wanted: str | None) -> torch.dtype:
    """What is not floating point is never converted."""
    return (
        torch_dtype(wanted) if wanted is not None and tensor.is_floating_point() else tensor.dtype
    )


def aligned(n_bytes: int) -> int:
    return -(-n_bytes // ALIGNMENT) * ALIGNMENT


def block_of(shard: Shard, dtype: str | None) -> Block:
    name = dtype_name(sent_dtype(shard.tensor, dtype))
    return Block(
        shard.name, tuple(shard.shape), tuple(shard.offsets), tuple(shard.tensor.shape), name
    )


def check_cover(by_rank: Sequence[Sequence[Block]]) -> None:
    """Raises LinkError unless the ranks together have each number of each weight exactly once."""
    found: dict[str, list[tuple[int, Block]]] = {}
    for rank, blocks in enumerate(by_rank):
        for block in blocks:
            found.setdefault(block.name, []).append((rank, block))
    for name, own in found.items():
        first = own[0][1]
        for rank, block in own:
            if (block.shape, block.dtype) != (first.shape, first.dtype):
                raise LinkError(
                    f"weight '{name}' is {block.dtype} {block.shape} on rank {rank}, and "
                    f"{first.dtype} {first.shape} on rank "
                    f"{own[0][0]}: the ranks run different models",
                    tensor=name,
                    rank=rank,
                )
        for (_, a), (rank, b) in itertools.combinations(own, 2):
            if _overlap(a, b):
                raise LinkError(
                    f"two ranks send the same numbers of weight '{name}'", tensor=name, rank=rank
                )
        missing = math.prod(first.shape) - sum(block.numel for _, block in own)
        if missing:
            raise LinkError(
                f"no rank sends {missing} of the numbers of weight '{name}' {first.shape}",
                tensor=name,
            )


def _overlap(a: Block, b: Block) -> bool:
    spans = zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True)
    return all(max(x, y) < min(x + n, y + m) for x, n, y, m in spans)


def sends(shards: Iterator[Shard], dtype: str | None) -> Iterator[Outgoing]:
    """Every block as a whole."""
    for index, shard in enumerate(shards):
        yield Outgoing(index, "whole", shard.tensor.detach(), sent_dtype(shard.tensor, dtype))
