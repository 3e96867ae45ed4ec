"""A frozen role whose model lies in a directory: it scores, and has nothing to save."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from ratchet.batch import Batch
from ratchet.interfaces import Learner, LossTerm, Shard


class Teacher:
    """Implements `Learner` around one that never updates. A checkpoint leaves it out: the recipe names its directory."""

    def __init__(self, inner: Learner) -> None:
        self.inner = inner

    async def score(self, batch: Batch, wanted: Sequence[str], *, top_k: int = 0) -> Mapping[str, Tensor]:
        return await self.inner.score(batch, wanted, top_k=top_k)

    async def update(self, mini: Batch, terms: Sequence[LossTerm]) -> Mapping[str, float]:
        raise AssertionError("a teacher was asked to update")

    def weights(self) -> Iterator[Shard]:
        return self.inner.weights()

    def save(self, directory: Path) -> None: ...

    def load(self, directory: Path) -> None: ...

    def export(self, directory: Path) -> None:
        self.inner.export(directory)
