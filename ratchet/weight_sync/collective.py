"""Weight sync by collectives: each rank broadcasts its own blocks, in buckets, to all receivers.

Every rank has its own process group with the receivers. So no rank gathers or receives the blocks
of other ranks, and a rank that dies breaks only its own group. Members join through a TCPStore of
the driver, at the first push and again after a failed one.

Peak extra memory:
- learner rank: one bucket, and the largest block if it is converted or not contiguous; with
  changes only, all changes of the rank, since receivers need their size first;
- receiver: a copy of the model (as sent), because all blocks are verified before any is used.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ratchet.errors import WeightSyncError
from ratchet.models.weights.checksums import as_bytes, checksum
from ratchet.protocols import Shard
from ratchet.weight_sync.delta import iterate_changes
from ratchet.weight_sync.transaction import PushWeightSync
from ratchet.weight_sync.transport import WeightTransport
from ratchet.weight_sync.weight_blocks import (
    OutgoingPart,
    PartReader,
    SentPart,
    WeightBlock,
    align_bytes,
)
from ratchet.worker_protocols import Ranks

# Seconds for all members to join a group. A dead member is noticed only after this time.
JOIN_TIMEOUT_S = 15.0


# The changes that a rank of this process has found and not yet sent, by session.
_STAGED: dict[str, list[OutgoingPart]] = {}
# Groups of this process: (session, "rank N" or "receiver N") -> (key, groups).
_GROUPS: dict[tuple[str, str], tuple[str, list[Any]]] = {}


@dataclass(frozen=True)
class CollectiveTransport(WeightTransport):
    """A transport by broadcasts in process groups.

    key: name of the groups in the store; it changes after a failed push.
    host, port: address of the store.
    sizes: bytes that each rank sends.
    """

    key: str = ""
    host: str = "127.0.0.1"
    port: int = 0
    backend: str = "gloo"
    n_receivers: int = 1
    bucket_bytes: int = 2**24
    timeout_s: float = 600.0
    sizes: Sequence[int] = ()

    @property
    def device(self) -> str:
        """The kind of device that the backend sends from."""
        return "cuda" if self.backend == "nccl" else "cpu"

    def count_buckets(self, rank: int) -> int:
        """Return the number of buckets of a rank."""
        return -(-self.sizes[rank] // self.bucket_bytes)

    def get_bucket_bounds(self, rank: int, number: int) -> slice:
        """Return the byte range of a rank's bucket."""
        return slice(
            number * self.bucket_bytes, min((number + 1) * self.bucket_bytes, self.sizes[rank])
        )

    def join_group(self, rank: int, group_rank: int) -> Any:
        """Join and return the group of a learner's rank with all receivers.

        Waits until all members have joined.

        group_rank: this process's rank in the group; 0 is the learner's rank.
        """
        join_timeout = timedelta(seconds=min(JOIN_TIMEOUT_S, self.timeout_s))
        store = dist.TCPStore(self.host, self.port, is_master=False, timeout=join_timeout)
        group_store = dist.PrefixStore(f"{self.key}/{rank}", store)
        if self.backend == "nccl":
            # Its type stub lacks this constructor.
            create_group: Any = dist.ProcessGroupNCCL
            return create_group(group_store, group_rank, 1 + self.n_receivers)
        group = dist.ProcessGroupGloo(group_store, group_rank, 1 + self.n_receivers, join_timeout)
        group._set_default_timeout(timedelta(seconds=self.timeout_s))
        return group

    def stage_changes(self, weights: Iterator[Shard], rank: int, *, base: int, version: int) -> int:
        """Find the rank's changes from version `base`, which `send` then sends.

        Returns the bytes of these parts. Receivers need it before they can receive.
        """
        selected = self._select(weights)
        changes = iterate_changes(
            selected, self.dtype, session=self.session, base=base, version=version
        )
        parts = _STAGED[self.session] = list(changes)
        return sum(align_bytes(part.n_bytes) for part in parts)

    def send(
        self, weights: Iterator[Shard], rank: int, *, base: int | None, version: int
    ) -> list[SentPart]:
        # What a failed push has left is of another version.
        parts = _STAGED.pop(self.session, None)
        if base is None:
            return super().send(weights, rank, base=base, version=version)
        assert parts is not None, "`stage_changes` comes first"
        return self.write(iter(parts), rank)

    def write(self, outgoing: Iterator[OutgoingPart], rank: int) -> list[SentPart]:
        """Send a rank's blocks through its group, and return what was sent."""
        (group,) = self._join_groups(f"rank {rank}", lambda: [self.join_group(rank, 0)])
        stream = _BucketStream(group, self, rank)
        parts = []
        try:
            for part in outgoing:
                tensor = part.tensor.to(self.device, part.dtype).contiguous()
                parts.append(part.as_sent(stream.sent_bytes, checksum(tensor)))
                stream.send(as_bytes(tensor))
            if stream.sent_bytes != self.sizes[rank]:
                raise WeightSyncError(
                    f"rank {rank} sent {stream.sent_bytes} bytes, not the {self.sizes[rank]} that "
                    "it announced",
                    rank=rank,
                )
        except BaseException:
            _GROUPS.pop((self.session, f"rank {rank}"), None)
            stream.finish_failed_push()
            raise
        return parts

    def receive(self, blocks: Sequence[Sequence[WeightBlock]], receiver: int) -> PartReader:
        """Receive the blocks of all ranks, and return a reader of their parts."""
        member = f"receiver {receiver}"
        ranks = range(len(self.sizes))
        groups = self._join_groups(
            member, lambda: [self.join_group(rank, 1 + receiver) for rank in ranks]
        )
        received_bytes = [
            torch.empty(size, dtype=torch.uint8, device=self.device) for size in self.sizes
        ]
        errors_by_rank: dict[int, RuntimeError] = {}
        for bucket_index in range(max(self.count_buckets(rank) for rank in ranks)):
            # All receivers use the same order, and all ranks send at the same time. If a rank
            # fails, the buckets of the others are still received, so that no rank hangs.
            sending_ranks = [
                rank
                for rank in ranks
                if bucket_index < self.count_buckets(rank) and rank not in errors_by_rank
            ]
            broadcasts = [
                groups[rank].broadcast(
                    received_bytes[rank][self.get_bucket_bounds(rank, bucket_index)], 0
                )
                for rank in sending_ranks
            ]
            for rank, broadcast in zip(sending_ranks, broadcasts, strict=True):
                try:
                    broadcast.wait()
                except RuntimeError as error:
                    errors_by_rank[rank] = error
        for rank, error in errors_by_rank.items():
            _GROUPS.pop((self.session, member), None)
            raise WeightSyncError(f"rank {rank} stopped sending: {error}", rank=rank) from error
        return lambda rank, part: part.read_from(received_bytes[rank])

    def _join_groups(self, member: str, join: Callable[[], list[Any]]) -> list[Any]:
        """Return the groups of a push, and close the groups of an earlier, failed attempt."""
        joined_key, groups = _GROUPS.pop((self.session, member), ("", []))
        if joined_key != self.key:
            # This closes their connections.
            del groups[:]
            groups = join()
        _GROUPS[self.session, member] = (self.key, groups)
        return groups

    def forget(self) -> None:
        """Close the groups of the session."""
        _STAGED.pop(self.session, None)
        for key in [key for key in _GROUPS if key[0] == self.session]:
            del _GROUPS[key]


