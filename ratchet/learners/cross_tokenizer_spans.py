"""The stretches of one text that two tokenizers can be compared on.

A span is some tokens of the student's and some of the teacher's whose texts, as each tokenizer
decodes its own, are the same up to canonical equivalence (Unicode's NFC: "e" and a combining accent
are "é"). A tokenizer that writes something else than the text that it is given (lower case, no
accents, other spaces) has no span there.
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
LONG = 32  # tokens without a whole character: bytes that are none, as one has at most 4
CONTEXT = 8  # tokens before a run, among which one has text
EXPANSION = 18  # characters that a compatibility decomposition has at most


@dataclass(frozen=True)
class Run:
    """Tokens of plain text, without control tokens.

    previous: tokens of text that they directly follow, if any. Decoders treat the beginning of a
    text otherwise than its middle: those of SentencePiece drop a space there.
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
        """The text of the tokens behind the previous ones; bytes that are no UTF-8 become
        U+FFFD."""
        return Window(self.tokenizer, self.before, list(self.tokens)).text()

    @cached_property
    def cuts(self) -> dict[int, int]:
        """The number of tokens that make up the first n characters of the text, by n.

        There is a cut wherever a token ends with a whole character. Only what follows the last cut
        is decoded at each token, behind the tokens between the cut before it and it. So the work
        grows with the number of tokens, not with its square; `Window.shorten` keeps it so where no
        character gets whole, and `Window.is_due` where no decoding so far is the text's.
        """
        cuts = {0: 0}
        window = Window(self.tokenizer, self.before)
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
        # Tokens without text at the end belong to what is before them.
        cuts[len(self.text)] = len(self.tokens)
        return cuts

    @cached_property
    def is_canonical(self) -> bool:
        """True if the tokenizer writes the run's text by these tokens."""
        return any(self._writes(self.text, self.tokens, after) for after in ("start", "text"))

    def is_literal(self, characters: slice, tokens: range) -> bool:
        """True if each U+FFFD in the characters is that character, not bytes that are no UTF-8."""
        text = self.text[characters]
        return (
            REPLACED not in text
            or self.is_canonical
            or self._writes(text, [self.tokens[i] for i in tokens], "text")
        )

    def _writes(self, text: str, tokens: Sequence[int], after: Literal["start", "text"]) -> bool:
        try:
            return self.tokenizer.encode(text, after=after) == list(tokens)
        except DataError:
            return False


def common_spans(student: Run, teacher: Run) -> Iterator[Span]:
    """Yield the shortest spans of the two runs, in order and disjoint.

    teacher: how its tokenizer writes the student's text, which needn't decode to that text.
    """
    mine, theirs = student.text, teacher.text
    places = [
        (p, q) for p, q in same_places(mine, theirs) if p in student.cuts and q in teacher.cuts
    ]
    for (p, q), (p_end, q_end) in pairwise(places):
        tokens = range(student.cuts[p], student.cuts[p_end])
        if canonical(mine[p:p_end]) == canonical(theirs[q:q_end]) and student.is_literal(
            slice(p, p_end), tokens
        ):
            yield tokens, range(teacher.cuts[q], teacher.cuts[q_end])


# --- two texts, one of which a tokenizer made of the other


def canonical(text: str) -> str:
    return unicodedata.normalize("NFC", text)


