"""The base class of weight transports: objects that move blocks from ranks to receivers.

A call carries the transport itself to the processes of the learner and of the generator.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ratchet.models.weights.checksums import checksum
from ratchet.protocols import Shard
from ratchet.weight_sync import delta
from ratchet.weight_sync.weight_blocks import (
    OutgoingPart,
    PartReader,
    SentPart,
    WeightBlock,
    describe_block,
    list_whole_blocks,
    torch_dtype,
)


@dataclass(frozen=True)
class WeightTransport:
    """A picklable description of how weights move; a subclass implements `write` and `receive`.

    `describe`, `send`, `compute_checksums` and `forget_sent` run at each rank of the learner. Their
    first arguments are the rank's weights and its index.

    session: the key under which a process keeps state between pushes.
    dtype: the sender converts floating-point weights to it; None: they keep their own dtype.
    changes_only: send only changes since the last version, if all receivers have it.
    skip_frozen: leave out frozen weights.
    """

    session: str
    dtype: str | None = None
    changes_only: bool = False
    skip_frozen: bool = False

    def describe(self, weights: Iterator[Shard], rank: int) -> list[WeightBlock]:
        """Return the descriptions of the blocks that the rank would send."""
        return [describe_block(shard, self.dtype) for shard in self._select(weights)]

    def _select(self, weights: Iterator[Shard]) -> Iterator[Shard]:
        return (shard for shard in weights if not (self.skip_frozen and shard.is_frozen))

    def send(
        self, weights: Iterator[Shard], rank: int, *, base: int | None, version: int
    ) -> list[SentPart]:
        """Send the rank's blocks, and return what was sent.

        base: the earlier version that all receivers have, for changes; None: blocks are sent whole.
        """
        selected = self._select(weights)
        if not self.changes_only:
            return self.write(list_whole_blocks(selected, self.dtype), rank)
        changes = delta.iterate_changes(
            selected, self.dtype, session=self.session, base=base, version=version
        )
        return self.write(changes, rank)

    def compute_checksums(
        self, weights: Iterator[Shard], rank: int
    ) -> list[tuple[WeightBlock, str]]:
        """Return the rank's blocks, each with the checksum of the bytes to send."""
        blocks = []
        for shard in weights:
            block = describe_block(shard, self.dtype)
            tensor = shard.tensor.detach().to(torch_dtype(block.dtype)).contiguous()
            blocks.append((block, checksum(tensor)))
        return blocks

    def forget_sent(self, weights: Iterator[Shard], rank: int) -> None:
        """Release everything that the rank keeps for the session."""
        delta.forget(self.session)
        self.forget()

    def write(self, outgoing: Iterator[OutgoingPart], rank: int) -> list[SentPart]:
        """Send a rank's parts, and return what was sent."""
        raise NotImplementedError

    def receive(self, blocks: Sequence[Sequence[WeightBlock]], receiver: int) -> PartReader:
        """Return a reader of the parts of all ranks.

        blocks: the announced blocks, by rank.
        receiver: the index of this end among the receivers.
        """
        raise NotImplementedError

    def forget(self) -> None:
        """Release what this process keeps for the session."""
