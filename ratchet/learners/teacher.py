"""A frozen teacher for distillation. Its model is read from a directory, and it only scores."""

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
    """A learner that scores a teacher's log-probabilities, and never updates.

    Checkpoints leave it out, because the recipe names its directory.

    reads_rows: True if the teacher scores the policy's token ids, so that rows must fit into its
      context. False for `AlignedTeacher`, which tokenises the text again.
    name: the teacher's name in error messages.
    max_positions: length of the teacher's context, in tokens.
    vocab_size: rows of the teacher's embedding.
    reads_media: True if the teacher can read images, audio or videos.
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
        self, batch: Batch, output_names: Sequence[str], *, top_k: int = 0
    ) -> Mapping[str, Tensor]:
        """Return the named columns.

        Raises DataError for a row that is longer than the model's context, or has media that the
        model can't read.
        """
        self.check_media(batch)
        longest = max(batch.lengths_S.tolist(), default=0)
        if longest > self.max_positions:
            raise DataError(
                f"{self.name} reads at most {self.max_positions} tokens, but a row has {longest}. "
                "Shorten or drop the row, or use a teacher with a longer context."
            )
        # A student whose embedding is padded to more rows may sample a padding token. Such a token
        # has no meaning, so the last token of the teacher's embedding stands for it.
        readable = replace(batch, tokens_T=batch.tokens_T.clamp(max=self.vocab_size - 1))
        return await self.inner.score(readable, output_names, top_k=top_k)

    def check_media(self, batch: Batch) -> None:
        """Raise DataError if a row has media that the teacher can't read."""
        kind = next((placed.medium.kind for row in batch.media_S for placed in row), None)
        if kind is not None and not self.reads_media:
            raise DataError(
                f"{self.name} only reads text, but a row has a medium of kind {kind}. Use a "
                "multimodal teacher of the policy's model family, or tasks without media."
            )

    async def update(self, mini: Batch, terms: Sequence[LossTerm]) -> Mapping[str, float]:
        raise AssertionError("a teacher can't be updated")

    def save(self, directory: Path) -> None: ...

    def load(self, directory: Path) -> None: ...
