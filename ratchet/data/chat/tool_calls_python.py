"""A parser of tool calls written as Python: `[name(key="value"), other.name(n=1)]`, or
`name.call(key="value")`, which Llama writes for built-in tools.

It does not use `ast`, because a model may write anything, and Python's parser answers some texts
with warnings, memory errors, or a stack overflow.
"""

from __future__ import annotations

import re
from typing import Any, NoReturn

MAX_DEPTH = 32
WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
ESCAPES = {
    "n": "\n",
    "t": "\t",
    "r": "\r",
    "b": "\b",
    "f": "\f",
    "0": "\0",
    "\\": "\\",
    "'": "'",
    '"': '"',
    "\n": "",
}

_NAME = re.compile(r"\s*([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)")
_NUMBER = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)")
_TEXT = re.compile(r"""\s*(?:"((?:[^"\\]|\\.)*)"|'((?:[^'\\]|\\.)*)')""", re.DOTALL)
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|.)", re.DOTALL)


class _Unreadable(ValueError):
    pass


def read_calls(text: str) -> list[tuple[str, dict[str, Any]]] | None:
    """Return (name, arguments) of each call, or None if the text is not a list of calls.

    Arguments are literals, passed by name.
    """
    reader = _Reader(text)
    try:
        calls = (
            reader.listed("[", "]", reader.call)
            if text.lstrip().startswith("[")
            else [reader.call()]
        )
        reader.end()
        for name, _ in calls:
            if not name:
                return None
        str(calls).encode()
    except ValueError:
        return None
    return calls or None


class _Reader:
    """A recursive-descent parser. Its methods raise _Unreadable for a text of another form."""

    def __init__(self, text: str) -> None:
        self.text, self.position, self.depth = text, 0, 0

    def fail(self) -> NoReturn:
        raise _Unreadable(f"at {self.position}")

    def taken(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """Match the pattern at the position, and move past the match."""
        match = pattern.match(self.text, self.position)
        if match is not None:
            self.position = match.end()
        return match

    def skipped(self, mark: str) -> bool:
        """Move past white space and past `mark`; return True if `mark` was there."""
        while self.position < len(self.text) and self.text[self.position].isspace():
            self.position += 1
        is_present = self.text.startswith(mark, self.position)
        self.position += len(mark) * is_present
        return is_present

    def end(self) -> None:
        self.skipped("")
        if self.position != len(self.text):
            self.fail()

    def listed(self, opening: str, closing: str, item: Any) -> list[Any]:
        """Return the items of a list with commas between them; a trailing comma is allowed."""
        if not self.skipped(opening):
            self.fail()
        self.depth += 1
        if self.depth > MAX_DEPTH:
            self.fail()
        items: list[Any] = []
        while not self.skipped(closing):
            if items and not self.skipped(","):
                self.fail()
            if items and self.skipped(closing):
                break
            items.append(item())
        self.depth -= 1
        return items

    def call(self) -> tuple[str, dict[str, Any]]:
        name = self.taken(_NAME)
        if name is None:
            self.fail()
        return name[1].removesuffix(".call"), dict(self.listed("(", ")", self.named_value))

    def named_value(self) -> tuple[str, Any]:
        key = self.taken(_NAME)
        if key is None or not self.skipped("="):
            self.fail()
        return key[1], self.value()

    def pair(self) -> tuple[str, Any]:
        key = self.value()
        if not isinstance(key, str) or not self.skipped(":"):
            self.fail()
        return key, self.value()

    def value(self) -> Any:
        token = self.taken(_TEXT)
        if token is not None:
            return _ESCAPE.sub(_unescaped, token[1] if token[1] is not None else token[2])
        token = self.taken(_NUMBER)
        if token is not None:
            return _number(token[1])
        token = self.taken(_NAME)
        if token is not None:
            return WORDS[token[1]] if token[1] in WORDS else self.fail()
        if self.skipped("["):
            self.position -= 1
            return self.listed("[", "]", self.value)
        return dict(self.listed("{", "}", self.pair))


def _number(text: str) -> int | float:
    if text.lstrip("+-").isdigit():
        return int(text)  # raises ValueError above Python's limit of digits
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise _Unreadable(text)
    return value


def _unescaped(match: re.Match[str]) -> str:
    code = match[1]
    if len(code) > 1:
        return chr(int(code[1:], 16))
    return ESCAPES.get(code, match[0])
