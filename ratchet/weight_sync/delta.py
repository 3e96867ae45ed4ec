"""Delta weight sync: send the positions and new values of changed weights, without loss.

Small steps leave most bytes of bfloat16 weights unchanged (about 99 % of them at a learning rate of
3e-6). Both ends keep the weights of the last push: each rank of the learner keeps the blocks that
it sends, and each receiver keeps all blocks. Changes can be applied only to the version that they
were computed from. After they are applied, each block must have the sender's checksum.

Peak extra memory:
- between pushes: the model's bytes at each receiver, and the bytes of its own blocks at each rank;
- while a block is compared: its bytes, and 9 bytes for each of its elements;
- during a push: the transport's buffers, at most as large as for a push of whole blocks; through
  collectives also all changes of a rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ratchet.errors import DeltaRefused, WeightSyncError
from ratchet.models.weights.checksums import checksum, has_checksum
from ratchet.protocols import Shard
from ratchet.weight_sync.weight_blocks import (
    OutgoingPart,
    PartReader,
    SentPart,
    WeightBlock,
    resolve_sent_dtype,
)

# The dtype of a position within a block.
POSITION_DTYPE = torch.int32
# Integer dtypes by width in bytes.
WORD_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class _SentWeights:
    """The blocks of a rank's last push, in the dtype in which they were sent."""

    def __init__(self) -> None:
        self.version: int | None = None
        self.blocks: list[Tensor] = []


# The last pushes of this process, by session.
_SENT: dict[str, _SentWeights] = {}


def forget(session: str) -> None:
    """Release the weights that this process keeps for a session."""
    _SENT.pop(session, None)


def view_as_words(tensor: Tensor) -> Tensor:
    """Return a flat view of a tensor as integers of its dtype's width.

    Comparing them compares bits: identical NaNs are equal, and 0.0 differs from -0.0.
    """
    return tensor.reshape(-1).view(WORD_DTYPES[tensor.dtype.itemsize])


