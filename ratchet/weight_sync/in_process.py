"""The weight sync of an embedded generator.

Learner and generator hold the same tensors, so a push only announces their version.
"""

from __future__ import annotations

from collections.abc import Sequence

from ratchet.protocols import Generator, WeightSync


class SharedWeightSync(WeightSync):
    """A weight sync that only commits the version of tensors that learner and generator share."""

    def __init__(self, generator: Generator) -> None:
        self.generator = generator

    async def push(self, version: int) -> None:
        await self.generator.commit(version)
        # The generator may have been paused before the update, which changes its weights.
        await self.generator.resume()

    async def audit(self) -> Sequence[str] | None:
        return []  # Shared weights can't differ.

    async def close(self) -> None: ...
