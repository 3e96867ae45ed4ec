"""Weight sync by shared memory on one host: ranks write their blocks, receivers read in place.

A segment is an anonymous file in the driver's memory (memfd), which other processes open by the
driver's process id. A segment needs no clean-up: the kernel frees it when the last process that
maps it has ended, even by a kill. A segment is created once, and each process maps it once. The
first push allocates its pages, and later pushes only copy.

The blocks of a weight are arranged as in the weight itself, so that a generator may use the
received memory in place (`Generator.adopted`). The next push then goes to a second segment,
because a segment that a generator uses is never written.

Peak extra memory: one segment of the model's bytes (as sent), which all processes share. Generators
that use it in place need a second segment, but hold no weights of their own.
"""

from __future__ import annotations

import mmap
import os
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ratchet.errors import WeightSyncError
from ratchet.models.weights.checksums import copy_with_checksum
from ratchet.weight_sync.transaction import PushWeightSync
from ratchet.weight_sync.transport import WeightTransport
from ratchet.weight_sync.weight_blocks import (
    ALIGNMENT,
    OutgoingPart,
    PartReader,
    SentPart,
    WeightBlock,
    align_bytes,
)
from ratchet.worker_protocols import Ranks

# Number of bytes before the weights; the segment's token is written to the first of them.
HEADER = ALIGNMENT

# [rank][block] -> (first byte, byte after the last).
BlockRanges = list[list[tuple[int, int]]]

# Segments that this process has mapped: session -> token -> bytes.
_MAPPED: dict[str, dict[str, Tensor]] = {}


class SharedMemorySegment:
    """A segment of shared memory, held by the driver.

    size: number of bytes, without the header.
    run: name of the run, shown in the memory maps of processes.
    token: random id in the header, by which a process knows that it has opened this segment.
    """

    def __init__(self, size: int, run: str) -> None:
        """Create the memory. Raise WeightSyncError if the system has no `memfd_create`."""
        if not hasattr(os, "memfd_create"):
            raise WeightSyncError(
                "shared memory between processes needs Linux. Set weight_sync.kind=files."
            )
        self.size = size
        self.token = uuid.uuid4().hex
        self._file = os.memfd_create(f"ratchet-{run}")
        os.ftruncate(self._file, HEADER + size)
        os.pwrite(self._file, self.token.encode(), 0)
        self.path = f"/proc/{os.getpid()}/fd/{self._file}"

    def close(self) -> None:
        os.close(self._file)


@dataclass(frozen=True)
class SharedMemoryTransport(WeightTransport):
    """A transport through one segment.

    path, token, size: see `SharedMemorySegment`.
    byte_ranges: the bytes of each rank's blocks; receivers don't need them.
    """

    path: str = ""
    token: str = ""
    size: int = 0
    byte_ranges: Sequence[Sequence[tuple[int, int]]] = ()

    def write(self, outgoing: Iterator[OutgoingPart], rank: int) -> list[SentPart]:
        """Copy a rank's blocks to their byte ranges, and return what was sent."""
        bytes_n = self._get_bytes()
        parts = []
        # block -> first byte of its next part.
        next_position: dict[int, int] = {}
        for part in outgoing:
            start, end = self.byte_ranges[rank][part.block]
            position = next_position.get(part.block, start)
            if position + part.n_bytes > end:
                raise WeightSyncError(
                    f"rank {rank} has more to send than it announced: "
                    f"{position + part.n_bytes - start} bytes",
                    rank=rank,
                )
            target_n = bytes_n[position : position + part.n_bytes]
            parts.append(
                part.as_sent(position, copy_with_checksum(target_n, part.tensor, part.dtype))
            )
            next_position[part.block] = position + align_bytes(part.n_bytes)
        return parts

    def receive(self, blocks: Sequence[Sequence[WeightBlock]], receiver: int) -> PartReader:
        """Map the segment, and return a reader of its parts."""
        bytes_n = self._get_bytes()
        return lambda rank, part: part.read_from(bytes_n)

    def forget(self) -> None:
        """Unmap the segments of a session."""
        _MAPPED.pop(self.session, None)

    def _get_bytes(self) -> Tensor:
        """Return the bytes of the segment, without its header."""
        segments = _MAPPED.setdefault(self.session, {})
        if self.token not in segments:
            mapped = _map_segment(self.path, self.token, HEADER + self.size)
            # Two segments stay mapped: the one in use and the one that is written.
            while len(segments) > 1:
                segments.pop(next(iter(segments)))
            segments[self.token] = mapped
        return segments[self.token][HEADER:]


