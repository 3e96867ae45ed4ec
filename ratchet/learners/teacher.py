"""A frozen role whose model lies in a directory: it scores, and has nothing to save."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from torch import Tensor

from ratchet.batch import Batch
from ratchet.errors import DataError
from ratchet.learners.wrapper import Around
from ratchet.protocols import Learner, LossTerm


class Teacher(Around):
    """Implements `Learner` around one that never updates. A checkpoint leaves it out: the recipe
    names its directory.

    max_positions: tokens that it can read. vocab_size: rows of its embedding. reads_rows: whether
    it is asked about the rows as they are, so that they must fit into it. reads_media: whether it
    is shown their images, audio and videos too.
    """

    reads_rows: ClassVar[bool] = True

    def __init__(
        self,
        inner: Learner,
        *,
        name: str = "teacher",
        max_positions: int,
        vocab_size: int,
        reads_media: bool = False,
    ) -> None:
        super().__init__(inner)
        self.name, self.reads_media = name, reads_media
        self.max_positions, self.vocab_size = max_positions, vocab_size

    async def score(
        self, batch: Batch, wanted: Sequence[str], *, top_k: int = 0
    ) -> Mapping[str, Tensor]:
        """Raises DataError for a row that is longer than what the model can read, or has media
        where it reads none."""
        self.check_media(batch)
        longest = max(batch.lengths_S.tolist(), default=0)
        if longest > self.max_positions:
            raise DataError(
                f"{self.name} reads {self.max_positions} tokens, and a row has {longest}: shorten "
                "or drop it, "
                "or use a teacher with a longer context"
            )
        # A student with more rows of padding may sample one, which means nothing: the teacher's
        # last row is as good.
        known = replace(batch, tokens_T=batch.tokens_T.clamp(max=self.vocab_size - 1))
        return await self.inner.score(known, wanted, top_k=top_k)

    def check_media(self, batch: Batch) -> None:
        found = next((one.medium.kind for row in batch.media_S for one in row), None)
        if found is not None and not self.reads_media:
            raise DataError(
                f"{self.name} is asked about text alone, and a row has a medium of the kind "
                f"{found}, which the policy was "
                "shown: use a teacher of the policy's family that reads them, or tasks without"
            )

    async def update(self, mini: Batch, terms: Sequence[LossTerm]) -> Mapping[str, float]:
        raise AssertionError("a teacher was asked to update")

    def save(self, directory: Path) -> None: ...

    def load(self, directory: Path) -> None: ...
