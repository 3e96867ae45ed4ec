"""A teacher with another tokenizer: asked about the same text in its own tokens, answering in the student's.

T = the student's tokens laid end to end. Where a boundary of student tokens and one of teacher tokens fall on the same
character, a span of text ends; a span is what the two can be compared on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise
from typing import ClassVar

import torch
from torch import Tensor

from ratchet.batch import Batch
from ratchet.data.packing import pack
from ratchet.data.tokenizer import After, Tokenizer
from ratchet.errors import DataError
from ratchet.interfaces import Learner
from ratchet.learners.teacher import Teacher
from ratchet.types import Group, Message, Task, Trajectory

REPLACED = "\N{REPLACEMENT CHARACTER}"
LONG = 32  # tokens: a character has at most 4 bytes, so that twice that many without a whole one are none


@dataclass
class Translation:
    """One row in the teacher's tokens. spans: (indices of student tokens, indices of teacher tokens) of the same text, of the
    tokens that are asked about."""

    tokens: list[int] = field(default_factory=list)
    asked: list[bool] = field(default_factory=list)
    spans: list[tuple[range, range]] = field(default_factory=list)


class AlignedTeacher(Teacher):
    """Scores like a learner, for a frozen role.

    "logprobs" [T]: a span's log-probability under the teacher, spread evenly over the student's tokens of the span, so that
    sums over spans are right. "spans" [T] int64: numbers the spans of the batch, -1 outside. What lies beyond the teacher's
    `max_positions`, counted in its own tokens, has no span.
    """

    reads_rows: ClassVar[bool] = False

    def __init__(self, inner: Learner, student: Tokenizer, teacher: Tokenizer, *, max_positions: int) -> None:
        super().__init__(inner, max_positions=max_positions, vocab_size=teacher.vocab_size)
        self.student, self.teacher = student, teacher

    async def score(self, batch: Batch, wanted: Sequence[str], *, top_k: int = 0) -> Mapping[str, Tensor]:
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
        """The row's text, cut where control tokens stand and where the writer changes, in the teacher's tokens. What the
        student wrote and the teacher has no tokens for is left out, without a span; a prompt of that kind is a DataError."""
        made = Translation()
        controls = set(self.student.special_ids.values()) | set(self.student.eos_ids)
        kinds = [(i if token in controls else -1, on) for i, (token, on) in enumerate(zip(tokens, asked, strict=True))]
        after = "start"
        for (control, on), run in groupby(range(len(tokens)), key=lambda i: kinds[i]):
            indices = list(run)
            mine = [tokens[i] for i in indices]
            theirs = self._control(mine[0]) if control >= 0 else self._text(mine, after, on)
            first = len(made.tokens)
            made.tokens += theirs
            made.asked += [on] * len(theirs)
            after = "special" if control >= 0 else "text"
            if on and theirs:
                made.spans += self._spans(mine, theirs, indices[0], first, whole=control >= 0)
        return self._readable(made)

    def _readable(self, made: Translation) -> Translation:
        end = self.max_positions
        spans = [(mine, theirs) for mine, theirs in made.spans if theirs.stop <= end]
        return Translation(made.tokens[:end], made.asked[:end], spans)

    def _text(self, mine: Sequence[int], after: After, written: bool) -> list[int]:
        try:
            return self.teacher.encode(self.student.decode(mine), after=after)
        except DataError:
            if written:  # a student may write anything, half a character too
                return []
            raise

    def _control(self, token: int) -> list[int]:
        """The teacher's token of the same name, or of the same part (end, beginning); else its name as text."""
        name = next((text for text, i in self.student.special_ids.items() if i == token), "")
        same = self.teacher.special_ids.get(name)
        if same is not None:
            return [same]
        if token in self.student.eos_ids and self.teacher.eos_ids:
            return [self.teacher.eos_ids[0]]
        if token == self.student.bos_id:
            return [] if self.teacher.bos_id is None else [self.teacher.bos_id]
        return self.teacher.encode(name, after="special")

    def _spans(
        self, mine: Sequence[int], theirs: Sequence[int], my_start: int, their_start: int, *, whole: bool
    ) -> Iterator[tuple[range, range]]:
        my_cuts, their_cuts = {0: 0, -1: len(mine)}, {0: 0, -1: len(theirs)}
        if not whole:
            my_cuts, their_cuts = _cuts(self.student, mine), _cuts(self.teacher, theirs)
        common = [(my_cuts[at], their_cuts[at]) for at in my_cuts if at in their_cuts]
        for (a, x), (b, y) in pairwise(common):
            yield range(my_start + a, my_start + b), range(their_start + x, their_start + y)


def _cuts(tokenizer: Tokenizer, tokens: Sequence[int]) -> dict[int, int]:
    """How many tokens make up the first n characters, by n, wherever a token ends with a whole character; the last entry is
    the end, under -1, as two tokenizers may not give back the very same text.

    Only what follows the last cut is decoded at each token, behind the tokens between the cut before it and it: what a decoder
    does at the beginning of a text (SentencePiece drops a space) has then been done. So the work grows with the row's length,
    not with its square; `Window.shorten` keeps it so where no
    character gets whole.
    """
    text = tokenizer.decode(tokens)
    cuts = {0: 0}
    window = Window(tokenizer)
    for count, token in enumerate(tokens[:-1], start=1):
        window.tokens.append(token)
        piece = window.text()
        if not text.startswith(piece, window.at) or piece.endswith(REPLACED):
            window.shorten(text)
        elif piece:
            window.pass_over(len(window.tokens), piece)
            cuts.setdefault(window.at, count)
    cuts.pop(len(text), None)
    return {**cuts, -1: len(tokens)}


@dataclass
class Window:
    """The tokens of a text after a place in it. before: those that the place ends, for the decoder alone. at: characters before
    the place."""

    tokenizer: Tokenizer
    before: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    at: int = 0

    def text(self, count: int | None = None) -> str:
        """Of its first tokens, or of all."""
        return self.tokenizer.decode([*self.before, *self.tokens[:count]])[len(self.tokenizer.decode(self.before)) :]

    def pass_over(self, count: int, piece: str) -> None:
        """Moves the place behind the first `count` tokens, whose text is `piece`."""
        if piece:
            self.before = self.tokens[:count]
        self.tokens, self.at = self.tokens[count:], self.at + len(piece)

    def shorten(self, text: str) -> None:
        """A long one without a whole character is halved, if its halves mean apart what they mean together."""
        if len(self.tokens) < LONG:
            return
        half = replace(self, tokens=list(self.tokens))
        piece = half.text(LONG // 2)
        half.pass_over(LONG // 2, piece)
        if piece + half.text() == self.text() and text.startswith(piece, self.at):
            self.before, self.tokens, self.at = half.before, half.tokens, half.at


def _rows(batch: Batch) -> Iterator[tuple[list[int], list[bool]]]:
    lengths = batch.lengths_S.tolist()
    rows = zip(batch.tokens_T.split(lengths), batch.predicted_T.split(lengths), strict=True)
    return ((tokens.tolist(), asked.tolist()) for tokens, asked in rows)
