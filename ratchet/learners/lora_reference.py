"""The reference model of a LoRA run: the policy without its adapter, not a second model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from ratchet.batch import Batch
from ratchet.learners.wrapper import LearnerWrapper
from ratchet.protocols import LossTerm


class LoRAReference(LearnerWrapper):
    """The frozen reference role of a LoRA run: it scores with the policy's learner, adapter off.

    The weights belong to the policy's role, which saves and loads them, so
    `save` and `load` do nothing here.
    """

    async def score(
        self, batch: Batch, output_names: Sequence[str], *, top_k: int = 0
    ) -> Mapping[str, Tensor]:
        return await self.inner.score_base(batch, output_names, top_k=top_k)

    def count_later_bytes(self) -> int:
        return 0  # the policy's role counts them

    async def update(self, mini: Batch, terms: Sequence[LossTerm]) -> Mapping[str, float]:
        raise AssertionError("the base model of an adapter can't be updated")

    def save(self, directory: Path) -> None: ...

    def load(self, directory: Path) -> None: ...
