"""A shell script as far as overrides need it: its lines as commands, and variables of one certain
value.

A variable that is set in any other way than once and for all (under a condition, in a loop, by
arithmetic) counts as unknown from there on, so that no earlier value is mistaken for it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field

LITERAL = "\ue000"  # stands for a $ that the shell leaves as it is
_START = r"(?:^|[;&|({]|\b(?:then|else|do)\b)\s*"
_NAME = r"[A-Za-z_]\w*"
_PIECE = r"\"[^\"`\\]*\"|'[^']*'|[^\s;&|()<>'\"\\`]"
PLAIN = re.compile(rf"(?:export\s+)?({_NAME})=((?:{_PIECE})*)\s*;?\s*")
ASSIGNMENTS = re.compile(
    rf"{_START}(?:(?:export|local|declare|readonly|typeset)\s+(?:-\w+\s+)*)?"
    rf"((?:{_NAME}\+?=(?:\"[^\"]*\"|'[^']*'|[^\s;&|'\"])*\s*)+)"
)
OTHER_WAYS = (
    re.compile(rf"\bfor\s+({_NAME})\b"),
    re.compile(rf"\b(?:read|unset|mapfile|readarray|printf\s+-v)\s+(?:-\w+\s+)*({_NAME})"),
    re.compile(rf"\$\{{({_NAME}):?="),
    re.compile(rf"(?:\(\(|\blet\s)\s*({_NAME})\s*(?:[-+*/%]?=(?!=)|\+\+|--)"),
)
OPENING = re.compile(rf"{_START}(?:if|for|while|until|case|select)\b")
CLOSING = re.compile(r"(?:^|;)\s*(?:fi|done|esac)\b")
VARIABLE = re.compile(r"\$(?:\{(\w+)(?::?-([^}]*))?\}|(\w+))")


def commands(text: str) -> Iterator[str]:
    """Yield the lines of a script without comments, those that a backslash continues joined."""
    parts: list[str] = []
    for line in text.split("\n"):
        kept = _without_comment(line)
        # A backslash within a comment continues nothing.
        continued = re.search(r"\\\s*$", kept) if kept == line else None
        parts.append(kept[: continued.start()] if continued else kept)
        if not continued:
            yield " ".join(parts)
            parts = []
    if parts:
        yield " ".join(parts)


def _without_comment(line: str) -> str:
    """Return the line up to its comment: a # begins one at the start of a word alone."""
    before = " "
    for index, character, quote in _unescaped(line):
        if character == "#" and not quote and (before.isspace() or before in ";&|()"):
            return line[:index]
        before = character
    return line


def _unescaped(line: str) -> Iterator[tuple[int, str, str]]:
    """Yield (index, character, the quote around it) of a line, an escaped character as a letter."""
    quote, escaped = "", False
    for index, character in enumerate(line):
        yield index, "x" if escaped else character, quote
        if escaped or (character == "\\" and quote != "'"):
            escaped = not escaped
        elif quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character


def split_words(line: str) -> list[str]:
    """Return the words of a command line, signs such as ; and | apart, a $ without effect as
    LITERAL.

    Raises ValueError for open quotes.
    """
    signs = list(line)
    for index, character, quote in _unescaped(line):
        if line[index] == "$" and (quote == "'" or character == "x"):
            signs[index] = LITERAL
    lexer = shlex.shlex("".join(signs), posix=True, punctuation_chars=";&|")
    lexer.whitespace_split, lexer.commenters = True, ""
    return list(lexer)


@dataclass
class Variables:
    """`values`: by name; of one whose value is not certain, its own reference ($NAME)."""

    values: dict[str, str] = field(default_factory=dict)
    _depth: int = 0  # of conditions and loops around the line

    def read(self, line: str) -> bool:
        """Note what a line sets. Return True if it sets one variable and does nothing else."""
        self._depth += len(OPENING.findall(line))
        plain = PLAIN.fullmatch(line)
        if plain is not None and self._depth == 0:
            self.values[plain[1]] = self.filled("".join(split_words(plain[2])))
        else:
            runs = [match[1] for match in ASSIGNMENTS.finditer(line)]
            names = [name for run in runs for name in re.findall(rf"(?<!\S)({_NAME})\+?=", run)]
            names += [match[1] for way in OTHER_WAYS for match in way.finditer(line)]
            self.values.update({name: f"${name}" for name in names})
        self._depth = max(0, self._depth - len(CLOSING.findall(line)))
        return plain is not None

    def filled(self, text: str) -> str:
        """Return a text with those variables filled in that are known; LITERAL stays."""
        return VARIABLE.sub(self._value, text)

    def _value(self, match: re.Match[str]) -> str:
        name, default = match[1] or match[3], match[2]
        return self.values.get(name, match[0] if default is None else default)
