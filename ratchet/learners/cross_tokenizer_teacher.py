"""A distillation teacher with another tokenizer (cross-tokenizer distillation).

The teacher scores the student's text in its own tokens. Its log-probabilities are mapped back to
the student's tokens by spans, which `ratchet.learners.cross_tokenizer_spans` defines. T = the
student's tokens of a batch, packed.
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
    """A row of the student, translated to the teacher's tokens.

    is_scored: True for tokens whose log-probabilities are needed.
    spans: ranges of student's tokens and of teacher's tokens that have the same text.
    """

    tokens: list[int] = field(default_factory=list)
    is_scored: list[bool] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)


class AlignedTeacher(Teacher):
    """A teacher whose log-probabilities are aligned with the student's tokens by spans.

    It returns two columns:
    "logprobs" [T]: the teacher's log-probability of a span, divided evenly over the student's
      tokens of the span, so that sums over spans are right.
    "spans" [T]: int64, the index of the token's span in the batch; -1 outside spans.

    Text after the first `max_positions` teacher tokens of a row has no span.
    """

    reads_rows: ClassVar[bool] = False

    def __init__(
        self, inner: Learner, student: Tokenizer, teacher: Tokenizer, *, max_positions: int
    ) -> None:
        super().__init__(inner, max_positions=max_positions, vocab_size=teacher.vocab_size)
        self.student = student
        self.teacher = teacher

    async def score(
        self, batch: Batch, output_names: Sequence[str], *, top_k: int = 0
    ) -> Mapping[str, Tensor]:
        """Score the rows' text under the teacher."""
        self.check_media(batch)
        translations = [
            self.translate(tokens, is_scored) for tokens, is_scored in _split_rows(batch)
        ]
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
        return {name: columns[name] for name in output_names}

    async def _score_translations(
        self, batch: Batch, translations: Sequence[TranslatedRow]
    ) -> Tensor:
        """Return the teacher's log-probabilities of the translated rows, packed."""
        rows = [
            replace(Trajectory.supervised(row.tokens, row.is_scored), temperature=temperature)
            for row, temperature in zip(translations, batch.temperature_S.tolist(), strict=True)
        ]
        task = Task("aligned", (Message("user", ""),))
        packed = pack([Group(str(i), task, (row,)) for i, row in enumerate(rows)])
        return (await self.inner.score(packed, ["logprobs"]))["logprobs"]

    def translate(self, tokens: Sequence[int], is_scored: Sequence[bool]) -> TranslatedRow:
        """Return the row in the teacher's tokens.

        The row is cut at control tokens, and where scored tokens begin or end. Scored text that the
        teacher can't encode is left out and has no span. Raises DataError if the teacher can't
        encode text that is not scored, such as a prompt.

        is_scored: True for each token whose log-probability is needed.
        """
        translation = TranslatedRow()
        control_ids = set(self.student.special_ids.values()) | set(self.student.eos_ids)
        # Consecutive tokens with the same key are translated together. A control token has its own
        # index as key, so it is alone.
        keys = [
            (i if token in control_ids else -1, token_is_scored)
            for i, (token, token_is_scored) in enumerate(zip(tokens, is_scored, strict=True))
        ]
        after: After = "start"
        # The text directly before the run, in the student's and in the teacher's tokens.
        previous: tuple[Sequence[int], Sequence[int]] = ((), ())
        for (control_index, run_is_scored), run in groupby(
            range(len(tokens)), key=lambda i: keys[i]
        ):
            indices = list(run)
            student_tokens = [tokens[i] for i in indices]
            if control_index >= 0:
                teacher_tokens = self._translate_control_token(student_tokens[0])
                spans = [(range(1), range(len(teacher_tokens)))] if teacher_tokens else []
                after = "special"
                previous = ((), ())
            else:
                student = TokenRun(self.student, student_tokens, previous[0])
                teacher_tokens = self._encode_text(student.text, after, run_is_scored)
                spans = (
                    find_common_spans(student, TokenRun(self.teacher, teacher_tokens, previous[1]))
                    if run_is_scored
                    else ()
                )
                after = "text"
                previous = (student_tokens, teacher_tokens)
            teacher_offset = len(translation.tokens)
            translation.tokens += teacher_tokens
            translation.is_scored += [run_is_scored] * len(teacher_tokens)
            translation.spans += [
                (_shift(student_range, indices[0]), _shift(teacher_range, teacher_offset))
                for student_range, teacher_range in spans
                if run_is_scored
            ]
        return self._truncate(self._begin_with_bos(translation))

    def _begin_with_bos(self, translation: TranslatedRow) -> TranslatedRow:
        """Return the row with the teacher's BOS in front, if the teacher needs one and the row has
        none.

        The student's row has no BOS if the student's tokenizer has none.
        """
        bos_id = self.teacher.bos_id
        if not self.teacher.adds_bos or bos_id is None or translation.tokens[:1] == [bos_id]:
            return translation
        return TranslatedRow(
            [bos_id, *translation.tokens],
            [False, *translation.is_scored],
            [
                (student_range, _shift(teacher_range, 1))
                for student_range, teacher_range in translation.spans
            ],
        )

    def _truncate(self, translation: TranslatedRow) -> TranslatedRow:
        """Cut the row to the teacher's context, and drop spans that contain the first token.

        The first token of a row has no log-probability, because nothing precedes it.
        """
        end = self.max_positions
        spans = [
            (student_range, teacher_range)
            for student_range, teacher_range in translation.spans
            if teacher_range.start > 0 and teacher_range.stop <= end
        ]
        return TranslatedRow(translation.tokens[:end], translation.is_scored[:end], spans)

    def _encode_text(self, text: str, after: After, is_scored: bool) -> list[int]:
        """Return the teacher's tokens of a text; [] for scored text that the teacher can't encode.

        Raises DataError for text that is not scored and that the teacher can't encode.
        """
        try:
            return self.teacher.encode(text, after=after)
        except DataError:
            # Scored text was written by the student, which may write half a character.
            if is_scored:
                return []
            raise

    def _translate_control_token(self, token: int) -> list[int]:
        """Return the teacher's tokens for a control token of the student.

        The first of these that exists: the teacher's control token with the same name, its control
        token with the same function (end or beginning), the name as text.
        """
        name = next((text for text, i in self.student.special_ids.items() if i == token), "")
        same_name_id = self.teacher.special_ids.get(name)
        if same_name_id is not None:
            return [same_name_id]
        if token in self.student.eos_ids and self.teacher.eos_ids:
            return [self.teacher.eos_ids[0]]
        if token == self.student.bos_id:
            return [] if self.teacher.bos_id is None else [self.teacher.bos_id]
        return self.teacher.encode(name, after="special")


def _shift(span: range, offset: int) -> range:
    return range(span.start + offset, span.stop + offset)


def _split_rows(batch: Batch) -> Iterator[tuple[list[int], list[bool]]]:
    """Yield (tokens, True for each token to score) of each row."""
    lengths = batch.lengths_S.tolist()
    rows = zip(batch.tokens_T.split(lengths), batch.predicted_T.split(lengths), strict=True)
    return ((tokens.tolist(), is_predicted.tolist()) for tokens, is_predicted in rows)
