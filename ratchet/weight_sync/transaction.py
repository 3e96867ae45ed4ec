"""Push weights as a transaction: every receiver gets the new version, or keeps the old one.

prepare(names, shapes, dtypes, version) -> transfer -> a checksum for every part of every block ->
commit(version)
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from ratchet.errors import WeightSyncError
from ratchet.models.lora.decoder import Adapter
from ratchet.protocols import Ranks
from ratchet.weight_sync.weight_blocks import SentPart, WeightBlock, check_coverage

# "module:function" of the transport, and its options: see `WeightReceiver.receive`.
PendingReceive = tuple[str, Mapping[str, Any]]

log = logging.getLogger(__name__)

SEND_BLOCKS, DESCRIBE_BLOCKS, COMPUTE_CHECKSUMS = (
    f"ratchet.weight_sync.sender:{name}" for name in ("send", "describe", "compute_checksums")
)


class PushWeightSync:
    """The base class of weight syncs that push weights, by any transport.

    Implements `WeightSync` and `WeightAudit` between the ranks of a learner (`WeightSender`s) and
    receivers (`WeightReceiver`s).

    dtype: the sender converts floating-point weights to it; None: they keep the learner's.
    changes_only: send only changes since the last version, if all receivers have it.
    timeout_s: limit of one push.
    adapter: the adapter that the learner trains in place of its weights. The first push sends the
      weights too. All later pushes send only the adapter.
    """

    # "module:function" that sends blocks, see `ratchet.weight_sync.sender.send`.
    writer: str
    # "module:function" that receives blocks, see `WeightReceiver.receive`.
    receiver: str
    # True if received memory stays unchanged after the commit, until the next one.
    lasting = False
    # "module:function" that releases the resources of a session in a process; "" for none.
    release_function: str = ""

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
        self.dtype = dtype
        self.changes_only = changes_only
        self.timeout_s = timeout_s
        # The key under which both ends keep state between pushes.
        self.session = uuid.uuid4().hex
        # Size of the latest push.
        self.sent_bytes = 0
        self._blocks: list[list[WeightBlock]] | None = None
        # True once the receivers have the frozen weights.
        self._has_frozen = False
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
                f"not over after {self.timeout_s:g} s"
                if is_timeout
                else f"{type(error).__name__}: {error}"
            )
            raise WeightSyncError(
                f"version {version} was not pushed, and the generator keeps the previous version "
                f"({self._phase}: {reason})",
                rank=getattr(error, "rank", None),
            ) from error

    async def _push(self, version: int) -> None:
        """Run the transaction."""
        blocks = self._blocks = self._blocks or await self._describe()
        self._phase = "a receiver prepares"
        await self.receivers.call("prepare", blocks, version, self.lasting, self.adapter)
        delta_args = await self._get_delta_args(version) if self.changes_only else None
        self._phase = "weights are sent"
        parts, pending_receive = await self._transfer(blocks, version, delta_args)
        self.sent_bytes = sum(part.n_bytes for rank_parts in parts for part in rank_parts)
        self._phase = "a receiver compares checksums"
        await self.receivers.call("verify", parts, version, delta_args, pending_receive)
        self._phase = "a receiver commits"
        await self._commit(version)
        # The receivers now have the frozen weights: later pushes send the adapter alone.
        if self.adapter is not None and not self._has_frozen:
            await self._forget()
            self.session = uuid.uuid4().hex
            self._blocks = None
            self._has_frozen = True

    async def _commit(self, version: int) -> bool:
        """Commit on all receivers.

        Return True if a receiver adopted the pushed memory instead of copying it.
        """
        return any(await self.receivers.call("commit", version))

    async def _describe(self) -> list[list[WeightBlock]]:
        """Return the blocks of the ranks, which stay the same for all pushes."""
        self._phase = "the learner describes its weights"
        blocks = await self.senders.call(
            "send", DESCRIBE_BLOCKS, {"dtype": self.dtype, "skip_frozen": self._has_frozen}
        )
        check_coverage(blocks)
        return blocks

    async def _get_delta_args(self, version: int) -> Mapping[str, Any]:
        """Return the session and the versions between which changes are sent.

        `base` is an earlier version that all receivers have; None: there is none, and blocks are
        sent whole.
        """
        bases = await self.receivers.call("get_base_version", self.session)
        base = (
            bases[0]
            if len(set(bases)) == 1 and bases[0] is not None and bases[0] < version
            else None
        )
        return {"session": self.session, "base": base, "version": version}

    async def _transfer(
        self,
        blocks: Sequence[Sequence[WeightBlock]],
        version: int,
        delta_args: Mapping[str, Any] | None,
    ) -> tuple[list[list[SentPart]], PendingReceive | None]:
        """Send the blocks.

        Return (the sent parts of each rank, the arguments of the receivers' later `receive`; None
        if they have received the parts already).
        """
        raise NotImplementedError

    async def _send(
        self, options: Mapping[str, Any], delta_args: Mapping[str, Any] | None
    ) -> list[list[SentPart]]:
        """Send from all ranks, and return the parts that each sent."""
        send_options = {
            "dtype": self.dtype,
            "writer": self.writer,
            "options": options,
            "delta_args": delta_args,
            "skip_frozen": self._has_frozen,
        }
        return await self.senders.call("send", SEND_BLOCKS, send_options)

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
        checksums = await self.senders.call("send", COMPUTE_CHECKSUMS, {"dtype": self.dtype})
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
        for ranks, method, arguments in (
            (
                self.senders,
                "send",
                (
                    "ratchet.weight_sync.sender:forget",
                    {"function": self.release_function, "session": self.session},
                ),
            ),
            (self.receivers, "forget", (self.release_function, self.session)),
        ):
            with contextlib.suppress(Exception):
                await ranks.call(method, *arguments)
