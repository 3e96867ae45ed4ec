"""The spans of one text on which two tokenizers can be compared.

A span is some of the student's tokens and some of the teacher's whose texts, as each tokenizer
decodes its own, are the same up to canonical equivalence (Unicode's NFC: "e" and a combining accent
are "é"). A tokenizer that changes text (lower case, no accents, other spaces) has no span there.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Literal

from ratchet.data.chat.tokenizer import Tokenizer
from ratchet.errors import DataError

Span = tuple[range, range]  # indices of the student's tokens, and of the teacher's

REPLACED = "\N{REPLACEMENT CHARACTER}"
# Tokens without a whole character beyond which bytes are invalid: a character has at most 4 bytes.
LONG_WINDOW = 32
# Tokens before a run, at least one of which has text.
CONTEXT = 8
# Maximum number of characters of a compatibility decomposition.
EXPANSION = 18


@dataclass(frozen=True)
class TokenRun:
    """A run of text tokens, without control tokens.

    previous: tokens of text that they directly follow, if any. Decoders treat the beginning of a
    text differently: those of SentencePiece drop a space there.
    """

    tokenizer: Tokenizer
    tokens: Sequence[int]
    previous: Sequence[int] = ()

    @cached_property
    def before(self) -> list[int]:
        """The last tokens of `previous` that make whole characters, if any."""
        for count in range(1, min(CONTEXT, len(self.previous)) + 1):
            tail = list(self.previous[-count:])
            text = self.tokenizer.decode(tail)
            if text and not text.startswith(REPLACED):
                # A half character at its end may become whole by the tokens after it.
                return tail if self.tokenizer.decode([*tail, *self.tokens]).startswith(text) else []
        return []

    @cached_property
    def text(self) -> str:
        """The text of the run after `previous`; bytes that are no UTF-8 become U+FFFD."""
        return DecodeWindow(self.tokenizer, self.before, list(self.tokens)).text()

    @cached_property
    def cuts(self) -> dict[int, int]:
        """The number of tokens that make up the first n characters of the text, by n.

        There is a cut wherever a token ends with a whole character. Only the text after the last
        cut is decoded at each token, so the work grows with the number of tokens, not with its
        square. `DecodeWindow.shorten` keeps it so where no character gets whole, and
        `DecodeWindow.is_due` where no decoding so far is the text's.
        """
        cuts = {0: 0}
        window = DecodeWindow(self.tokenizer, self.before)
        for count, token in enumerate(self.tokens[:-1], start=1):
            window.tokens.append(token)
            if not window.is_due:
                continue
            piece = window.text()
            if not self.text.startswith(piece, window.at) or piece.endswith(REPLACED):
                window.shorten(self.text)
            elif piece:
                window.pass_over(len(window.tokens), piece)
                cuts.setdefault(window.at, count)
        # Tokens without text at the end belong to the text before them.
        cuts[len(self.text)] = len(self.tokens)
        return cuts

    @cached_property
    def is_canonical(self) -> bool:
        """True if the tokenizer encodes the run's text as these tokens."""
        return any(self._writes(self.text, self.tokens, after) for after in ("start", "text"))

    def is_literal(self, characters: slice, tokens: range) -> bool:
        """True if each U+FFFD in the characters is that character, not invalid UTF-8."""
        text = self.text[characters]
        return (
            REPLACED not in text
            or self.is_canonical
            or self._writes(text, [self.tokens[i] for i in tokens], "text")
        )

    def _writes(self, text: str, tokens: Sequence[int], after: Literal["start", "text"]) -> bool:
        """True if the tokenizer encodes the text as these tokens."""
        try:
            return self.tokenizer.encode(text, after=after) == list(tokens)
        except DataError:
            return False


def find_common_spans(student: TokenRun, teacher: TokenRun) -> Iterator[Span]:
    """Yield the shortest spans of the two runs, in order and disjoint.

    teacher: its tokenizer's tokens of the student's text, which may decode to another text.
    """
    student_text = student.text
    teacher_text = teacher.text
    places = [
        (p, q)
        for p, q in align_positions(student_text, teacher_text)
        if p in student.cuts and q in teacher.cuts
    ]
    for (p, q), (p_end, q_end) in pairwise(places):
        tokens = range(student.cuts[p], student.cuts[p_end])
        if compose_nfc(student_text[p:p_end]) == compose_nfc(
            teacher_text[q:q_end]
        ) and student.is_literal(slice(p, p_end), tokens):
            yield tokens, range(teacher.cuts[q], teacher.cuts[q_end])


# --- Two texts, one of which a tokenizer made from the other.


def compose_nfc(text: str) -> str:
    """Return the canonical composition (NFC) of a text."""
    return unicodedata.normalize("NFC", text)


