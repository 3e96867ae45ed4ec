"""A frozen teacher whose model is read from a directory. It only scores, and saves nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from torch import Tensor

from ratchet.batch import Batch
from ratchet.errors import DataError
from ratchet.learners.wrapper import LearnerWrapper
from ratchet.protocols import Learner, LossTerm


class Teacher(LearnerWrapper):
    """A learner that never updates. Checkpoints leave it out: the recipe names its directory.

    reads_rows: True if it scores the rows as they are, so that they must fit into its context.
    max_positions: length of its context, in tokens.
    vocab_size: rows of its embedding.
    reads_media: True if it gets the rows' images, audio and videos too.
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
        self.name = name
        self.reads_media = reads_media
        self.max_positions = max_positions
        self.vocab_size = vocab_size

    async def score(
        self, batch: Batch, wanted: Sequence[str], *, top_k: int = 0
    ) -> Mapping[str, Tensor]:
        """Return the `wanted` outputs for the rows.

        Raises DataError for a row that is longer than the model's context, or has media that it
        can't read.
        """
        self.check_media(batch)
        longest = max(batch.lengths_S.tolist(), default=0)
        if longest > self.max_positions:
            raise DataError(
                f"{self.name} reads {self.max_positions} tokens, and a row has {longest}. Shorten "
                "or drop it, or use a teacher with a longer context."
            )
        # A student with a larger padded embedding may sample a padding token. It has no meaning,
        # so the last token of the teacher's embedding stands for it.
        readable = replace(batch, tokens_T=batch.tokens_T.clamp(max=self.vocab_size - 1))
        return await self.inner.score(readable, wanted, top_k=top_k)

    def check_media(self, batch: Batch) -> None:
        """Raise DataError if a row has media that the teacher can't read."""
        kind = next((placed.medium.kind for row in batch.media_S for placed in row), None)
        if kind is not None and not self.reads_media:
            raise DataError(
                f"{self.name} reads text alone, and the policy saw a medium of the kind {kind} in "
                "a row. Use a teacher of the policy's family that reads them, or tasks without "
                "media."
            )

    async def update(self, mini: Batch, terms: Sequence[LossTerm]) -> Mapping[str, float]:
        raise AssertionError("a teacher was asked to update")

    def save(self, directory: Path) -> None: ...

    def load(self, directory: Path) -> None: ...
