"""A teacher with another tokenizer: it scores the same text in its own tokens.

Its log-probabilities are mapped back to the student's tokens. T = the student's tokens laid end to
end. `ratchet.learners.cross_tokenizer_spans` defines spans.
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
from ratchet.learners.cross_tokenizer_spans import Span, TokenRun, find_common_spans
from ratchet.learners.teacher import Teacher
from ratchet.protocols import Learner
from ratchet.types import Group, Message, Task, Trajectory


@dataclass
class TranslatedRow:
    """A row in the teacher's tokens.

    asked: True for tokens to score.
    spans: pairs of the student's and the teacher's token ranges with the same scored text.
    """

    tokens: list[int] = field(default_factory=list)
    asked: list[bool] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)


class AlignedTeacher(Teacher):
    """A teacher whose scores are aligned with the student's tokens by spans.

    "logprobs" [T]: a span's log-probability under the teacher, spread evenly over the student's
      tokens of the span, so that sums over spans are right.
    "spans" [T]: int64, the index of the token's span in the batch, -1 outside spans.

    Text beyond the teacher's `max_positions`, counted in the teacher's tokens, has no span.
    """

    reads_rows: ClassVar[bool] = False

    def __init__(
        self, inner: Learner, student: Tokenizer, teacher: Tokenizer, *, max_positions: int
    ) -> None:
        super().__init__(inner, max_positions=max_positions, vocab_size=teacher.vocab_size)
        self.student = student
        self.teacher = teacher

    async def score(
        self, batch: Batch, wanted: Sequence[str], *, top_k: int = 0
    ) -> Mapping[str, Tensor]:
        """Score the rows' text under the teacher."""
        self.check_media(batch)
        translations = [self.translate(tokens, asked) for tokens, asked in _rows(batch)]
        teacher_logprobs = await self._score_translations(batch, translations)
        logprobs_T = torch.zeros(batch.n_tokens, dtype=teacher_logprobs.dtype)
        spans_T = torch.full((batch.n_tokens,), -1, dtype=torch.int64)
        starts = batch.starts_S.tolist()
        span_number = teacher_start = 0
        for start, translation in zip(starts, translations, strict=True):
            for student_range, teacher_range in translation.spans:
                tokens = slice(start + student_range.start, start + student_range.stop)
                total = teacher_logprobs[
                    teacher_start + teacher_range.start : teacher_start + teacher_range.stop
                ].sum()
                logprobs_T[tokens] = total / len(student_range)
                spans_T[tokens] = span_number
                span_number += 1
            teacher_start += len(translation.tokens)
        columns = {"logprobs": logprobs_T, "spans": spans_T}
        return {name: columns[name] for name in wanted}

    async def _score_translations(
        self, batch: Batch, translations: Sequence[TranslatedRow]
    ) -> Tensor:
        """Return the teacher's log-probabilities of the translated rows, laid end to end."""
        rows = [
            replace(Trajectory.supervised(row.tokens, row.asked), temperature=temperature)
            for row, temperature in zip(translations, batch.temperature_S.tolist(), strict=True)
        ]
        task = Task("aligned", (Message("user", ""),))
        packed = pack([Group(str(i), task, (row,)) for i, row in enumerate(rows)])
        return (await self.inner.score(packed, ["logprobs"]))["logprobs"]

    def translate(self, tokens: Sequence[int], asked: Sequence[bool]) -> TranslatedRow:
        """Return the row in the teacher's tokens.

        Its text is cut at control tokens, and between tokens to score and others. If the teacher
        can't encode a text to score, it is left out, without a span. Raises DataError if it can't
        encode other text, such as a prompt's.
        """
        translation = TranslatedRow()
        controls = set(self.student.special_ids.values()) | set(self.student.eos_ids)
        kinds = [
            (i if token in controls else -1, is_scored)
            for i, (token, is_scored) in enumerate(zip(tokens, asked, strict=True))
        ]
        after: After = "start"
        # The text directly before, in the student's and the teacher's tokens.
        previous: tuple[Sequence[int], Sequence[int]] = ((), ())
        for (control, is_scored), run in groupby(range(len(tokens)), key=lambda i: kinds[i]):
            indices = list(run)
            student_tokens = [tokens[i] for i in indices]
            if control >= 0:
                teacher_tokens = self._control(student_tokens[0])
                spans = [(range(1), range(len(teacher_tokens)))] if teacher_tokens else []
                after = "special"
                previous = ((), ())
            else:
                student = TokenRun(self.student, student_tokens, previous[0])
                teacher_tokens = self._text(student.text, after, is_scored)
                spans = (
                    find_common_spans(student, TokenRun(self.teacher, teacher_tokens, previous[1]))
                    if is_scored
                    else ()
                )
                after = "text"
                previous = (student_tokens, teacher_tokens)
            first = len(translation.tokens)
            translation.tokens += teacher_tokens
            translation.asked += [is_scored] * len(teacher_tokens)
            translation.spans += [
                (_shift(a, indices[0]), _shift(b, first)) for a, b in spans if is_scored
            ]
        return self._truncate(translation)

    def _truncate(self, translation: TranslatedRow) -> TranslatedRow:
        """Cut the row to the teacher's context, and drop spans that contain the first token.

        No earlier token predicts the first one.
        """
        end = self.max_positions
        spans = [
            (student_range, teacher_range)
            for student_range, teacher_range in translation.spans
            if teacher_range.start > 0 and teacher_range.stop <= end
        ]
        return TranslatedRow(translation.tokens[:end], translation.asked[:end], spans)

    def _text(self, text: str, after: After, written: bool) -> list[int]:
        """Return the teacher's tokens of a text.

        Returns [] for text that the student wrote and the teacher can't encode.
        """
        try:
            return self.teacher.encode(text, after=after)
        except DataError:
            # A student may write anything, such as half a character.
            if written:
                return []
            raise

    def _control(self, token: int) -> list[int]:
        """Return the teacher's tokens for a control token of the student.

        They are the token with the same name, else the one with the same function (end, beginning),
        else the name as text.
        """
        name = next((text for text, i in self.student.special_ids.items() if i == token), "")
        same = self.teacher.special_ids.get(name)
        if same is not None:
            return [same]
        if token in self.student.eos_ids and self.teacher.eos_ids:
            return [self.teacher.eos_ids[0]]
        if token == self.student.bos_id:
            return [] if self.teacher.bos_id is None else [self.teacher.bos_id]
        return self.teacher.encode(name, after="special")


def _shift(span: range, by: int) -> range:
    return range(span.start + by, span.stop + by)


def _rows(batch: Batch) -> Iterator[tuple[list[int], list[bool]]]:
    lengths = batch.lengths_S.tolist()
    rows = zip(batch.tokens_T.split(lengths), batch.predicted_T.split(lengths), strict=True)
    return ((tokens.tolist(), asked.tolist()) for tokens, asked in rows)
