"""Only what changed since the version before: positions and new values, bit by bit, so that nothing
is lost.

Small steps leave most bytes of bfloat16 weights as they were (at a learning rate of 3e-6 about 99 %
of them). Both ends keep the weights of the last push: a rank its blocks, a receiver all of them.
Changes apply to one version only, and after them each block has to have the checksum that it has at
the sender.

Peak extra memory: model bytes at the receiver and each rank's share of them at the ranks, kept
between pushes; while a block is compared, its bytes, and 9 bytes for each number of it; and what
the transport takes, for at most as many bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ratchet.errors import DeltaRefused, LinkError
from ratchet.protocols import Shard
from ratchet.weight_sync.checksums import agrees, checksum
from ratchet.weight_sync.weight_blocks import Block, Open, Outgoing, Part, sent_dtype

POSITION = torch.int32  # within a block
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class _Sent:
    """What a rank sent last, as it sent it."""

    def __init__(self) -> None:
        self.version: int | None = None
        self.blocks: list[Tensor] = []


_SENT: dict[str, _Sent] = {}  # of this process, by session


def forget(session: str) -> None:
    _SENT.pop(session, None)


def words(tensor: Tensor) -> Tensor:
    """Flat, as whole numbers of the same width: so NaNs and zeros of either sign are compared by
    their bits."""
    return tensor.reshape(-1).view(WORDS[tensor.dtype.itemsize])


def difference(new: Tensor, old: Tensor) -> tuple[Tensor, Tensor] | None:
    """(positions [c], int32, ascending, new words [c]) of what differs; None where sending all is
    no more."""
    new_n, old_n = words(new), words(old)
    at_c = (new_n != old_n).nonzero().squeeze(1)
    per_change = POSITION.itemsize + new.dtype.itemsize
    if (
        len(at_c) * per_change >= new_n.numel() * new.dtype.itemsize
        or new_n.numel() > torch.iinfo(POSITION).max
    ):
        return None
    return at_c.to(POSITION), new_n[at_c]


def apply(old: Tensor, at_c: Tensor, to_c: Tensor) -> None:
    """In place. Raises LinkError for a position that the block doesn't have."""
    old_n = words(old)
    if len(at_c) != len(to_c) or (
        len(at_c) and not 0 <= int(at_c.min()) <= int(at_c.max()) < len(old_n)
    ):
        raise LinkError("a change lies outside of its block")
    old_n[at_c.long()] = to_c


def changes(
    weights: Iterator[Shard], dtype: str | None, *, session: str, base: int | None, version: int
) -> Iterator[Outgoing]:
    """What makes `version` of the version `base`; whole blocks where the rank did not send `base`
    last."""
    sent = _SENT.setdefault(session, _Sent())
    fresh = base is None or sent.version != base
    sent.version = None  # until the last block has been compared
    kept: list[Tensor] = []
    for index, shard in enumerate(weights):
        wanted = sent_dtype(shard.tensor, dtype)
        new = shard.tensor.detach().to(wanted).contiguous()
        if fresh or sent.blocks[index].shape != new.shape or sent.blocks[index].dtype != wanted:
            kept.append(new.clone())
            yield Outgoing(index, "whole", new, wanted)
            continue
        old = sent.blocks[index]
        kept.append(old)
        found = difference(new, old)
        if found is None:
            old.copy_(new)
            yield Outgoing(index, "whole", new, wanted)
        elif len(found[0]):
            apply(old, *found)
            result = checksum(old)
            yield Outgoing(index, "at", found[0], POSITION)
            yield Outgoing(index, "to", found[1], found[1].dtype, result)
    sent.blocks, sent.version = kept, version


class Received:
    """The weights of the last push, at a receiver. version: None where they are of none, as after a
    push that failed."""

    def __init__(self) -> None:
        self.version: int | None = None
        self.blocks: dict[tuple[int, int], Tensor] = {}  # by (rank, number of the block)

    def take(
        self,
        by_rank: Sequence[Sequence[Block]],
        parts: Sequence[Sequence[Part]],
        open_part: Open,
        *,
        base: int | None,
        version: int,
    ) -> Iterator[tuple[int, Block, Tensor]]:
        """(rank, block, its new value) of every block. Raises DeltaRefused before anything is
        touched, LinkError where the result is not what it is at the sender; the next push must then
        be whole."""
        self._check(by_rank, parts, base, version)
        self.version = None
        for rank, own in enumerate(parts):
            positions: dict[int, Tensor] = {}
            for part in own:
                numbers = open_part(rank, part)
                key = (rank, part.block)
                if part.kind == "whole":
                    self._replace(key, numbers)
                elif part.kind == "at":
                    positions[part.block] = numbers
                else:
                    apply(
                        self.blocks[key],
                        positions.pop(part.block).to(self.blocks[key].device),
                        numbers,
                    )
                    if not agrees(self.blocks[key], part.result):
                        name = by_rank[rank][part.block].name
                        raise LinkError(
                            f"weight '{name}' of rank {rank} is not what it should be after its "
                            "changes",
                            tensor=name,
                            rank=rank,
                        )
        for rank, blocks in enumerate(by_rank):
            for index, block in enumerate(blocks):
                yield rank, block, self.blocks[rank, index]

    def _replace(self, key: tuple[int, int], numbers: Tensor) -> None:
        old = self.blocks.get(key)
        if old is not None and (old.shape, old.dtype) == (numbers.shape, numbers.dtype):
            old.copy_(numbers)
        else:
            self.blocks[key] = numbers.clone()

    def _check(
        self,
        by_rank: Sequence[Sequence[Block]],
        parts: Sequence[Sequence[Part]],
        base: int | None,
        version: int,
    ) -> None:
        for rank, own in enumerate(parts):
            whole = {part.block for part in own if part.kind == "whole"}
            left = [block.name for index, block in enumerate(by_rank[rank]) if index not in whole]
            if left and (self.version is None or base != self.version or version <= self.version):
                has = "none" if self.version is None else f"version {self.version}"
                raise DeltaRefused(
                    f"changes from version {base} to {version} were refused: the receiver has "
                    f"{has}",
                    tensor=left[0],
                    rank=rank,
                )
