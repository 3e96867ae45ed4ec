"""Shared memory on one host: each rank writes its own blocks to their places, receivers read them
where they lie.

A segment has no name in any directory: it is a file of the driver's that exists in memory only, and
the others open it by the driver's process id. So there is nothing to clean up: the kernel frees it
when the last process that maps it has ended, however it ended. It is made once and mapped by each
process once: the first push pays for its pages, later ones only copy.

The blocks of a weight lie together as in the weight itself, so that a generator may go on to use
what it received where it lies (`Adopts`), and copies nothing. A second segment then takes the next
push: what serves is never written.

Peak extra memory: model bytes (as sent) for a segment, which all processes share; where generators
use it in place, a second one, and no weights of their own.
"""

from __future__ import annotations

import mmap
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ratchet.errors import LinkError
from ratchet.protocols import Ranks
from ratchet.weight_sync.checksums import copy_summed
from ratchet.weight_sync.transaction import PushLink, Waiting
from ratchet.weight_sync.weight_blocks import ALIGNMENT, Block, Open, Outgoing, Part, aligned

HEADER = ALIGNMENT  # bytes, of which the first are the segment's token

Places = list[list[tuple[int, int]]]  # by rank and block: (first byte, the one after the last)

_MAPPED: dict[str, dict[str, Tensor]] = {}  # of this process: session -> token -> bytes


class Segment:
    """The driver's hold on it. size: in bytes. run: seen in lists of processes' maps, for whoever
    looks there."""

    def __init__(self, size: int, run: str) -> None:
        """Raises LinkError where the system has no such memory."""
        if not hasattr(os, "memfd_create"):
            raise LinkError("shared memory between processes needs Linux: set link.kind=files")
        self.size, self.token = size, uuid.uuid4().hex
        self._file = os.memfd_create(f"ratchet-{run}")
        os.ftruncate(self._file, HEADER + size)
        os.pwrite(self._file, self.token.encode(), 0)
        self.path = f"/proc/{os.getpid()}/fd/{self._file}"

    def close(self) -> None:
        os.close(self._file)


class SharedMemoryLink(PushLink):
    """run: a name for the segments."""

    writer = "ratchet.weight_sync.shared_memory:write"
    receiver = "ratchet.weight_sync.shared_memory:read"
    forgets = "ratchet.weight_sync.shared_memory:forget"

    def __init__(self, senders: Ranks, receivers: Ranks, *, run: str = "", **options: Any) -> None:
        super().__init__(senders, receivers, **options)
        # changes are applied where the receiver keeps whole blocks
        self.lasting = not self.changes_only
        self.run = run
        # of the blocks that the ranks have
        self._laid: tuple[Sequence[Sequence[Block]], Places, int] | None = None
        self._free: Segment | None = None  # for the next push
        self._serving: Segment | None = None  # what receivers use in place

    @property
    def shared_bytes(self) -> int:
        """Of all its segments."""
        return sum(segment.size for segment in (self._free, self._serving) if segment is not None)

    async def _transfer(
        self, blocks: Sequence[Sequence[Block]], version: int, since: Mapping[str, Any] | None
    ) -> tuple[list[list[Part]], Waiting | None]:
        if self._laid is None or self._laid[0] is not blocks:
            self._laid = (blocks, *laid(blocks, slack=2 * ALIGNMENT if self.changes_only else 0))
        _, places, size = self._laid
        if self._free is None or self._free.size != size:
            _close(self._free)
            self._free = Segment(size, self.run)
        where = {
            "session": self.session,
            "path": self._free.path,
            "token": self._free.token,
            "size": size,
        }
        return await self._sent({"places": places, **where}, since), (self.receiver, where)

    async def _commit(self, version: int) -> bool:
        # where this fails, some receiver may use it already: nobody writes it again
        written, self._free = self._free, None
        try:
            adopted = await super()._commit(version)
        except BaseException:
            _close(written)
            raise
        self._free, self._serving = (
            (self._serving, written) if adopted else (written, self._serving)
        )
        return adopted

    async def close(self) -> None:
        await super().close()
        for segment in (self._free, self._serving):
            _close(segment)
        self._free = self._serving = None


def _close(segment: Segment | None) -> None:
    if segment is not None:
        segment.close()


def laid(by_rank: Sequence[Sequence[Block]], *, slack: int = 0) -> tuple[Places, int]:
    """Where blocks lie, and the bytes of all: weight after weight, each with its blocks in their
    order.

    slack: bytes that each block may take beyond its own; a change is two parts, together smaller
    than the block.
    """
    found: dict[str, list[tuple[Block, int, int]]] = {}
    for rank, blocks in enumerate(by_rank):
        for index, block in enumerate(blocks):
            found.setdefault(block.name, []).append((block, rank, index))
    places: Places = [[(0, 0)] * len(blocks) for blocks in by_rank]
    place = 0
    for own in found.values():
        for block, rank, index in sorted(own, key=lambda one: one[0].offsets):
            end = place + (aligned(block.n_bytes) + slack if slack else block.n_bytes)
            places[rank][index] = (place, end)
            place = end
        place = aligned(place)
    return places, place


def write(outgoing: Iterator[Outgoing], rank: int, *, places: Places, **segment: Any) -> list[Part]:
    bytes_n, parts = _bytes(**segment), []
    written: dict[int, int] = {}  # by block: where what comes next of it begins
    for item in outgoing:
        start, end = places[rank][item.block]
        place = written.get(item.block, start)
        if place + item.n_bytes > end:
            raise LinkError(
                f"rank {rank} has more to send than it said: {place + item.n_bytes - start} bytes",
                rank=rank,
            )
        parts.append(
            item.at(
                place, copy_summed(bytes_n[place : place + item.n_bytes], item.tensor, item.dtype)
            )
        )
        written[item.block] = place + aligned(item.n_bytes)
    return parts


def read(blocks: Sequence[Sequence[Block]], receiver: int, **segment: Any) -> Open:
    bytes_n = _bytes(**segment)
    return lambda rank, part: part.of(bytes_n)


def forget(session: str) -> None:
    _MAPPED.pop(session, None)


def _bytes(*, session: str, path: str, token: str, size: int) -> Tensor:
    """Of a segment, without its header."""
    known = _MAPPED.setdefault(session, {})
    if token not in known:
        mapped = _map(path, token, HEADER + size)
        while len(known) > 1:  # one that serves and one that is written
            known.pop(next(iter(known)))
        known[token] = mapped
    return known[token][HEADER:]


def _map(path: str, token: str, size: int) -> Tensor:
    try:
        with Path(path).open("r+b", buffering=0) as file:
            if file.read(len(token)) == token.encode():
                return torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=torch.uint8)
        reason = "it is another process's"
    except (OSError, ValueError) as error:
        reason = str(error)
    raise LinkError(
        f"the shared memory {path} can't be opened here ({reason}): learner, generator and driver "
        "must be on one host, and may "
        "look at each other's processes; elsewhere set link.kind=collective or files"
    )
