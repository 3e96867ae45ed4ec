"""Weight sync by CUDA IPC, between processes that use the same accelerator.

Each rank copies its blocks to a buffer on its device and sends a handle to the receivers, which map
the buffer and verify the blocks in place.

Peak extra memory: a copy of the model (as sent), each rank's share on its own accelerator.
Receivers map it without another copy.

Not yet run anywhere: it can't be tested without an accelerator.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ratchet.errors import WeightSyncError
from ratchet.protocols import Shard
from ratchet.weight_sync.checksums import copy_with_checksum
from ratchet.weight_sync.transaction import PendingReceive, PushWeightSync
from ratchet.weight_sync.weight_blocks import (
    OutgoingPart,
    PartReader,
    SentPart,
    WeightBlock,
    align_bytes,
)


@dataclass(frozen=True)
class CudaIpcHandle:
    """A handle of a buffer, which another process maps by calling `rebuild`."""

    token: str
    rebuild: Callable[..., Tensor]
    arguments: tuple[Any, ...]


# By (session, rank): buffers that this process owns, and buffers of others that it has mapped.
_LENT: dict[tuple[str, int], tuple[Tensor, CudaIpcHandle]] = {}
_MAPPED: dict[tuple[str, int], tuple[str, Tensor]] = {}


class CudaIpcWeightSync(PushWeightSync):
    """Pushes weights through buffers on a shared accelerator."""

    writer = "ratchet.weight_sync.cuda_ipc:write"
    receiver = "ratchet.weight_sync.cuda_ipc:read"
    forgets = "ratchet.weight_sync.cuda_ipc:forget"

    async def _transfer(
        self, blocks: Sequence[Sequence[WeightBlock]], version: int, since: Mapping[str, Any] | None
    ) -> tuple[list[list[SentPart]], PendingReceive | None]:
        sizes = [sum(align_bytes(block.n_bytes) for block in of_rank) for of_rank in blocks]
        parts = await self._send({"session": self.session, "sizes": sizes}, since)
        loans = await self.senders.call(
            "send", "ratchet.weight_sync.cuda_ipc:lend", {"session": self.session}
        )
        return parts, (self.receiver, {"session": self.session, "loans": loans})


def write(
    outgoing: Iterator[OutgoingPart], rank: int, *, session: str, sizes: Sequence[int]
) -> list[SentPart]:
    """Copy a rank's blocks to its buffer, and return what was sent."""
    buffer_n = _buffer(session, rank, sizes[rank])
    place = 0
    parts = []
    for item in outgoing:
        target_n = buffer_n[place : place + item.n_bytes]
        parts.append(item.to_part(place, copy_with_checksum(target_n, item.tensor, item.dtype)))
        place += align_bytes(item.n_bytes)
    # Wait for the copies, since receivers read on other streams.
    torch.cuda.synchronize()
    return parts


def lend(weights: Iterator[Shard], rank: int, world: int, *, session: str) -> CudaIpcHandle:
    """Return the handle of a rank's buffer."""
    return _LENT[session, rank][1]


def read(
    blocks: Sequence[Sequence[WeightBlock]],
    receiver: int,
    *,
    session: str,
    loans: Sequence[CudaIpcHandle],
) -> PartReader:
    """Map the buffers of all ranks, and return a reader of their parts."""
    regions = []
    for rank, loan in enumerate(loans):
        mapped_token, bytes_n = _MAPPED.get((session, rank), ("", None))
        if bytes_n is None or mapped_token != loan.token:
            bytes_n = loan.rebuild(*loan.arguments)
            _MAPPED[session, rank] = (loan.token, bytes_n)
        regions.append(bytes_n)
    return lambda rank, part: part.read_from(regions[rank])


def forget(session: str) -> None:
    """Release the buffers of a session."""
    for cache in (_LENT, _MAPPED):
        for key in [key for key in cache if key[0] == session]:
            del cache[key]


def _buffer(session: str, rank: int, size: int) -> Tensor:
    """Return the buffer of a rank, with `size` bytes. Raises WeightSyncError without CUDA."""
    if not torch.cuda.is_available():
        raise WeightSyncError(
            "weight_sync.kind=cuda_ipc needs CUDA, and torch finds none here. Set "
            "weight_sync.kind=shared_memory.",
            rank=rank,
        )
    if (session, rank) not in _LENT or len(_LENT[session, rank][0]) != size:
        from torch.multiprocessing.reductions import reduce_tensor

        buffer_n = torch.empty(size, dtype=torch.uint8, device="cuda")
        rebuild, arguments = reduce_tensor(buffer_n)
        _LENT[session, rank] = (buffer_n, CudaIpcHandle(uuid.uuid4().hex, rebuild, arguments))
    return _LENT[session, rank][0]
