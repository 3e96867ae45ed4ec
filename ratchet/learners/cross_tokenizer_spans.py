"""Find the spans of a text on which two tokenizers can be compared.

A span is a range of the student's tokens and a range of the teacher's tokens that decode to the
same text. The texts may differ by canonical equivalence (Unicode's NFC: "e" and a combining accent
are "é"). Text that a tokenizer changes in other ways (lower case, no accents, spaces) has no span.
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
# A character has at most 4 bytes. So this many tokens without a whole character are invalid bytes.
LONG_WINDOW = 32
# Maximum number of tokens before a run that are decoded as its context.
MAX_CONTEXT = 8
# Maximum number of characters of a compatibility decomposition.
MAX_EXPANSION = 18


@dataclass(frozen=True)
class TokenRun:
    """A run of text tokens, without control tokens.

    previous: the text tokens directly before the run, if any. They matter because a decoder treats
      the beginning of a text differently: SentencePiece drops a space there.
    """

    tokenizer: Tokenizer
    tokens: Sequence[int]
    previous: Sequence[int] = ()

    @cached_property
    def context(self) -> list[int]:
        """Return the last tokens of `previous`, to be decoded before the run; [] if unusable.

        They are the fewest last tokens whose text begins with a whole character.
        """
        for count in range(1, min(MAX_CONTEXT, len(self.previous)) + 1):
            tail = list(self.previous[-count:])
            text = self.tokenizer.decode(tail)
            if text and not text.startswith(REPLACED):
                # If the run completes a character that the context begins, the length of the
                # context's text is unknown, so no context is used.
                return tail if self.tokenizer.decode([*tail, *self.tokens]).startswith(text) else []
        return []

    @cached_property
    def text(self) -> str:
        """Return the text of the run after `previous`; invalid UTF-8 becomes U+FFFD."""
        return DecodeWindow(self.tokenizer, self.context, list(self.tokens)).text()

    @cached_property
    def cuts(self) -> dict[int, int]:
        """Map n to the number of tokens that make up the first n characters of the text.

        There is a cut after each token that ends with a whole character. For each token only the
        text after the last cut is decoded, so the time is linear in the number of tokens.
        `DecodeWindow.shorten` keeps it linear if no token completes a character.
        `DecodeWindow.must_decode` keeps it linear if no decoded window matches the text.
        """
        cuts = {0: 0}
        window = DecodeWindow(self.tokenizer, self.context)
        for count, token in enumerate(self.tokens[:-1], start=1):
            window.tokens.append(token)
            if not window.must_decode:
                continue
            piece = window.text()
            if not self.text.startswith(piece, window.position) or piece.endswith(REPLACED):
                window.shorten(self.text)
            elif piece:
                window.advance(len(window.tokens), piece)
                cuts.setdefault(window.position, count)
        # Last tokens without text belong to the text before them.
        cuts[len(self.text)] = len(self.tokens)
        return cuts

    @cached_property
    def is_canonical(self) -> bool:
        """True if the tokenizer encodes the run's text as these tokens."""
        return any(self._encodes_as(self.text, self.tokens, after) for after in ("start", "text"))

    def is_literal(self, characters: slice, tokens: range) -> bool:
        """True if each U+FFFD in the slice of the text is a real U+FFFD, not invalid UTF-8.

        tokens: indices of the tokens that make up the slice.
        """
        text = self.text[characters]
        return (
            REPLACED not in text
            or self.is_canonical
            or self._encodes_as(text, [self.tokens[i] for i in tokens], "text")
        )

    def _encodes_as(
        self, text: str, tokens: Sequence[int], after: Literal["start", "text"]
    ) -> bool:
        """True if the tokenizer encodes the text as these tokens."""
        try:
            return self.tokenizer.encode(text, after=after) == list(tokens)
        except DataError:
            return False


def find_common_spans(student: TokenRun, teacher: TokenRun) -> Iterator[Span]:
    """Yield the spans of two runs in order. Spans are as short as possible and do not overlap.

    teacher: the student's text in the teacher's tokens, which may decode to a different text.
    """
    student_text = student.text
    teacher_text = teacher.text
    positions = [
        (p, q)
        for p, q in align_positions(student_text, teacher_text)
        if p in student.cuts and q in teacher.cuts
    ]
    for (p, q), (p_end, q_end) in pairwise(positions):
        tokens = range(student.cuts[p], student.cuts[p_end])
        is_same_text = compose_nfc(student_text[p:p_end]) == compose_nfc(teacher_text[q:q_end])
        if is_same_text and student.is_literal(slice(p, p_end), tokens):
            yield tokens, range(teacher.cuts[q], teacher.cuts[q_end])


# --- Alignment of a text with its encoded and decoded form


def compose_nfc(text: str) -> str:
    """Return the canonical composition (NFC) of a text."""
    return unicodedata.normalize("NFC", text)


