"""Weight sync by CUDA IPC, between processes that use the same accelerator.

Each rank copies its blocks to a buffer on its device and sends a handle to the receivers, which map
the buffer and verify the blocks in place.

Peak extra memory: one copy of the model in the dtype that is sent, split over the accelerators:
each holds the blocks of its ranks. Receivers map these without another copy.

This transport has not been run yet, because it can't be tested without an accelerator.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ratchet.errors import WeightSyncError
from ratchet.protocols import Shard
from ratchet.weight_sync.checksums import copy_with_checksum
from ratchet.weight_sync.transaction import PushWeightSync
from ratchet.weight_sync.transport import WeightTransport
from ratchet.weight_sync.weight_blocks import (
    OutgoingPart,
    PartReader,
    SentPart,
    WeightBlock,
    align_bytes,
)


@dataclass(frozen=True)
class CudaIpcHandle:
    """A handle of a buffer, which another process maps by calling `rebuild`.

    token: random id of the buffer.
    """

    token: str
    rebuild: Callable[..., Tensor]
    arguments: tuple[Any, ...]


# Buffers that this process owns, by (session, rank).
_OWN_BUFFERS: dict[tuple[str, int], tuple[Tensor, CudaIpcHandle]] = {}
# Buffers of other processes that this process has mapped: (session, rank) -> (token, bytes).
_MAPPED_BUFFERS: dict[tuple[str, int], tuple[str, Tensor]] = {}


@dataclass(frozen=True)
class CudaIpcTransport(WeightTransport):
    """A transport through one buffer of each rank.

    sizes: bytes that each rank sends.
    handles: the buffers of the ranks, for receivers.
    """

    sizes: Sequence[int] = ()
    handles: Sequence[CudaIpcHandle] = ()

    def write(self, outgoing: Iterator[OutgoingPart], rank: int) -> list[SentPart]:
        """Copy a rank's blocks to its buffer, and return what was sent."""
        buffer_n = _get_buffer(self.session, rank, self.sizes[rank])
        position = 0
        parts = []
        for part in outgoing:
            target_n = buffer_n[position : position + part.n_bytes]
            parts.append(
                part.as_sent(position, copy_with_checksum(target_n, part.tensor, part.dtype))
            )
            position += align_bytes(part.n_bytes)
        # Wait for the copies, since receivers read on other streams.
        torch.cuda.synchronize()
        return parts

    def export_handle(self, weights: Iterator[Shard], rank: int) -> CudaIpcHandle:
        """Return the handle of a rank's buffer."""
        return _OWN_BUFFERS[self.session, rank][1]

    def receive(self, blocks: Sequence[Sequence[WeightBlock]], receiver: int) -> PartReader:
        """Map the buffers of all ranks, and return a reader of their parts."""
        buffers = []
        for rank, handle in enumerate(self.handles):
            mapped_token, mapped_buffer_n = _MAPPED_BUFFERS.get((self.session, rank), ("", None))
            if mapped_buffer_n is None or mapped_token != handle.token:
                mapped_buffer_n = handle.rebuild(*handle.arguments)
                _MAPPED_BUFFERS[self.session, rank] = (handle.token, mapped_buffer_n)
            buffers.append(mapped_buffer_n)
        return lambda rank, part: part.read_from(buffers[rank])

    def forget(self) -> None:
        """Release the buffers of a session."""
        for cache in (_OWN_BUFFERS, _MAPPED_BUFFERS):
            for key in [key for key in cache if key[0] == self.session]:
                del cache[key]


def _get_buffer(session: str, rank: int, size: int) -> Tensor:
    """Return the buffer of a rank, with `size` bytes. Raises WeightSyncError without CUDA."""
    if not torch.cuda.is_available():
        raise WeightSyncError(
            "weight_sync.kind=cuda_ipc needs CUDA, and torch finds none here. Set "
            "weight_sync.kind=shared_memory.",
            rank=rank,
        )
    if (session, rank) not in _OWN_BUFFERS or len(_OWN_BUFFERS[session, rank][0]) != size:
        from torch.multiprocessing.reductions import reduce_tensor

        buffer_n = torch.empty(size, dtype=torch.uint8, device="cuda")
        rebuild, arguments = reduce_tensor(buffer_n)
        _OWN_BUFFERS[session, rank] = (
            buffer_n,
            CudaIpcHandle(uuid.uuid4().hex, rebuild, arguments),
        )
    return _OWN_BUFFERS[session, rank][0]


class CudaIpcWeightSync(PushWeightSync[CudaIpcTransport]):
    """A weight sync through buffers on an accelerator that learner and generator share."""

    transport_class = CudaIpcTransport

    async def _transfer(
        self, blocks: Sequence[Sequence[WeightBlock]], base: int | None, version: int
    ) -> tuple[list[list[SentPart]], CudaIpcTransport]:
        sizes = [sum(align_bytes(block.n_bytes) for block in rank_blocks) for rank_blocks in blocks]
        transport = replace(self.transport, sizes=sizes)
        parts = await self._send(transport, base, version)
        handles = await self.senders.call("apply_to_weights", transport.export_handle)
        return parts, replace(transport, handles=handles)
