"""The two ends of a link: an outlet beside each rank of the learner, an intake beside each
generator. A link calls both by `Ranks`, wherever they live."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from ratchet.config.resolve import imported
from ratchet.errors import LinkError
from ratchet.models.lora.decoder import Adapter
from ratchet.protocols import Adopts, Generator, Learner, Shard, ShowsWeights
from ratchet.utils.thread_pool import Crew
from ratchet.weight_sync.checksums import agrees, claim
from ratchet.weight_sync.delta import Received
from ratchet.weight_sync.weight_blocks import Block, Open, Part, torch_dtype

T = TypeVar("T")


class OneRank:
    """Implements `Ranks` for one component in this process. What is not asynchronous runs in a
    thread: the event loop, and what generates in it, goes on meanwhile."""

    def __init__(self, component: Any) -> None:
        self.component = component

    async def call(self, method: str, /, *arguments: Any) -> list[Any]:
        called = getattr(self.component, method)
        if inspect.iscoroutinefunction(called):
            return [await called(*arguments)]
        return [await asyncio.to_thread(called, *arguments)]


class Outlet:
    """The sending end of a learner that lives in this process."""

    def __init__(self, learner: Learner) -> None:
        self.learner = learner

    def send(self, sender: str, options: Mapping[str, Any]) -> Any:
        """sender: "module:function", called with (weights, rank, world, **options)."""
        return imported(sender)(self.learner.weights(), 0, 1, **options)


class Intake:
    """The receiving end. A push is prepare, receive, verify, commit; or rollback at any point
    before the commit.

    rank: among the receivers of the link.
    """

    def __init__(self, generator: Generator, rank: int = 0) -> None:
        self.generator, self.rank = generator, rank
        self._blocks: Sequence[Sequence[Block]] = ()
        self._open: Open | None = None
        self._received: dict[str, Received] = {}  # by session
        self._pending: Received | None = None
        # Always the same: torch starts helpers for each new thread, which takes as long as checking
        # 100 MiB.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="intake")
        self._crew = Crew(torch.get_num_threads())

    async def prepare(
        self,
        blocks: Sequence[Sequence[Block]],
        version: int,
        lasting: bool = False,
        adapter: Adapter | None = None,
    ) -> None:
        """blocks: by rank of the learner. lasting: what comes stays as it is after the commit,
        until the next one. adapter: to which some or all of them belong. The generator may refuse:
        names, shapes."""
        self._blocks, self._open, self._pending = blocks, None, None
        weights = {
            block.name: {"shape": block.shape, "dtype": block.dtype}
            for own in blocks
            for block in own
        }
        # What this end hands over stays as it is until the commit: the generator needs no copy of
        # it.
        manifest = {
            "version": version,
            "weights": weights,
            "stable": True,
            "lasting": lasting,
            "adapter": adapter,
        }
        await self.generator.prepare(manifest)

    async def receive(self, receiver: str, options: Mapping[str, Any]) -> None:
        """receiver: "module:function" of the transport, called with (blocks, rank, **options)."""
        self._open = await self._aside(
            partial(imported(receiver), self._blocks, self.rank, **options)
        )

    async def verify(
        self,
        parts: Sequence[Sequence[Part]],
        version: int,
        since: Mapping[str, Any] | None,
        waiting: tuple[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """parts: what each rank says that it sent. since: they may be changes. waiting: the
        receiver and the options by which they are received, where that has not been done. Hands the
        weights to the generator.

        Raises LinkError for the first part that is not what was sent, DeltaRefused.
        """
        if waiting is not None:
            await self.receive(*waiting)
        shards = await self._aside(partial(self._verified, parts, version, since))
        await self.generator.receive(iter(shards))

    async def _aside(self, work: Callable[[], T]) -> T:
        """What generates in the event loop goes on meanwhile."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _verified(
        self, parts: Sequence[Sequence[Part]], version: int, since: Mapping[str, Any] | None
    ) -> list[Shard]:
        assert self._open is not None, "nothing was received"
        found = [
            (rank, part, self._open(rank, part)) for rank, own in enumerate(parts) for part in own
        ]
        claims = [claim(numbers, part.checksum) for _, part, numbers in found]
        whole = self._crew.each(
            lambda holds: holds(), claims, [part.n_bytes for _, part, _ in found]
        )
        for (rank, part, _), right in zip(found, whole, strict=True):
            if not right:
                block = self._blocks[rank][part.block]
                raise LinkError(
                    f"weight '{block.name}' did not arrive as rank {rank} sent it: its checksum "
                    f"isn't {part.checksum}",
                    tensor=block.name,
                    rank=rank,
                )
        if since is None:
            return [self._blocks[rank][part.block].shard(numbers) for rank, part, numbers in found]
        self._pending = self._received.setdefault(since["session"], Received())
        opened = {(rank, part): numbers for rank, part, numbers in found}
        taken = self._pending.take(
            self._blocks,
            parts,
            lambda rank, part: opened[rank, part],
            base=since["base"],
            version=version,
        )
        return [block.shard(numbers) for _, block, numbers in taken]

    async def commit(self, version: int) -> bool:
        """Whether the generator uses what it received where it lies."""
        await self.generator.commit(version)
        if self._pending is not None:
            self._pending.version = version
        self._open = self._pending = None
        return isinstance(self.generator, Adopts) and self.generator.adopted

    async def rollback(self) -> None:
        self._open = self._pending = None
        await self.generator.rollback()

    def base(self, session: str) -> int | None:
        """The version to which this end can apply changes: the one that the generator has, if it
        came by this link."""
        version = self._received[session].version if session in self._received else None
        return version if version == self.generator.version else None

    def forget(self, function: str, session: str) -> None:
        self._received.pop(session, None)
        if function:
            imported(function)(session)

    def differing(self, sums: Sequence[Sequence[tuple[Block, str]]]) -> list[str] | None:
        """sums: of each rank, what it has. The weights of which the generator has something else;
        None where it doesn't show them."""
        shown: dict[str, Tensor] = {}
        if isinstance(self.generator, ShowsWeights):
            shown = {shard.name: shard.tensor for shard in self.generator.weights()}
        if not shown:
            return None
        found: dict[str, None] = {}
        for own in sums:
            for block, wanted in own:
                view = shown.get(block.name)
                if view is None or not agrees(
                    block.cut(view).to(torch_dtype(block.dtype)).contiguous(), wanted
                ):
                    found[block.name] = None
        return list(found)