def align_positions(student: str, teacher: str) -> list[tuple[int, int]]:
    """Return ascending pairs of positions at which the two texts correspond.

    Both are scanned from the beginning, past differences of normalisation (`_difference`), up to
    the first unexplained difference; and from the end as far as they are equivalent.
    """
    if student == teacher:
        return [(i, i) for i in range(len(student) + 1)]
    student_ends = _ends(student)
    teacher_ends = _ends(teacher)
    # C = clusters
    student_C = [student[start:end] for start, end in pairwise(student_ends)]
    teacher_C = [teacher[start:end] for start, end in pairwise(teacher_ends)]
    forwards = [(0, 0)]
    i = j = 0
    while i < len(student_C) and j < len(teacher_C):
        step = (1, 1)
        if compose_nfc(student_C[i]) != compose_nfc(teacher_C[j]):
            step = _difference(student_C[i : i + EXPANSION], teacher_C[j : j + EXPANSION])
        if step is None:
            break
        i, j = i + step[0], j + step[1]
        forwards.append((student_ends[i], teacher_ends[j]))
    back_i, back_j = len(student_C), len(teacher_C)
    backwards = [(len(student), len(teacher))]
    while (
        back_i > i
        and back_j > j
        and compose_nfc(student_C[back_i - 1]) == compose_nfc(teacher_C[back_j - 1])
    ):
        back_i, back_j = back_i - 1, back_j - 1
        backwards.append((student_ends[back_i], teacher_ends[back_j]))
    return [*forwards, *(place for place in reversed(backwards) if place != forwards[-1])]


def _ends(text: str) -> list[int]:
    """Return 0 and the end of each cluster: characters that canonical composition may join."""
    return [
        0,
        *(i for i in range(1, len(text)) if not _joins(text[i])),
        *([len(text)] if text else []),
    ]


def _joins(character: str) -> bool:
    """True if the character may compose with the one before it: a mark, a Hangul vowel or final."""
    return unicodedata.category(character).startswith("M") or "\u1160" <= character <= "\u11ff"


def _difference(student_C: Sequence[str], teacher_C: Sequence[str]) -> tuple[int, int] | None:
    """Return the number of clusters at the beginning of each that spell the same text.

    Spellings differ by case, by accents, by a compatible form ("fi" for the ligature), or by a
    space
    that one side lacks. None: the clusters are no such spellings.
    """
    student_fold, teacher_fold = _folded(student_C[0]), _folded(teacher_C[0])
    if not student_fold or not teacher_fold:
        return (0, 1) if student_fold else (1, 0)
    i = j = 1
    while student_fold != teacher_fold:
        if teacher_fold.startswith(student_fold) and i < len(student_C):
            student_fold, i = student_fold + _folded(student_C[i]), i + 1
        elif student_fold.startswith(teacher_fold) and j < len(teacher_C):
            teacher_fold, j = teacher_fold + _folded(teacher_C[j]), j + 1
        else:
            return None
    return i, j


def _folded(text: str) -> str:
    """Return the compatible form of a text without case, accents, spaces and control characters."""
    plain = unicodedata.normalize("NFKD", unicodedata.normalize("NFKD", text).casefold())
    return "".join(
        character for character in plain if unicodedata.category(character)[0] not in "MZC"
    )


# --- The ends of tokens in a text.


@dataclass
class DecodeWindow:
    """The tokens of a text after a position in it.

    before: the tokens just before the position, as context for the decoder.
    at: number of characters before the position.
    due: number of tokens from which it is decoded again.
    """

    tokenizer: Tokenizer
    before: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    at: int = 0
    due: int = 0

    @property
    def is_due(self) -> bool:
        """True if the window has grown enough to be decoded again."""
        return len(self.tokens) >= self.due

    def text(self, count: int | None = None) -> str:
        """Return the text of the first `count` tokens; None: of all."""
        return self.tokenizer.decode([*self.before, *self.tokens[:count]])[
            len(self.tokenizer.decode(self.before)) :
        ]

    def pass_over(self, count: int, piece: str) -> None:
        """Move the position behind the first `count` tokens, whose text is `piece`."""
        if piece:
            self.before = self.tokens[:count]
        self.tokens = self.tokens[count:]
        self.at += len(piece)
        self.due = 0

    def shorten(self, text: str) -> None:
        """Halve a long window without a whole character, if its halves decode the same apart.

        They don't if one half character turns all bytes beside it into U+FFFD, as in decoders with
        byte fallback. Such a window is decoded again once it has grown by an eighth.
        """
        if len(self.tokens) < LONG_WINDOW:
            return
        half = replace(self, tokens=list(self.tokens))
        piece = half.text(LONG_WINDOW // 2)
        half.pass_over(LONG_WINDOW // 2, piece)
        if piece + half.text() == self.text() and text.startswith(piece, self.at):
            self.before = half.before
            self.tokens = half.tokens
            self.at = half.at
        else:
            self.due = len(self.tokens) * 9 // 8