class _BucketStream:
    """A stream of a rank's bytes, which are cut into buckets; each full bucket is broadcast."""

    def __init__(self, group: Any, transport: CollectiveTransport, rank: int) -> None:
        self.group = group
        self.transport = transport
        self.rank = rank
        self.sent_bytes = 0
        self.has_lost_receivers = False
        size = min(transport.bucket_bytes, transport.sizes[rank])
        self._bucket = torch.empty(size, dtype=torch.uint8, device=transport.device)

    def send(self, bytes_n: Tensor) -> None:
        """Add bytes to the stream. Raise WeightSyncError if they exceed the announced size."""
        total = self.transport.sizes[self.rank]
        bucket_bytes = self.transport.bucket_bytes
        if self.sent_bytes + len(bytes_n) > total:
            raise WeightSyncError(
                f"rank {self.rank} has more to send than the {total} bytes that it announced",
                rank=self.rank,
            )
        copied_bytes = 0
        while copied_bytes < len(bytes_n):
            position = self.sent_bytes % bucket_bytes
            count = min(len(bytes_n) - copied_bytes, len(self._bucket) - position)
            self._bucket[position : position + count] = bytes_n[copied_bytes : copied_bytes + count]
            copied_bytes += count
            self._advance(count)
        # The padding stays within the bucket, whose size is a multiple of the alignment.
        self._advance(align_bytes(self.sent_bytes) - self.sent_bytes)

    def _advance(self, count: int) -> None:
        """Count bytes as sent, and broadcast the bucket if it is full."""
        if not count:
            return
        self.sent_bytes += count
        if (
            self.sent_bytes % self.transport.bucket_bytes == 0
            or self.sent_bytes == self.transport.sizes[self.rank]
        ):
            last_bucket = self.transport.get_bucket_bounds(
                self.rank, -(-self.sent_bytes // self.transport.bucket_bytes) - 1
            )
            try:
                self.group.broadcast(self._bucket[: last_bucket.stop - last_bucket.start], 0).wait()
            except RuntimeError as error:
                self.has_lost_receivers = True
                raise WeightSyncError(
                    f"rank {self.rank} lost the receivers: {error}", rank=self.rank
                ) from error

    def finish_failed_push(self) -> None:
        """Broadcast the remaining buckets of a failed push, so that no receiver waits for them.

        Their contents do not matter, since the push is rejected.
        """
        with contextlib.suppress(WeightSyncError):
            while not self.has_lost_receivers and self.sent_bytes < self.transport.sizes[self.rank]:
                bucket_bytes = self.transport.bucket_bytes
                self._advance(
                    min(
                        bucket_bytes - self.sent_bytes % bucket_bytes,
                        self.transport.sizes[self.rank] - self.sent_bytes,
                    )
                )


class CollectiveWeightSync(PushWeightSync[CollectiveTransport]):
    """A weight sync by broadcasts from each rank to all receivers.

    receivers_count: number of receivers that one call of `receivers` reaches.
    host: address at which other processes reach the driver.
    backend: gloo sends from host memory. nccl sends from accelerators, where all weights must be.
    bucket_mib: size of a broadcast in MiB.
    """

    transport_class = CollectiveTransport

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
        self.transport = replace(
            self.transport,
            host=host,
            backend=backend,
            n_receivers=receivers_count,
            bucket_bytes=bucket_mib * 2**20,
            timeout_s=self.timeout_s,
        )
        self._store: dist.TCPStore | None = None
        self._attempt = 0

    def _open_store(self, sizes: Sequence[int]) -> CollectiveTransport:
        """Return the transport of this attempt, whose store members can join.

        sizes: bytes that each rank sends.
        """
        if self._store is None:
            self._store = dist.TCPStore(
                self.transport.host, 0, is_master=True, wait_for_workers=False
            )
        return replace(
            self.transport,
            key=f"{self.transport.session}/{self._attempt}",
            port=self._store.port,
            sizes=sizes,
        )

    async def _transfer(
        self, blocks: Sequence[Sequence[WeightBlock]], base: int | None, version: int
    ) -> tuple[list[list[SentPart]], CollectiveTransport]:
        """Send and receive at the same time.

        A sender or receiver that fails still completes its broadcasts, so that no other one hangs.
        """
        if base is None:
            sizes = [sum(align_bytes(block.n_bytes) for block in own) for own in blocks]
        else:
            stage = partial(self.transport.stage_changes, base=base, version=version)
            sizes = await self.senders.call("apply_to_weights", stage)
        transport = self._open_store(sizes)
        sending = asyncio.ensure_future(self._send(transport, base, version))
        receiving = asyncio.ensure_future(self.receivers.call("receive", transport))
        try:
            finished, unfinished = await asyncio.wait(
                {sending, receiving}, return_when=asyncio.FIRST_EXCEPTION
            )
            first_error = next((error for task in finished if (error := task.exception())), None)
            if unfinished:
                # Closing the store raises an error in members that still wait for the failed one.
                self._store = None
                await asyncio.wait(unfinished)
        finally:
            sending.cancel()
            receiving.cancel()
        if first_error is not None:
            raise first_error
        return sending.result(), transport

    async def _rollback(self) -> None:
        self._attempt += 1
        await super()._rollback()

    async def close(self) -> None:
        await super().close()
        self._store = None