def align_positions(student: str, teacher: str) -> list[tuple[int, int]]:
    """Return ascending pairs (position in `student`, position in `teacher`) of the same place.

    Both texts are scanned from the beginning up to the first difference that is more than a
    spelling (`_match_spellings`). Then they are scanned from the end up to the first
    difference of any kind.
    """
    if student == teacher:
        return [(i, i) for i in range(len(student) + 1)]
    student_ends = _find_cluster_ends(student)
    teacher_ends = _find_cluster_ends(teacher)
    # C = clusters
    student_C = [student[start:end] for start, end in pairwise(student_ends)]
    teacher_C = [teacher[start:end] for start, end in pairwise(teacher_ends)]
    forwards = [(0, 0)]
    i = j = 0
    while i < len(student_C) and j < len(teacher_C):
        step = (1, 1)
        if compose_nfc(student_C[i]) != compose_nfc(teacher_C[j]):
            step = _match_spellings(
                student_C[i : i + MAX_EXPANSION], teacher_C[j : j + MAX_EXPANSION]
            )
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
    return [*forwards, *(position for position in reversed(backwards) if position != forwards[-1])]


def _find_cluster_ends(text: str) -> list[int]:
    """Return 0 and the end of each cluster, a run of characters that NFC may compose into one."""
    return [
        0,
        *(i for i in range(1, len(text)) if not _composes_with_previous(text[i])),
        *([len(text)] if text else []),
    ]


def _composes_with_previous(character: str) -> bool:
    """True if the character is a mark, or a Hangul vowel or final consonant."""
    return unicodedata.category(character).startswith("M") or "\u1160" <= character <= "\u11ff"


def _match_spellings(student_C: Sequence[str], teacher_C: Sequence[str]) -> tuple[int, int] | None:
    """Return how many of the first clusters of each side spell the same text; None if none do.

    The numbers are as small as possible.

    Spellings may differ by case, accents, a compatible form ("fi" for the ligature), or a space
    that one side lacks.
    """
    student_fold, teacher_fold = _fold(student_C[0]), _fold(teacher_C[0])
    # A cluster that folds to nothing, such as a space, may be missing on the other side.
    if not student_fold or not teacher_fold:
        return (0, 1) if student_fold else (1, 0)
    i = j = 1
    while student_fold != teacher_fold:
        if teacher_fold.startswith(student_fold) and i < len(student_C):
            student_fold, i = student_fold + _fold(student_C[i]), i + 1
        elif student_fold.startswith(teacher_fold) and j < len(teacher_C):
            teacher_fold, j = teacher_fold + _fold(teacher_C[j]), j + 1
        else:
            return None
    return i, j


def _fold(text: str) -> str:
    """Return the compatibility form of a text, without case, accents, spaces and controls."""
    plain = unicodedata.normalize("NFKD", unicodedata.normalize("NFKD", text).casefold())
    return "".join(
        character for character in plain if unicodedata.category(character)[0] not in "MZC"
    )


# --- Token boundaries in a text


@dataclass
class DecodeWindow:
    """The tokens of a text after a position, to find where characters end.

    context: the tokens just before the position, which are decoded with the window.
    position: number of characters before the window.
    next_size: the window is decoded again once it has this many tokens.
    """

    tokenizer: Tokenizer
    context: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    position: int = 0
    next_size: int = 0

    @property
    def must_decode(self) -> bool:
        """True if the window has grown enough to be decoded again."""
        return len(self.tokens) >= self.next_size

    def text(self, count: int | None = None) -> str:
        """Return the text of the first `count` tokens; None: of all tokens."""
        return self.tokenizer.decode([*self.context, *self.tokens[:count]])[
            len(self.tokenizer.decode(self.context)) :
        ]

    def advance(self, count: int, piece: str) -> None:
        """Move the position behind the first `count` tokens, whose text is `piece`."""
        if piece:
            self.context = self.tokens[:count]
        self.tokens = self.tokens[count:]
        self.position += len(piece)
        self.next_size = 0

    def shorten(self, text: str) -> None:
        """Cut the first tokens off a long window, if that does not change its decoded text.

        The text does change if an incomplete character turns all bytes beside it into U+FFFD, as in
        decoders with byte fallback. Such a window is not cut. It is decoded again only once it has
        grown by an eighth.

        text: the text of the whole run.
        """
        if len(self.tokens) < LONG_WINDOW:
            return
        shortened = replace(self, tokens=list(self.tokens))
        piece = shortened.text(LONG_WINDOW // 2)
        shortened.advance(LONG_WINDOW // 2, piece)
        if piece + shortened.text() == self.text() and text.startswith(piece, self.position):
            self.context = shortened.context
            self.tokens = shortened.tokens
            self.position = shortened.position
        else:
            self.next_size = len(self.tokens) * 9 // 8
