"""A push, whatever carries the bytes: a transaction that ends with the new version on every
receiver, or with the old one.

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

from ratchet.errors import LinkError
from ratchet.models.lora.decoder import Adapter
from ratchet.protocols import Ranks
from ratchet.weight_sync.weight_blocks import Block, Part, check_cover

# "module:function" of the transport, and its options: see `Intake.receive`
Waiting = tuple[str, Mapping[str, Any]]

log = logging.getLogger(__name__)

SEND, DESCRIBE, SUMS = (
    f"ratchet.weight_sync.sender:{name}" for name in ("send", "describe", "sums")
)


class PushLink:
    """Implements `Link` and `Audits` between the ranks of a learner (`Outlet`s) and those of
    receivers (`Intake`s).

    dtype: floating-point weights are sent in it, converted by the sender; None: as the learner has
    them. changes_only: send what changed since the version before, where a receiver has that.
    timeout_s: of a push. adapter: what the learner trains in place of its weights: the first push
    brings these too, and all others the adapter alone.
    """

    writer: str  # "module:function", see `ratchet.weight_sync.sender.send`
    receiver: str  # "module:function", see `Intake.receive`
    # whether what receivers were handed stays as it is after the commit, until the next one
    lasting = False
    # "module:function" of a session: what this kind keeps in a process between pushes
    forgets: str = ""

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
        self.senders, self.receivers, self.adapter = senders, receivers, adapter
        self.dtype, self.changes_only, self.timeout_s = dtype, changes_only, timeout_s
        self.session = uuid.uuid4().hex  # names what both ends keep between pushes
        self.sent_bytes = 0  # of the latest push
        self._blocks: list[list[Block]] | None = None
        self._moving = False  # what rests is there
        self._doing = ""

    async def push(self, version: int) -> None:
        """Raises LinkError, which names the weight and the rank where it can; the generators then
        go on with what they have."""
        try:
            async with asyncio.timeout(self.timeout_s):
                await self._push(version)
        except BaseException as error:
            await self._rollback()
            if isinstance(error, LinkError) or not isinstance(error, Exception):
                raise
            late = isinstance(error, TimeoutError)
            said = (
                f"not over after {self.timeout_s:g} s"
                if late
                else f"{type(error).__name__}: {error}"
            )
            raise LinkError(
                f"version {version} was not pushed, the generator goes on with the one before "
                f"({self._doing}: {said})",
                rank=getattr(error, "rank", None),
            ) from error

    async def _push(self, version: int) -> None:
        blocks = self._blocks = self._blocks or await self._described()
        self._doing = "a receiver prepares"
        await self.receivers.call("prepare", blocks, version, self.lasting, self.adapter)
        since = await self._since(version) if self.changes_only else None
        self._doing = "weights are sent"
        parts, waiting = await self._transfer(blocks, version, since)
        self.sent_bytes = sum(part.n_bytes for own in parts for part in own)
        self._doing = "a receiver compares checksums"
        await self.receivers.call("verify", parts, version, since, waiting)
        self._doing = "a receiver commits"
        await self._commit(version)
        if self.adapter is not None and not self._moving:
            await self._forget()
            self.session, self._blocks, self._moving = uuid.uuid4().hex, None, True

    async def _commit(self, version: int) -> bool:
        """Whether some receiver goes on to use what it received where it lies."""
        return any(await self.receivers.call("commit", version))

    async def _described(self) -> list[list[Block]]:
        """Once: a learner's ranks keep their blocks."""
        self._doing = "the learner says what it has"
        blocks = await self.senders.call(
            "send", DESCRIBE, {"dtype": self.dtype, "moving": self._moving}
        )
        check_cover(blocks)
        return blocks

    async def _since(self, version: int) -> Mapping[str, Any]:
        """Changes need a version that all receivers have, and that came before."""
        bases = await self.receivers.call("base", self.session)
        base = (
            bases[0]
            if len(set(bases)) == 1 and bases[0] is not None and bases[0] < version
            else None
        )
        return {"session": self.session, "base": base, "version": version}

    async def _transfer(
        self, blocks: Sequence[Sequence[Block]], version: int, since: Mapping[str, Any] | None
    ) -> tuple[list[list[Part]], Waiting | None]:
        """What was sent; and where it waits for the receivers, what they call to get at it."""
        raise NotImplementedError

    async def _sent(
        self, options: Mapping[str, Any], since: Mapping[str, Any] | None
    ) -> list[list[Part]]:
        asked = {
            "dtype": self.dtype,
            "writer": self.writer,
            "options": options,
            "since": since,
            "moving": self._moving,
        }
        return await self.senders.call("send", SEND, asked)

    async def _rollback(self) -> None:
        self._blocks = None  # the ranks may be others next time
        try:
            await self.receivers.call("rollback")
        except Exception as error:  # what failed before is what counts
            log.warning("a receiver could not roll back: %s", error)

    async def audit(self) -> Sequence[str] | None:
        """The weights that differ between the learner and some receiver; None where no receiver can
        show its own."""
        sums = await self.senders.call("send", SUMS, {"dtype": self.dtype})
        found = [own for own in await self.receivers.call("differing", sums) if own is not None]
        return list(dict.fromkeys(name for own in found for name in own)) if found else None

    async def close(self) -> None:
        await self._forget()

    async def _forget(self) -> None:
        """Both ends let go of what they keep between pushes; an end that is gone has."""
        for ranks, method, arguments in (
            (
                self.senders,
                "send",
                (
                    "ratchet.weight_sync.sender:forget",
                    {"function": self.forgets, "session": self.session},
                ),
            ),
            (self.receivers, "forget", (self.forgets, self.session)),
        ):
            with contextlib.suppress(Exception):
                await ranks.call(method, *arguments)
