"""Weight sync of changes: positions and new values since the last version, without loss.

Small steps leave most bytes of bfloat16 weights unchanged (about 99 % of them at a learning rate of
3e-6). Both ends keep the weights of the last push: a rank its blocks, a receiver all of them.
Changes apply to one version only. After them each block must have the checksum that it has at the
sender.

Peak extra memory: model bytes at the receiver and each rank's share of them at the ranks, kept
between pushes; while a block is compared, its bytes, and 9 bytes for each number of it; and the
transport's memory, for at most as many bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ratchet.errors import DeltaRefused, WeightSyncError
from ratchet.protocols import Shard
from ratchet.weight_sync.checksums import checksum, has_checksum
from ratchet.weight_sync.weight_blocks import (
    OutgoingPart,
    PartReader,
    SentPart,
    WeightBlock,
    resolve_sent_dtype,
)

# The dtype of a position within a block.
POSITION = torch.int32
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class _SentWeights:
    """The blocks of a rank's last push, as they were sent."""

    def __init__(self) -> None:
        self.version: int | None = None
        self.blocks: list[Tensor] = []


# The last pushes of this process, by session.
_SENT: dict[str, _SentWeights] = {}


def forget(session: str) -> None:
    """Release the weights that a session keeps."""
    _SENT.pop(session, None)


def view_as_words(tensor: Tensor) -> Tensor:
    """Return a flat view as integers of the same width.

    NaNs and zeros of either sign are then compared by their bits.
    """
    return tensor.reshape(-1).view(WORDS[tensor.dtype.itemsize])


def find_changed_words(new: Tensor, old: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return (positions [c], int32, ascending, new words [c]) of the changed words.

    None if sending the whole block takes no more bytes.
    """
    new_n = view_as_words(new)
    old_n = view_as_words(old)
    at_c = (new_n != old_n).nonzero().squeeze(1)
    per_change = POSITION.itemsize + new.dtype.itemsize
    if (
        len(at_c) * per_change >= new_n.numel() * new.dtype.itemsize
        or new_n.numel() > torch.iinfo(POSITION).max
    ):
        return None
    return at_c.to(POSITION), new_n[at_c]


def apply_changed_words(old: Tensor, at_c: Tensor, to_c: Tensor) -> None:
    """Apply changes in place. Raises WeightSyncError for a position outside the block."""
    old_n = view_as_words(old)
    if len(at_c) != len(to_c) or (
        len(at_c) and not 0 <= int(at_c.min()) <= int(at_c.max()) < len(old_n)
    ):
        raise WeightSyncError("a change lies outside of its block")
    old_n[at_c.long()] = to_c


def changes(
    weights: Iterator[Shard], dtype: str | None, *, session: str, base: int | None, version: int
) -> Iterator[OutgoingPart]:
    """Yield the changes from version `base` to `version`.

    Blocks are whole if the last push of the rank was not `base`.
    """
    sent = _SENT.setdefault(session, _SentWeights())
    is_first = base is None or sent.version != base
    # Not a whole version until the last block has been compared.
    sent.version = None
    kept: list[Tensor] = []
    for index, shard in enumerate(weights):
        new_dtype = resolve_sent_dtype(shard.tensor, dtype)
        new = shard.tensor.detach().to(new_dtype).contiguous()
        if (
            is_first
            or sent.blocks[index].shape != new.shape
            or sent.blocks[index].dtype != new_dtype
        ):
            kept.append(new.clone())
            yield OutgoingPart(index, "whole", new, new_dtype)
            continue
        old = sent.blocks[index]
        kept.append(old)
        changed = find_changed_words(new, old)
        if changed is None:
            old.copy_(new)
            yield OutgoingPart(index, "whole", new, new_dtype)
        elif len(changed[0]):
            apply_changed_words(old, *changed)
            result = checksum(old)
            yield OutgoingPart(index, "at", changed[0], POSITION)
            yield OutgoingPart(index, "to", changed[1], changed[1].dtype, result)
    sent.blocks = kept
    sent.version = version


class ReceivedWeights:
    """The weights of the last push, at a receiver.

    version: None if they are of no version, as after a failed push.
    """

    def __init__(self) -> None:
        self.version: int | None = None
        # By (rank, number of the block).
        self.blocks: dict[tuple[int, int], Tensor] = {}

    def take(
        self,
        by_rank: Sequence[Sequence[WeightBlock]],
        parts: Sequence[Sequence[SentPart]],
        open_part: PartReader,
        *,
        base: int | None,
        version: int,
    ) -> Iterator[tuple[int, WeightBlock, Tensor]]:
        """Yield (rank, block, its new value) for every block.

        Raises DeltaRefused before anything is changed, and WeightSyncError if a block differs from
        the sender's after its changes. The next push must then be whole.
        """
        self._check(by_rank, parts, base, version)
        self.version = None
        for rank, rank_parts in enumerate(parts):
            positions: dict[int, Tensor] = {}
            for part in rank_parts:
                numbers = open_part(rank, part)
                key = (rank, part.block)
                if part.kind == "whole":
                    self._replace(key, numbers)
                elif part.kind == "at":
                    positions[part.block] = numbers
                else:
                    apply_changed_words(
                        self.blocks[key],
                        positions.pop(part.block).to(self.blocks[key].device),
                        numbers,
                    )
                    if not has_checksum(self.blocks[key], part.result):
                        name = by_rank[rank][part.block].name
                        raise WeightSyncError(
                            f"weight '{name}' of rank {rank} is not what it should be after its "
                            "changes",
                            tensor=name,
                            rank=rank,
                        )
        for rank, blocks in enumerate(by_rank):
            for index, block in enumerate(blocks):
                yield rank, block, self.blocks[rank, index]

    def _replace(self, key: tuple[int, int], numbers: Tensor) -> None:
        """Store a whole block."""
        old = self.blocks.get(key)
        if old is not None and (old.shape, old.dtype) == (numbers.shape, numbers.dtype):
            old.copy_(numbers)
        else:
            self.blocks[key] = numbers.clone()

    def _check(
        self,
        by_rank: Sequence[Sequence[WeightBlock]],
        parts: Sequence[Sequence[SentPart]],
        base: int | None,
        version: int,
    ) -> None:
        """Raise DeltaRefused for changes of a version that this end does not have."""
        for rank, rank_parts in enumerate(parts):
            whole = {part.block for part in rank_parts if part.kind == "whole"}
            changed = [
                block.name for index, block in enumerate(by_rank[rank]) if index not in whole
            ]
            if changed and (
                self.version is None or base != self.version or version <= self.version
            ):
                current = "none" if self.version is None else f"version {self.version}"
                raise DeltaRefused(
                    f"changes from version {base} to {version} were refused: the receiver has "
                    f"{current}",
                    tensor=changed[0],
                    rank=rank,
                )
