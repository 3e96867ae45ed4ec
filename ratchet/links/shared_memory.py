"""Shared memory on one host: each rank writes its own blocks to their places, receivers read them where they lie.

The segment has no name in any directory: it is a file of the driver's that exists in memory only, and the others open it by the
driver's process id. So there is nothing to clean up: the kernel frees it when the last process that maps it has ended, however
it ended. It is made once and mapped by each process once: the first push pays for its pages, later ones only copy.

Peak extra memory: model bytes (as sent) for the segment, which all processes share, and nothing else: a generator that takes
weights as they lie (`stable`) copies them at the commit, straight to their places.
"""

from __future__ import annotations

import mmap
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ratchet.errors import LinkError
from ratchet.interfaces import Ranks
from ratchet.links.blocks import ALIGNMENT, Block, Open, Outgoing, Part, aligned
from ratchet.links.checksums import copy_summed
from ratchet.links.push import PushLink

HEADER = ALIGNMENT  # bytes, of which the first are the segment's token

_MAPPED: dict[str, tuple[str, Tensor]] = {}  # of this process: session -> (token, bytes)


class Segment:
    """The driver's hold on it. sizes: bytes for each rank. run: seen in lists of processes' maps, for whoever looks there."""

    def __init__(self, sizes: Sequence[int], run: str) -> None:
        """Raises LinkError where the system has no such memory."""
        if not hasattr(os, "memfd_create"):
            raise LinkError("shared memory between processes needs Linux: set link.kind=files")
        self.sizes, self.token = list(sizes), uuid.uuid4().hex
        self._file = os.memfd_create(f"ratchet-{run}")
        os.ftruncate(self._file, HEADER + sum(sizes))
        os.pwrite(self._file, self.token.encode(), 0)
        self.path = f"/proc/{os.getpid()}/fd/{self._file}"

    def close(self) -> None:
        os.close(self._file)


class SharedMemoryLink(PushLink):
    """run: a name for the segment."""

    writer = "ratchet.links.shared_memory:write"
    receiver = "ratchet.links.shared_memory:read"
    forgets = "ratchet.links.shared_memory:forget"

    def __init__(self, senders: Ranks, receivers: Ranks, *, run: str = "", **options: Any) -> None:
        super().__init__(senders, receivers, **options)
        self.run = run
        self._segment: Segment | None = None

    def options(self, blocks: Sequence[Sequence[Block]], version: int) -> Mapping[str, Any]:
        slack = 2 * ALIGNMENT if self.changes_only else 0  # a change is two parts, together smaller than the block
        sizes = [sum(aligned(block.n_bytes) + slack for block in own) for own in blocks]
        if self._segment is None or self._segment.sizes != sizes:
            if self._segment is not None:
                self._segment.close()
            self._segment = Segment(sizes, self.run)
        segment = self._segment
        return {"session": self.session, "path": segment.path, "token": segment.token, "sizes": sizes}

    async def close(self) -> None:
        await super().close()
        if self._segment is not None:
            self._segment.close()
            self._segment = None


def write(outgoing: Iterator[Outgoing], rank: int, *, sizes: Sequence[int], **segment: str) -> list[Part]:
    own_n, place, parts = _regions(sizes, **segment)[rank], 0, []
    for item in outgoing:
        size = item.n_bytes
        if place + size > len(own_n):
            raise LinkError(f"rank {rank} has more to send than it said: {place + size} bytes, not {len(own_n)}", rank=rank)
        parts.append(item.at(place, copy_summed(own_n[place : place + size], item.tensor, item.dtype)))
        place += aligned(size)
    return parts


def read(blocks: Sequence[Sequence[Block]], receiver: int, *, sizes: Sequence[int], **segment: str) -> Open:
    regions = _regions(sizes, **segment)
    return lambda rank, part: part.of(regions[rank])


def forget(session: str) -> None:
    _MAPPED.pop(session, None)


def _regions(sizes: Sequence[int], *, session: str, path: str, token: str) -> list[Tensor]:
    """Each rank's bytes."""
    known, bytes_n = _MAPPED.get(session, ("", None))
    if bytes_n is None or known != token:
        bytes_n = _map(path, token, HEADER + sum(sizes))
        _MAPPED[session] = (token, bytes_n)
    starts = accumulate(sizes, initial=HEADER)
    return [bytes_n[start : start + size] for start, size in zip(starts, sizes, strict=False)]


def _map(path: str, token: str, size: int) -> Tensor:
    try:
        with Path(path).open("r+b", buffering=0) as file:
            if file.read(len(token)) == token.encode():
                return torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=torch.uint8)
        reason = "it is another process's"
    except (OSError, ValueError) as error:
        reason = str(error)
    raise LinkError(
        f"the shared memory {path} can't be opened here ({reason}): learner, generator and driver must be on one host, and may "
        "look at each other's processes; elsewhere set link.kind=collective or files"
    )
