"""The policy without its adapter, as a role of its own: the reference of a run with LoRA needs no
second copy of the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from torch import Tensor

from ratchet.batch import Batch
from ratchet.learners.wrapper import Around
from ratchet.protocols import Learner, LossTerm


class ScoresBase(Learner, Protocol):
    async def score_base(
        self, batch: Batch, wanted: Sequence[str], *, top_k: int = 0
    ) -> Mapping[str, Tensor]:
        """As `score`, without the model's adapter."""
        ...


class BaseView(Around):
    """Implements `Learner` on that of the policy, which moves and saves what there is. It never
    trains."""

    inner: ScoresBase

    def __init__(self, policy: ScoresBase) -> None:
        super().__init__(policy)

    async def score(
        self, batch: Batch, wanted: Sequence[str], *, top_k: int = 0
    ) -> Mapping[str, Tensor]:
        return await self.inner.score_base(batch, wanted, top_k=top_k)

    async def update(self, mini: Batch, terms: Sequence[LossTerm]) -> Mapping[str, float]:
        raise AssertionError("the base of an adapter was asked to update")

    def save(self, directory: Path) -> None: ...

    def load(self, directory: Path) -> None: ...
