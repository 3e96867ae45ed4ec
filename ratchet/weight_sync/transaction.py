"""Push weights as a transaction: every receiver gets the new version, or keeps the old one.

prepare(names, shapes, dtypes, version) -> transfer -> a checksum for every part of every block ->
commit(version)
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Generic, TypeVar

from ratchet.errors import WeightSyncError, WorkerDied
from ratchet.models.lora.decoder import Adapter
from ratchet.protocols import WeightSync
from ratchet.weight_sync.transport import WeightTransport
from ratchet.weight_sync.weight_blocks import SentPart, WeightBlock, check_coverage
from ratchet.worker_protocols import Ranks

log = logging.getLogger(__name__)

TransportT = TypeVar("TransportT", bound=WeightTransport)


class PushWeightSync(WeightSync, Generic[TransportT]):
    """The base class of weight syncs that push weights, by any transport.

    Weights go from the ranks of a learner (`WeightSender`s) to receivers (`WeightReceiver`s).

    dtype, changes_only: see `WeightTransport`.
    timeout_s: maximum seconds of one push.
    adapter: the adapter that the learner trains in place of its weights. The first push sends the
      weights too. All later pushes send only the adapter.
    """

    transport_class: type[TransportT]
    # True if received memory stays unchanged after the commit, until the next one.
    lasting = False

    def __init__(
        self,
        senders: Ranks,
        receivers: Ranks,
        *,
        dtype: str | None = None,
        changes_only: bool = False,
        timeout_s: float = 600.0,
        adapter: Adapter | None = None,
    ) -> None:
        self.senders = senders
        self.receivers = receivers
        self.adapter = adapter
        self.timeout_s = timeout_s
        # Both ends keep state between pushes under the transport's session, until `_forget`.
        self.transport = self.transport_class(
            uuid.uuid4().hex, dtype=dtype, changes_only=changes_only
        )
        # Bytes of the latest push.
        self.sent_bytes = 0
        self._blocks: list[list[WeightBlock]] | None = None
        # The current phase of the push, for error messages.
        self._phase = ""

    async def push(self, version: int) -> None:
        """Push a version.

        Raises WeightSyncError, which names the weight and the rank if known. The generators then
        keep the previous version.
        """
        try:
            async with asyncio.timeout(self.timeout_s):
                await self._push(version)
        except BaseException as error:
            await self._rollback()
            if isinstance(error, WeightSyncError) or not isinstance(error, Exception):
                raise
            is_timeout = isinstance(error, TimeoutError)
            reason = (
                f"not finished after {self.timeout_s:g} s"
                if is_timeout
                else f"{type(error).__name__}: {error}"
            )
            raise WeightSyncError(
                f"version {version} was not pushed, and the generator keeps the previous version "
                f"({self._phase}: {reason})",
                rank=error.rank if isinstance(error, WorkerDied) else None,
            ) from error

    async def _push(self, version: int) -> None:
        """Push the changes since the receivers' version if possible, else all weights."""
        base = await self._find_base(version) if self.transport.changes_only else None
        if base is not None:
            try:
                await self._push_from(base, version)
            except WeightSyncError as error:
                log.warning(
                    "the changes from version %d to %d were not applied, so all weights are "
                    "pushed: %s",
                    base,
                    version,
                    error,
                )
                await self._rollback()
            else:
                return
        await self._push_from(None, version)

    async def _push_from(self, base: int | None, version: int) -> None:
        """Run the transaction, with changes from version `base` if it is not None."""
        blocks = self._blocks = self._blocks or await self._describe()
        self._phase = "a receiver prepares"
        await self.receivers.call("prepare", blocks, version, self.lasting, self.adapter)
        self._phase = "weights are sent"
        parts, transport = await self._transfer(blocks, base, version)
        self.sent_bytes = sum(part.n_bytes for rank_parts in parts for part in rank_parts)
        self._phase = "a receiver compares checksums"
        await self.receivers.call("verify_and_stage", parts, transport, base, version)
        self._phase = "a receiver commits"
        await self._commit(version)
        # The receivers now have the frozen weights: later pushes send the adapter alone.
        if self.adapter is not None and not self.transport.skip_frozen:
            await self._forget()
            self.transport = replace(self.transport, session=uuid.uuid4().hex, skip_frozen=True)
            self._blocks = None

    async def _commit(self, version: int) -> bool:
        """Commit on all receivers.

        Return True if a receiver adopted the pushed memory instead of copying it.
        """
        return any(await self.receivers.call("commit", version))

    async def _describe(self) -> list[list[WeightBlock]]:
        """Return the blocks of the ranks, which stay the same for all pushes."""
        self._phase = "the learner describes its weights"
        blocks = await self.senders.call("apply_to_weights", self.transport.describe)
        check_coverage(blocks)
        return blocks

    async def _find_base(self, version: int) -> int | None:
        """Return an earlier version that all receivers have, or None."""
        self._phase = "a receiver says which version it has"
        bases = await self.receivers.call("get_base_version", self.transport.session)
        is_common = len(set(bases)) == 1 and bases[0] is not None and bases[0] < version
        return bases[0] if is_common else None

    async def _transfer(
        self, blocks: Sequence[Sequence[WeightBlock]], base: int | None, version: int
    ) -> tuple[list[list[SentPart]], TransportT]:
        """Send the blocks, as changes from version `base` if it is not None.

        Return the sent parts of each rank, and the transport with which receivers read them.
        """
        raise NotImplementedError

    async def _send(
        self, transport: TransportT, base: int | None, version: int
    ) -> list[list[SentPart]]:
        """Send from all ranks, and return the parts that each sent."""
        send = partial(transport.send, base=base, version=version)
        return await self.senders.call("apply_to_weights", send)

    async def _rollback(self) -> None:
        # The next push may have other ranks.
        self._blocks = None
        try:
            await self.receivers.call("rollback")
        # The push's own error matters more than this one.
        except Exception as error:
            log.warning("a receiver could not roll back: %s", error)

    async def audit(self) -> Sequence[str] | None:
        """Return the names of weights that differ between the learner and any receiver.

        Return None if no receiver's weights can be read.
        """
        checksums = await self.senders.call("apply_to_weights", self.transport.compute_checksums)
        names_by_receiver = [
            names
            for names in await self.receivers.call("list_differing", checksums)
            if names is not None
        ]
        return (
            list(dict.fromkeys(name for names in names_by_receiver for name in names))
            if names_by_receiver
            else None
        )

    async def close(self) -> None:
        await self._forget()

    async def _forget(self) -> None:
        """Release the state that both ends keep between pushes. Errors of dead ends are ignored."""
        with contextlib.suppress(Exception):
            await self.senders.call("apply_to_weights", self.transport.forget_sent)
        with contextlib.suppress(Exception):
            await self.receivers.call("forget", self.transport)