def _map_segment(path: str, token: str, size: int) -> Tensor:
    """Map the segment. Raises WeightSyncError if this process can't open it."""
    try:
        with Path(path).open("r+b", buffering=0) as file:
            if file.read(len(token)) == token.encode():
                return torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=torch.uint8)
        reason = "it belongs to another process"
    except (OSError, ValueError) as error:
        reason = str(error)
    raise WeightSyncError(
        f"the shared memory {path} can't be opened here ({reason}): learner, generator and driver "
        "must be on one host and be allowed to look at each other's processes. Set "
        "weight_sync.kind=collective or weight_sync.kind=files."
    )


class SharedMemoryWeightSync(PushWeightSync[SharedMemoryTransport]):
    """A weight sync through shared memory.

    run: name of the run, see `SharedMemorySegment`.
    """

    transport_class = SharedMemoryTransport

    def __init__(self, senders: Ranks, receivers: Ranks, *, run: str = "", **options: Any) -> None:
        super().__init__(senders, receivers, **options)
        # With changes_only the segment holds only changes, which receivers apply to blocks that
        # they keep elsewhere. So it can't be used in place.
        self.lasting = not self.transport.changes_only
        self.run = run
        # (blocks by rank, their byte ranges, total bytes)
        self._layout: tuple[Sequence[Sequence[WeightBlock]], BlockRanges, int] | None = None
        # The segment of the next push, and the one that receivers use in place.
        self._next_segment: SharedMemorySegment | None = None
        self._adopted_segment: SharedMemorySegment | None = None

    @property
    def shared_bytes(self) -> int:
        """Return the total bytes of the segments."""
        return sum(
            segment.size
            for segment in (self._next_segment, self._adopted_segment)
            if segment is not None
        )

    async def _transfer(
        self, blocks: Sequence[Sequence[WeightBlock]], base: int | None, version: int
    ) -> tuple[list[list[SentPart]], SharedMemoryTransport]:
        if self._layout is None or self._layout[0] is not blocks:
            self._layout = (
                blocks,
                *lay_out_blocks(blocks, slack=2 * ALIGNMENT if self.transport.changes_only else 0),
            )
        _, byte_ranges, size = self._layout
        if self._next_segment is None or self._next_segment.size != size:
            _close(self._next_segment)
            self._next_segment = SharedMemorySegment(size, self.run)
        transport = replace(
            self.transport,
            path=self._next_segment.path,
            token=self._next_segment.token,
            size=size,
        )
        sending = replace(transport, byte_ranges=byte_ranges)
        return await self._send(sending, base, version), transport

    async def _commit(self, version: int) -> bool:
        # If the commit fails, a receiver may already use the segment. So it is never written again.
        segment = self._next_segment
        self._next_segment = None
        try:
            adopted = await super()._commit(version)
        except BaseException:
            _close(segment)
            raise
        if adopted:
            self._next_segment = self._adopted_segment
            self._adopted_segment = segment
        else:
            self._next_segment = segment
        return adopted

    async def close(self) -> None:
        await super().close()
        for segment in (self._next_segment, self._adopted_segment):
            _close(segment)
        self._next_segment = self._adopted_segment = None


def _close(segment: SharedMemorySegment | None) -> None:
    if segment is not None:
        segment.close()


def lay_out_blocks(
    blocks_by_rank: Sequence[Sequence[WeightBlock]], *, slack: int = 0
) -> tuple[BlockRanges, int]:
    """Return the byte ranges of all blocks, and their total bytes.

    Weights follow one another, each with its blocks in the order of their offsets.

    slack: bytes added to each block, for the padding of a change. A change is sent as two parts,
      which are together smaller than the block, but are aligned separately. 0: the blocks of a
      weight follow one another without gaps.
    """
    blocks_by_name: dict[str, list[tuple[WeightBlock, int, int]]] = {}
    for rank, blocks in enumerate(blocks_by_rank):
        for index, block in enumerate(blocks):
            blocks_by_name.setdefault(block.name, []).append((block, rank, index))
    byte_ranges: BlockRanges = [[(0, 0)] * len(blocks) for blocks in blocks_by_rank]
    position = 0
    for weight_blocks in blocks_by_name.values():
        for block, rank, index in sorted(weight_blocks, key=lambda located: located[0].offsets):
            end = position + (align_bytes(block.n_bytes) + slack if slack else block.n_bytes)
            byte_ranges[rank][index] = (position, end)
            position = end
        position = align_bytes(position)
    return byte_ranges, position
