"""Weight sync by collectives: each rank broadcasts its own blocks, in buckets, to all receivers.

Every rank has its own process group with the receivers, beside the default one: no rank gathers or
gets another's blocks, and a rank that dies breaks only its group. Members join through a TCPStore
of the driver, at the first push and again after a failed one.

Peak extra memory: one bucket and the largest block at a rank (the latter only if it is converted or
not contiguous); a copy of the model (as sent) at a receiver, which verifies all blocks before it
uses any.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ratchet.errors import WeightSyncError
from ratchet.protocols import Ranks
from ratchet.weight_sync.checksums import as_bytes, checksum
from ratchet.weight_sync.transaction import PendingReceive, PushWeightSync
from ratchet.weight_sync.weight_blocks import (
    OutgoingPart,
    PartReader,
    SentPart,
    WeightBlock,
    align_bytes,
)

# Seconds for all members to join a group. A dead member is noticed only after them.
JOIN_S = 15.0


@dataclass(frozen=True)
class CollectiveGroupSpec:
    """The process groups of a push, and how to join them.

    key: name of the groups in the store; it changes after a failed push.
    sizes: bytes that each rank sends.
    """

    session: str
    key: str
    host: str
    port: int
    backend: str
    receivers: int
    bucket_bytes: int
    timeout_s: float
    sizes: tuple[int, ...]

    @property
    def device(self) -> str:
        """The kind of device that the backend sends from."""
        return "cuda" if self.backend == "nccl" else "cpu"

    def buckets(self, rank: int) -> int:
        """Return the number of buckets of a rank."""
        return -(-self.sizes[rank] // self.bucket_bytes)

    def bucket(self, rank: int, number: int) -> slice:
        """Return the byte range of a rank's bucket."""
        return slice(
            number * self.bucket_bytes, min((number + 1) * self.bucket_bytes, self.sizes[rank])
        )

    def group(self, rank: int, place: int) -> Any:
        """Join and return the group of a learner's rank with all receivers.

        Waits until all members have joined. place: this process's rank in the group, 0 for the
        learner's rank.
        """
        join = timedelta(seconds=min(JOIN_S, self.timeout_s))
        store = dist.TCPStore(self.host, self.port, is_master=False, timeout=join)
        group_store = dist.PrefixStore(f"{self.key}/{rank}", store)
        if self.backend == "nccl":
            return dist.ProcessGroupNCCL(group_store, place, 1 + self.receivers)  # pyright: ignore[reportCallIssue]
        group = dist.ProcessGroupGloo(group_store, place, 1 + self.receivers, join)
        group._set_default_timeout(timedelta(seconds=self.timeout_s))
        return group


# Groups of this process: (session, "rank N" or "receiver N") -> (key, groups).
_GROUPS: dict[tuple[str, str], tuple[str, list[Any]]] = {}


class CollectiveWeightSync(PushWeightSync):
    """Pushes weights by broadcasts from each rank to all receivers.

    receivers_count: number of `receivers`.
    host: address at which other processes reach the driver.
    backend: gloo sends from host memory, nccl from accelerators, on which all weights must be.
    """

    writer = "ratchet.weight_sync.collective:write"
    receiver = "ratchet.weight_sync.collective:read"
    forgets = "ratchet.weight_sync.collective:forget"

    def __init__(
        self,
        senders: Ranks,
        receivers: Ranks,
        *,
        receivers_count: int = 1,
        host: str = "127.0.0.1",
        backend: str = "gloo",
        bucket_mib: int = 16,
        **options: Any,
    ) -> None:
        super().__init__(senders, receivers, **options)
        assert not self.changes_only, "the buckets of a collective are laid out in advance"
        self.receivers_count = receivers_count
        self.host = host
        self.backend = backend
        self.bucket_mib = bucket_mib
        self._store: dist.TCPStore | None = None
        self._attempt = 0

    def _options(self, blocks: Sequence[Sequence[WeightBlock]]) -> Mapping[str, Any]:
        if self._store is None:
            self._store = dist.TCPStore(self.host, 0, is_master=True, wait_for_workers=False)
        meeting = CollectiveGroupSpec(
            session=self.session,
            key=f"{self.session}/{self._attempt}",
            host=self.host,
            port=self._store.port,
            backend=self.backend,
            receivers=self.receivers_count,
            bucket_bytes=self.bucket_mib * 2**20,
            timeout_s=self.timeout_s,
            sizes=tuple(sum(align_bytes(block.n_bytes) for block in of_rank) for of_rank in blocks),
        )
        return {"meeting": meeting}

    async def _transfer(
        self, blocks: Sequence[Sequence[WeightBlock]], version: int, since: Mapping[str, Any] | None
    ) -> tuple[list[list[SentPart]], PendingReceive | None]:
        """Send and receive at the same time.

        A side that fails still completes its broadcasts, so that the other does not wait for it.
        """
        options = self._options(blocks)
        sending = asyncio.ensure_future(self._send(options, since))
        receiving = asyncio.ensure_future(self.receivers.call("receive", self.receiver, options))
        try:
            finished, others = await asyncio.wait(
                {sending, receiving}, return_when=asyncio.FIRST_EXCEPTION
            )
            first = next((error for task in finished if (error := task.exception())), None)
            if others:
                # Closing the store fails a side that still waits there for a dead one.
                self._store = None
                await asyncio.wait(others)
        finally:
            sending.cancel()
            receiving.cancel()
        if first is not None:
            raise first
        return sending.result(), None

    async def _rollback(self) -> None:
        self._attempt += 1
        await super()._rollback()

    async def close(self) -> None:
        await super().close()
        self._store = None


