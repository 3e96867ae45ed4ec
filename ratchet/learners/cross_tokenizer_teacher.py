"""A teacher with another tokenizer: asked about the same text in its own tokens, answering in the
student's.

T = the student's tokens laid end to end. `ratchet.learners.cross_tokenizer_spans` says what a span
is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import ClassVar

import torch
from torch import Tensor

from ratchet.batch import Batch
from ratchet.data.chat.tokenizer import After, Tokenizer
from ratchet.data.packing import pack
from ratchet.errors import DataError
from ratchet.learners.cross_tokenizer_spans import Run, Span, common_spans
from ratchet.learners.teacher import Teacher
from ratchet.protocols import Learner
from ratchet.types import Group, Message, Task, Trajectory


@dataclass
class Translation:
    """One row in the teacher's tokens. spans: of the tokens that are asked about."""

    tokens: list[int] = field(default_factory=list)
    asked: list[bool] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)


class AlignedTeacher(Teacher):
    """Scores like a learner, for a frozen role.

    "logprobs" [T]: a span's log-probability under the teacher, spread evenly over the student's
    tokens of the span, so that sums over spans are right. "spans" [T] int64: numbers the spans of
    the batch, -1 outside. What lies beyond the teacher's `max_positions`, counted in its own
    tokens, has no span.
    """

    reads_rows: ClassVar[bool] = False

    def __init__(
        self, inner: Learner, student: Tokenizer, teacher: Tokenizer, *, max_positions: int
    ) -> None:
        super().__init__(inner, max_positions=max_positions, vocab_size=teacher.vocab_size)
        self.student, self.teacher = student, teacher

    async def score(
        self, batch: Batch, wanted: Sequence[str], *, top_k: int = 0
    ) -> Mapping[str, Tensor]:
        self.check_media(batch)
        translations = [self.translate(tokens, asked) for tokens, asked in _rows(batch)]
        theirs = await self._ask(batch, translations)
        logprobs_T = torch.zeros(batch.n_tokens, dtype=theirs.dtype)
        spans_T = torch.full((batch.n_tokens,), -1, dtype=torch.int64)
        starts = batch.starts_S.tolist()
        number = their_start = 0
        for start, translation in zip(starts, translations, strict=True):
            for mine, other in translation.spans:
                place = slice(start + mine.start, start + mine.stop)
                total = theirs[their_start + other.start : their_start + other.stop].sum()
                logprobs_T[place], spans_T[place] = total / len(mine), number
                number += 1
            their_start += len(translation.tokens)
        columns = {"logprobs": logprobs_T, "spans": spans_T}
        return {name: columns[name] for name in wanted}

    async def _ask(self, batch: Batch, translations: Sequence[Translation]) -> Tensor:
        rows = [
            replace(Trajectory.supervised(row.tokens, row.asked), temperature=temperature)
            for row, temperature in zip(translations, batch.temperature_S.tolist(), strict=True)
        ]
        task = Task("aligned", (Message("user", ""),))
        packed = pack([Group(str(i), task, (row,)) for i, row in enumerate(rows)])
        return (await self.inner.score(packed, ["logprobs"]))["logprobs"]

    def translate(self, tokens: Sequence[int], asked: Sequence[bool]) -> Translation:
        """Return the row in the teacher's tokens: its text is cut at control tokens and where the
        writer changes.

        What the student wrote and the teacher has no tokens for is left out, without a span. Raises
        DataError for a prompt of that kind.
        """
        made = Translation()
        controls = set(self.student.special_ids.values()) | set(self.student.eos_ids)
        kinds = [
            (i if token in controls else -1, on)
            for i, (token, on) in enumerate(zip(tokens, asked, strict=True))
        ]
        after: After = "start"
        previous: tuple[Sequence[int], Sequence[int]] = (
            (),
            (),
        )  # text directly before, in the student's and the teacher's tokens
        for (control, on), run in groupby(range(len(tokens)), key=lambda i: kinds[i]):
            indices = list(run)
            mine = [tokens[i] for i in indices]
            if control >= 0:
                theirs = self._control(mine[0])
                spans = [(range(1), range(len(theirs)))] if theirs else []
                after, previous = "special", ((), ())
            else:
                student = Run(self.student, mine, previous[0])
                theirs = self._text(student.text, after, on)
                spans = common_spans(student, Run(self.teacher, theirs, previous[1])) if on else ()
                after, previous = "text", (mine, theirs)
            first = len(made.tokens)
            made.tokens += theirs
            made.asked += [on] * len(theirs)
            made.spans += [(_moved(a, indices[0]), _moved(b, first)) for a, b in spans if on]
        return self._readable(made)

    def _readable(self, made: Translation) -> Translation:
        """Without what lies beyond the teacher's context, and without spans that begin with the
        row: nothing predicts those."""
        end = self.max_positions
        spans = [
            (mine, theirs) for mine, theirs in made.spans if theirs.start > 0 and theirs.stop <= end
        ]
        return Translation(made.tokens[:end], made.asked[:end], spans)

    def _text(self, text: str, after: After, written: bool) -> list[int]:
        try:
            return self.teacher.encode(text, after=after)
        except DataError:
            if written:  # a student may write anything, half a character too
                return []
            raise

    def _control(self, token: int) -> list[int]:
        """The teacher's token of the same name, or of the same part (end, beginning); else its name
        as text."""
        name = next((text for text, i in self.student.special_ids.items() if i == token), "")
        same = self.teacher.special_ids.get(name)
        if same is not None:
            return [same]
        if token in self.student.eos_ids and self.teacher.eos_ids:
            return [self.teacher.eos_ids[0]]
        if token == self.student.bos_id:
            return [] if self.teacher.bos_id is None else [self.teacher.bos_id]
        return self.teacher.encode(name, after="special")


def _moved(span: range, by: int) -> range:
    return range(span.start + by, span.stop + by)


def _rows(batch: Batch) -> Iterator[tuple[list[int], list[bool]]]:
    lengths = batch.lengths_S.tolist()
    rows = zip(batch.tokens_T.split(lengths), batch.predicted_T.split(lengths), strict=True)
    return ((tokens.tolist(), asked.tolist()) for tokens, asked in rows)