def same_places(mine: str, theirs: str) -> list[tuple[int, int]]:
    """Return ascending pairs of positions at which the one text has got as far as the other.

    The texts are walked from the beginning, past differences that normalising makes
    (`_difference`), up to the first that nothing explains; and from the end as far as they are
    equivalent.
    """
    if mine == theirs:
        return [(i, i) for i in range(len(mine) + 1)]
    my_ends, their_ends = _ends(mine), _ends(theirs)
    mine_C = [mine[start:end] for start, end in pairwise(my_ends)]  # C clusters
    theirs_C = [theirs[start:end] for start, end in pairwise(their_ends)]
    forwards, i, j = [(0, 0)], 0, 0
    while i < len(mine_C) and j < len(theirs_C):
        step = (1, 1)
        if canonical(mine_C[i]) != canonical(theirs_C[j]):
            step = _difference(mine_C[i : i + EXPANSION], theirs_C[j : j + EXPANSION])
        if step is None:
            break
        i, j = i + step[0], j + step[1]
        forwards.append((my_ends[i], their_ends[j]))
    back_i, back_j = len(mine_C), len(theirs_C)
    backwards = [(len(mine), len(theirs))]
    while (
        back_i > i
        and back_j > j
        and canonical(mine_C[back_i - 1]) == canonical(theirs_C[back_j - 1])
    ):
        back_i, back_j = back_i - 1, back_j - 1
        backwards.append((my_ends[back_i], their_ends[back_j]))
    return [*forwards, *(place for place in reversed(backwards) if place != forwards[-1])]


def _ends(text: str) -> list[int]:
    """Return 0, and where each cluster ends: characters that canonical composition may join."""
    return [
        0,
        *(i for i in range(1, len(text)) if not _joins(text[i])),
        *([len(text)] if text else []),
    ]


def _joins(character: str) -> bool:
    """True if the character may compose with the one before it: a mark, a Hangul vowel or final."""
    return unicodedata.category(character).startswith("M") or "\u1160" <= character <= "\u11ff"


def _difference(mine_C: Sequence[str], theirs_C: Sequence[str]) -> tuple[int, int] | None:
    """Return how many clusters at the beginning of each are spellings of the same.

    Spellings differ by case, by accents, by a compatible form ("fi" for the ligature), or by a
    space that one side lacks. None: the clusters are no such spellings.
    """
    my_fold, their_fold = _folded(mine_C[0]), _folded(theirs_C[0])
    if not my_fold or not their_fold:
        return (0, 1) if my_fold else (1, 0)
    i = j = 1
    while my_fold != their_fold:
        if their_fold.startswith(my_fold) and i < len(mine_C):
            my_fold, i = my_fold + _folded(mine_C[i]), i + 1
        elif my_fold.startswith(their_fold) and j < len(theirs_C):
            their_fold, j = their_fold + _folded(theirs_C[j]), j + 1
        else:
            return None
    return i, j


def _folded(text: str) -> str:
    """Return the compatible form of a text without case, accents, spaces and control characters."""
    plain = unicodedata.normalize("NFKD", unicodedata.normalize("NFKD", text).casefold())
    return "".join(
        character for character in plain if unicodedata.category(character)[0] not in "MZC"
    )


# --- where tokens end in a text


@dataclass
class Window:
    """The tokens of a text after a place in it.

    before: the tokens that the place ends, for the decoder alone. at: characters before the place.
    due: tokens from which on it is decoded again.
    """

    tokenizer: Tokenizer
    before: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    at: int = 0
    due: int = 0

    @property
    def is_due(self) -> bool:
        return len(self.tokens) >= self.due

    def text(self, count: int | None = None) -> str:
        """Return the text of the first `count` tokens; None: of all."""
        return self.tokenizer.decode([*self.before, *self.tokens[:count]])[
            len(self.tokenizer.decode(self.before)) :
        ]

    def pass_over(self, count: int, piece: str) -> None:
        """Move the place behind the first `count` tokens, whose text is `piece`."""
        if piece:
            self.before = self.tokens[:count]
        self.tokens, self.at, self.due = self.tokens[count:], self.at + len(piece), 0

    def shorten(self, text: str) -> None:
        """Halve a long window without a whole character, if its halves mean the same apart.

        They don't where one half character turns all bytes beside it into U+FFFD, as decoders with
        byte fallback have it. Such a window is decoded again once it has grown by an eighth.
        """
        if len(self.tokens) < LONG:
            return
        half = replace(self, tokens=list(self.tokens))
        piece = half.text(LONG // 2)
        half.pass_over(LONG // 2, piece)
        if piece + half.text() == self.text() and text.startswith(piece, self.at):
            self.before, self.tokens, self.at = half.before, half.tokens, half.at
        else:
            self.due = len(self.tokens) * 9 // 8
