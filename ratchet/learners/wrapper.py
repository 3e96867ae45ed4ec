"""The base class of learners that wrap another learner."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from ratchet.batch import Batch
from ratchet.protocols import ExportedPart, Learner, LossTerm, Shard


class LearnerWrapper(Learner):
    """The base class of learner wrappers: forwards every call to `inner`.

    It has no fingerprint, because a wrapper may hold other weights than the learner inside.
    """

    def __init__(self, inner: Learner) -> None:
        self.inner = inner
        self.can_offload = inner.can_offload

    async def score(
        self, batch: Batch, output_names: Sequence[str], *, top_k: int = 0
    ) -> Mapping[str, Tensor]:
        return await self.inner.score(batch, output_names, top_k=top_k)

    async def update(self, mini: Batch, terms: Sequence[LossTerm]) -> Mapping[str, float]:
        return await self.inner.update(mini, terms)

    def weights(self) -> Iterator[Shard]:
        return self.inner.weights()

    def save(self, directory: Path) -> None:
        self.inner.save(directory)

    def load(self, directory: Path) -> None:
        self.inner.load(directory)

    def export(
        self, directory: Path, *, averaged: bool = False, part: ExportedPart = "all"
    ) -> None:
        self.inner.export(directory, averaged=averaged, part=part)

    def count_later_bytes(self) -> int:
        return self.inner.count_later_bytes()

    async def onload(self) -> None:
        await self.inner.onload()

    async def offload(self) -> None:
        await self.inner.offload()
