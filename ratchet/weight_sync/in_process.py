"""The embedded link: learner and engine hold the very same tensors, so a push only names their
version."""

from __future__ import annotations

from collections.abc import Sequence

from ratchet.protocols import Generator


class SharedLink:
    def __init__(self, generator: Generator) -> None:
        self.generator = generator

    async def push(self, version: int) -> None:
        await self.generator.commit(version)
        # it may rest since the step got its groups, as the weights were to change
        await self.generator.resume()

    async def audit(self) -> Sequence[str] | None:
        return []  # no weight can differ from itself

    async def close(self) -> None: ...