def find_changed_words(new: Tensor, old: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return (positions [c], new words [c]) of the changed words; positions are int32, ascending.

    n = number of words in the block, c = number of changed words. Return None if sending the whole
    block takes no more bytes than the changes, or if its positions don't fit int32.
    """
    new_n = view_as_words(new)
    old_n = view_as_words(old)
    positions_c = (new_n != old_n).nonzero().squeeze(1)
    change_bytes = POSITION_DTYPE.itemsize + new.dtype.itemsize
    if (
        len(positions_c) * change_bytes >= new_n.numel() * new.dtype.itemsize
        or new_n.numel() > torch.iinfo(POSITION_DTYPE).max
    ):
        return None
    return positions_c.to(POSITION_DTYPE), new_n[positions_c]


def apply_changed_words(old: Tensor, positions_c: Tensor, values_c: Tensor) -> None:
    """Apply changes in place. Raises WeightSyncError for a position outside the block."""
    old_n = view_as_words(old)
    if len(positions_c) != len(values_c) or (
        len(positions_c) and not 0 <= int(positions_c.min()) <= int(positions_c.max()) < len(old_n)
    ):
        raise WeightSyncError("a change lies outside of its block")
    old_n[positions_c.long()] = values_c


def iterate_changes(
    weights: Iterator[Shard], dtype: str | None, *, session: str, base: int | None, version: int
) -> Iterator[OutgoingPart]:
    """Yield the changes from version `base` to `version`.

    Blocks are sent whole if the rank's last push was not version `base`.
    """
    last_push = _SENT.setdefault(session, _SentWeights())
    sends_whole = base is None or last_push.version != base
    # Until all blocks have been compared, the stored blocks belong to no version.
    last_push.version = None
    sent_blocks: list[Tensor] = []
    for index, shard in enumerate(weights):
        new_dtype = resolve_sent_dtype(shard.tensor, dtype)
        new = shard.tensor.detach().to(new_dtype).contiguous()
        if (
            sends_whole
            or last_push.blocks[index].shape != new.shape
            or last_push.blocks[index].dtype != new_dtype
        ):
            sent_blocks.append(new.clone())
            yield OutgoingPart(index, "whole", new, new_dtype)
            continue
        old = last_push.blocks[index]
        sent_blocks.append(old)
        changed = find_changed_words(new, old)
        if changed is None:
            old.copy_(new)
            yield OutgoingPart(index, "whole", new, new_dtype)
        elif len(changed[0]):
            apply_changed_words(old, *changed)
            block_checksum = checksum(old)
            yield OutgoingPart(index, "positions", changed[0], POSITION_DTYPE)
            yield OutgoingPart(index, "values", changed[1], changed[1].dtype, block_checksum)
    last_push.blocks = sent_blocks
    last_push.version = version


class ReceivedWeights:
    """The weights of the last push at a receiver.

    version: None before the first push and after a failed one.
    """

    def __init__(self) -> None:
        self.version: int | None = None
        # Keys are (rank, index of the block).
        self.blocks: dict[tuple[int, int], Tensor] = {}

    def apply_push(
        self,
        blocks_by_rank: Sequence[Sequence[WeightBlock]],
        parts: Sequence[Sequence[SentPart]],
        read_part: PartReader,
        *,
        base: int | None,
        version: int,
    ) -> Iterator[tuple[int, WeightBlock, Tensor]]:
        """Apply a push and yield (rank, block, its new value) for every block.

        Raises DeltaRefused, and then changes nothing, if this receiver does not have version
        `base`. Raises WeightSyncError if a changed block differs from the sender's; the next push
        must then be whole.
        """
        self._check_base(blocks_by_rank, parts, base, version)
        self.version = None
        for rank, rank_parts in enumerate(parts):
            positions: dict[int, Tensor] = {}
            for part in rank_parts:
                values = read_part(rank, part)
                key = (rank, part.block)
                if part.kind == "whole":
                    self._store_whole(key, values)
                elif part.kind == "positions":
                    positions[part.block] = values
                else:
                    apply_changed_words(
                        self.blocks[key],
                        positions.pop(part.block).to(self.blocks[key].device),
                        values,
                    )
                    if not has_checksum(self.blocks[key], part.block_checksum):
                        name = blocks_by_rank[rank][part.block].name
                        raise WeightSyncError(
                            f"weight '{name}' of rank {rank} has the wrong checksum after its "
                            "changes",
                            tensor=name,
                            rank=rank,
                        )
        for rank, blocks in enumerate(blocks_by_rank):
            for index, block in enumerate(blocks):
                yield rank, block, self.blocks[rank, index]

    def _store_whole(self, key: tuple[int, int], values: Tensor) -> None:
        """Store a whole block."""
        old = self.blocks.get(key)
        if old is not None and (old.shape, old.dtype) == (values.shape, values.dtype):
            old.copy_(values)
        else:
            self.blocks[key] = values.clone()

    def _check_base(
        self,
        blocks_by_rank: Sequence[Sequence[WeightBlock]],
        parts: Sequence[Sequence[SentPart]],
        base: int | None,
        version: int,
    ) -> None:
        """Raise DeltaRefused if changes start from a version that this receiver does not have."""
        for rank, rank_parts in enumerate(parts):
            whole_blocks = {part.block for part in rank_parts if part.kind == "whole"}
            # Blocks that are not sent whole build on the receiver's version, even if nothing in
            # them changed.
            names_not_sent_whole = [
                block.name
                for index, block in enumerate(blocks_by_rank[rank])
                if index not in whole_blocks
            ]
            if names_not_sent_whole and (
                self.version is None or base != self.version or version <= self.version
            ):
                current = "none" if self.version is None else f"version {self.version}"
                raise DeltaRefused(
                    f"changes from version {base} to {version} were refused: the receiver has "
                    f"{current}",
                    tensor=names_not_sent_whole[0],
                    rank=rank,
                )
