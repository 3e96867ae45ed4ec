"""Weight sync inside one process: the generator gets the learner's own tensors, on their device.

Nothing is copied on the way, so weights on an accelerator stay there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from ratchet.models.weights.checksums import checksum
from ratchet.weight_sync.transaction import PushWeightSync
from ratchet.weight_sync.transport import WeightTransport
from ratchet.weight_sync.weight_blocks import OutgoingPart, PartReader, SentPart, WeightBlock

# The tensors of the push that is under way, by session.
_HANDED_OVER: dict[str, list[Tensor]] = {}


@dataclass(frozen=True)
class HandoverTransport(WeightTransport):
    """A transport inside one process, between a single sender and a single receiver."""

    def write(self, outgoing: Iterator[OutgoingPart], rank: int) -> list[SentPart]:
        """Keep references to the tensors, and return their checksums."""
        tensors, parts = [], []
        for part in outgoing:
            tensor = part.tensor.to(part.dtype).contiguous()
            parts.append(part.as_sent(0, checksum(tensor)))
            tensors.append(tensor)
        _HANDED_OVER[self.session] = tensors
        return parts

    def receive(self, blocks: Sequence[Sequence[WeightBlock]], receiver: int) -> PartReader:
        """Return a reader of the sender's own tensors."""
        tensors = _HANDED_OVER[self.session]
        return lambda rank, part: tensors[part.block].view(-1)

    def forget(self) -> None:
        """Release the tensors."""
        _HANDED_OVER.pop(self.session, None)


class HandoverWeightSync(PushWeightSync[HandoverTransport]):
    """A weight sync between a learner and a generator in this process."""

    transport_class = HandoverTransport

    async def push(self, version: int) -> None:
        """Push a version, as every weight sync does, and keep no tensor of the learner."""
        transport = self.transport
        try:
            await super().push(version)
        finally:
            transport.forget()

    async def _transfer(
        self, blocks: Sequence[Sequence[WeightBlock]], base: int | None, version: int
    ) -> tuple[list[list[SentPart]], HandoverTransport]:
        return await self._send(self.transport, base, version), self.transport