def write(
    outgoing: Iterator[OutgoingPart], rank: int, *, meeting: CollectiveGroupSpec
) -> list[SentPart]:
    """Send a rank's blocks through its group, and return what was sent."""
    (group,) = _join_groups(meeting, f"rank {rank}", lambda: [meeting.group(rank, 0)])
    stream = _Stream(group, meeting, rank)
    parts = []
    try:
        for item in outgoing:
            tensor = item.tensor.to(meeting.device, item.dtype).contiguous()
            parts.append(item.to_part(stream.sent, checksum(tensor)))
            stream.send(as_bytes(tensor))
        if stream.sent != meeting.sizes[rank]:
            raise WeightSyncError(
                f"rank {rank} sent {stream.sent} bytes, not the {meeting.sizes[rank]} that it "
                "announced",
                rank=rank,
            )
    except BaseException:
        _GROUPS.pop((meeting.session, f"rank {rank}"), None)
        stream.end()
        raise
    return parts


class _Stream:
    """A rank's stream of bytes, which it cuts into buckets; each full bucket is broadcast."""

    def __init__(self, group: Any, meeting: CollectiveGroupSpec, rank: int) -> None:
        self.group = group
        self.meeting = meeting
        self.rank = rank
        self.sent = 0
        self.lost = False
        size = min(meeting.bucket_bytes, meeting.sizes[rank])
        self._bucket = torch.empty(size, dtype=torch.uint8, device=meeting.device)

    def send(self, bytes_n: Tensor) -> None:
        """Add bytes to the stream. Raise WeightSyncError if they exceed the announced size."""
        total = self.meeting.sizes[self.rank]
        step = self.meeting.bucket_bytes
        if self.sent + len(bytes_n) > total:
            raise WeightSyncError(
                f"rank {self.rank} has more to send than the {total} bytes that it announced",
                rank=self.rank,
            )
        taken = 0
        while taken < len(bytes_n):
            place = self.sent % step
            count = min(len(bytes_n) - taken, len(self._bucket) - place)
            self._bucket[place : place + count] = bytes_n[taken : taken + count]
            taken += count
            self._advance(count)
        # The padding stays within the bucket, whose size is a multiple of the alignment.
        self._advance(align_bytes(self.sent) - self.sent)

    def _advance(self, count: int) -> None:
        """Count bytes as sent, and broadcast the bucket if it is full."""
        if not count:
            return
        self.sent += count
        if self.sent % self.meeting.bucket_bytes == 0 or self.sent == self.meeting.sizes[self.rank]:
            last = self.meeting.bucket(self.rank, -(-self.sent // self.meeting.bucket_bytes) - 1)
            try:
                self.group.broadcast(self._bucket[: last.stop - last.start], 0).wait()
            except RuntimeError as error:
                self.lost = True
                raise WeightSyncError(
                    f"rank {self.rank} lost the receivers: {error}", rank=self.rank
                ) from error

    def end(self) -> None:
        """Broadcast the remaining buckets of a failed push, so that no receiver waits for them.

        Their contents do not matter, since the push is rejected.
        """
        with contextlib.suppress(WeightSyncError):
            while not self.lost and self.sent < self.meeting.sizes[self.rank]:
                step = self.meeting.bucket_bytes
                self._advance(
                    min(step - self.sent % step, self.meeting.sizes[self.rank] - self.sent)
                )


def read(
    blocks: Sequence[Sequence[WeightBlock]], receiver: int, *, meeting: CollectiveGroupSpec
) -> PartReader:
    """Receive the blocks of all ranks, and return a reader of their parts."""
    end = f"receiver {receiver}"
    ranks = range(len(meeting.sizes))
    groups = _join_groups(
        meeting, end, lambda: [meeting.group(rank, 1 + receiver) for rank in ranks]
    )
    regions = [
        torch.empty(size, dtype=torch.uint8, device=meeting.device) for size in meeting.sizes
    ]
    lost: dict[int, RuntimeError] = {}
    for number in range(max(meeting.buckets(rank) for rank in ranks)):
        # All receivers use the same order, and all ranks send at the same time. If a rank fails,
        # the others are still received to the end, so that none waits.
        sending = [rank for rank in ranks if number < meeting.buckets(rank) and rank not in lost]
        works = [
            groups[rank].broadcast(regions[rank][meeting.bucket(rank, number)], 0)
            for rank in sending
        ]
        for rank, work in zip(sending, works, strict=True):
            try:
                work.wait()
            except RuntimeError as error:
                lost[rank] = error
    for rank, error in lost.items():
        _GROUPS.pop((meeting.session, end), None)
        raise WeightSyncError(f"rank {rank} stopped sending: {error}", rank=rank) from error
    return lambda rank, part: part.read_from(regions[rank])


def forget(session: str) -> None:
    """Close the groups of a session."""
    for key in [key for key in _GROUPS if key[0] == session]:
        del _GROUPS[key]


def _join_groups(meeting: CollectiveGroupSpec, end: str, join: Any) -> list[Any]:
    """Return the groups of a meeting, and close those of an earlier attempt."""
    joined_key, groups = _GROUPS.pop((meeting.session, end), ("", []))
    if joined_key != meeting.key:
        # This closes their connections.
        del groups[:]
        groups = join()
    _GROUPS[meeting.session, end] = (meeting.key, groups)
    return groups
