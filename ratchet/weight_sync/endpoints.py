"""The ends of a weight sync: a sender at each rank of the learner, a receiver at each generator.

A weight sync calls both through `worker_protocols.Ranks`, in this process or in others.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import torch

from ratchet.errors import WeightSyncError
from ratchet.models.lora.decoder import Adapter
from ratchet.models.weights.checksums import has_checksum, prepare_checksum_check
from ratchet.protocols import Generator, Learner, Shard
from ratchet.utils.thread_pool import ThreadPool, keep_current_device
from ratchet.weight_sync.delta import ReceivedWeights
from ratchet.weight_sync.transport import WeightTransport
from ratchet.weight_sync.weight_blocks import PartReader, SentPart, WeightBlock, torch_dtype

T = TypeVar("T")


class LocalRank:
    """An implementation of `Ranks` for one component in this process.

    Synchronous methods run in a thread, so that they don't block generation in the event loop.
    """

    def __init__(self, component: Any) -> None:
        self.component = component

    async def call(self, method: str, /, *arguments: Any) -> list[Any]:
        """Call a method of the component, and return its result as a list of one."""
        bound_method = getattr(self.component, method)
        if inspect.iscoroutinefunction(bound_method):
            return [await bound_method(*arguments)]
        return [await asyncio.to_thread(keep_current_device(bound_method), *arguments)]


class WeightSender:
    """The sending end of a weight sync, for a learner in this process."""

    def __init__(self, learner: Learner) -> None:
        self.learner = learner

    def apply_to_weights(self, operation: Callable[[Iterator[Shard], int], T]) -> T:
        """Call `operation` with the learner's weights and this rank (0), and return its result.

        operation: a method of a `WeightTransport`.
        """
        return operation(self.learner.weights(), 0)


class WeightReceiver:
    """The receiving end of a weight sync, for a generator in this process.

    A push calls `prepare`, `receive`, `verify_and_stage` and `commit`; a failed push calls
    `rollback`.

    rank: index of this end among the receivers.
    """

    def __init__(self, generator: Generator, rank: int = 0) -> None:
        self.generator = generator
        self.rank = rank
        self._blocks: Sequence[Sequence[WeightBlock]] = ()
        self._part_reader: PartReader | None = None
        self._received: dict[str, ReceivedWeights] = {}  # by session
        self._pending_weights: ReceivedWeights | None = None
        # A single thread for all pushes, because torch starts helper threads for each new thread,
        # which takes as long as the checksum of 100 MiB.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weight-receiver")
        self._checksum_threads = ThreadPool(torch.get_num_threads())

    async def prepare(
        self,
        blocks: Sequence[Sequence[WeightBlock]],
        version: int,
        lasting: bool = False,
        adapter: Adapter | None = None,
    ) -> None:
        """Announce a push to the generator, which may refuse the names or shapes of its weights.

        blocks: announced weight blocks, by rank of the learner.
        lasting: True if the received memory also stays unchanged from this push's commit to the
          next push's commit, so that the generator may adopt it instead of copying.
        adapter: the adapter that some or all blocks belong to.
        """
        self._blocks = blocks
        self._part_reader = None
        self._pending_weights = None
        weights = {
            block.name: {"shape": block.shape, "dtype": block.dtype}
            for rank_blocks in blocks
            for block in rank_blocks
        }
        # "stable": the memory stays unchanged up to this push's commit, so staging needs no copy.
        manifest = {
            "version": version,
            "weights": weights,
            "stable": True,
            "lasting": lasting,
            "adapter": adapter,
        }
        await self.generator.prepare(manifest)

    async def receive(self, transport: WeightTransport) -> None:
        """Receive the parts of all ranks."""
        self._part_reader = await self._run_in_thread(
            partial(transport.receive, self._blocks, self.rank)
        )

    async def verify_and_stage(
        self,
        parts: Sequence[Sequence[SentPart]],
        transport: WeightTransport,
        base: int | None,
        version: int,
    ) -> None:
        """Verify the checksums of all parts, and pass the weights to the generator.

        The generator stages them, and uses them from the commit on.

        parts: the parts that each rank sent.
        transport: receives the parts if `receive` has not been called.
        base: the version that deltas are relative to; None: every block is sent whole.

        Raises WeightSyncError for the first part that differs from what was sent, or DeltaRefused.
        """
        if self._part_reader is None:
            await self.receive(transport)
        work = partial(self._verify_and_apply, parts, transport, base, version)
        await self.generator.receive(iter(await self._run_in_thread(work)))

    async def _run_in_thread(self, work: Callable[[], T]) -> T:
        """Run the work in this receiver's thread, so that it does not block generation."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, keep_current_device(work))

    def _verify_and_apply(
        self,
        parts: Sequence[Sequence[SentPart]],
        transport: WeightTransport,
        base: int | None,
        version: int,
    ) -> list[Shard]:
        """Verify the parts, apply changes, and return the weights.

        Raises WeightSyncError or DeltaRefused.
        """
        assert self._part_reader is not None, "nothing was received"
        received = [
            (rank, part, self._part_reader(rank, part))
            for rank, rank_parts in enumerate(parts)
            for part in rank_parts
        ]
        checks = [prepare_checksum_check(values, part.checksum) for _, part, values in received]
        results = self._checksum_threads.each(
            lambda check: check(), checks, [part.n_bytes for _, part, _ in received]
        )
        for (rank, part, _), is_intact in zip(received, results, strict=True):
            if not is_intact:
                block = self._blocks[rank][part.block]
                raise WeightSyncError(
                    f"weight '{block.name}' differs from the one that rank {rank} sent: its "
                    f"checksum isn't {part.checksum}",
                    tensor=block.name,
                    rank=rank,
                )
        if not transport.changes_only:
            return [self._blocks[rank][part.block].shard(values) for rank, part, values in received]
        self._pending_weights = self._received.setdefault(transport.session, ReceivedWeights())
        values_by_part = {(rank, part): values for rank, part, values in received}
        applied = self._pending_weights.apply_push(
            self._blocks,
            parts,
            lambda rank, part: values_by_part[rank, part],
            base=base,
            version=version,
        )
        return [block.shard(values) for _, block, values in applied]

    async def commit(self, version: int) -> bool:
        """Commit the version. Return True if the generator uses the received memory in place."""
        await self.generator.commit(version)
        if self._pending_weights is not None:
            self._pending_weights.version = version
        self._part_reader = self._pending_weights = None
        return self.generator.adopted

    async def rollback(self) -> None:
        """Discard the push."""
        self._part_reader = self._pending_weights = None
        await self.generator.rollback()

    def get_base_version(self, session: str) -> int | None:
        """Return the generator's version, to which this end can apply changes.

        Return None if that version did not come from the weight sync with this session.
        """
        version = self._received[session].version if session in self._received else None
        return version if version == self.generator.version else None

    def forget(self, transport: WeightTransport) -> None:
        """Release everything that the transport's session keeps at this end."""
        self._received.pop(transport.session, None)
        transport.forget()

    def list_differing(
        self, checksums: Sequence[Sequence[tuple[WeightBlock, str]]]
    ) -> list[str] | None:
        """Return the names of weights that differ in the generator; None if they can't be read.

        checksums: each rank's blocks with their expected checksums.
        """
        weights_by_name = {shard.name: shard.tensor for shard in self.generator.weights()}
        if not weights_by_name:
            return None
        differing_names: dict[str, None] = {}
        for rank_checksums in checksums:
            for block, expected in rank_checksums:
                view = weights_by_name.get(block.name)
                if view is None or not has_checksum(
                    block.select_from(view).to(torch_dtype(block.dtype)).contiguous(), expected
                ):
                    differing_names[block.name] = None
        return list(differing_names)
