"""A parser of tool calls in Python syntax, as Llama writes them.

Calls are `[name(key="value"), other.name(n=1)]`, or `name.call(key="value")` for built-in tools.

The module does not use `ast`. An argument's name may be a reserved word of Python (`from="EUR"`)
and strings may hold line breaks; Python's parser refuses both. On other texts that a model may
write, Python's parser prints warnings, runs out of memory or overflows the stack.
"""

from __future__ import annotations

import re
from typing import Any, NoReturn

MAX_DEPTH = 32
CONSTANTS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
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
_STRING = re.compile(r"""\s*(?:"((?:[^"\\]|\\.)*)"|'((?:[^'\\]|\\.)*)')""", re.DOTALL)
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|.)", re.DOTALL)


class _MalformedCall(ValueError):
    pass


def read_calls(text: str) -> list[tuple[str, dict[str, Any]]] | None:
    """Return (name, arguments) of each call, or None if the text is not a list of calls.

    Arguments must be literals, passed by name.
    """
    parser = _CallParser(text)
    try:
        calls = (
            parser.read_items("[", "]", parser.read_call)
            if text.lstrip().startswith("[")
            else [parser.read_call()]
        )
        parser.require_end()
        if not all(name for name, _ in calls):
            return None
        str(calls).encode()  # raises for unpaired surrogates
    except ValueError:
        return None
    return calls or None


class _CallParser:
    """A recursive-descent parser.

    Its methods raise _MalformedCall if the text at the position is not what they read.
    """

    def __init__(self, text: str) -> None:
        self.text, self.position, self.depth = text, 0, 0

    def fail(self) -> NoReturn:
        raise _MalformedCall(f"at {self.position}")

    def match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """Match the pattern at the position, and move past the match."""
        match = pattern.match(self.text, self.position)
        if match is not None:
            self.position = match.end()
        return match

    def skip(self, mark: str) -> bool:
        """Move past white space and then past `mark`. Return True if `mark` was there."""
        while self.position < len(self.text) and self.text[self.position].isspace():
            self.position += 1
        is_present = self.text.startswith(mark, self.position)
        self.position += len(mark) * is_present
        return is_present

    def require_end(self) -> None:
        self.skip("")
        if self.position != len(self.text):
            self.fail()

    def read_items(self, opening: str, closing: str, read_item: Any) -> list[Any]:
        """Return the items between brackets, separated by commas; a trailing comma is allowed."""
        if not self.skip(opening):
            self.fail()
        self.depth += 1
        if self.depth > MAX_DEPTH:
            self.fail()
        items: list[Any] = []
        while not self.skip(closing):
            if items and not self.skip(","):
                self.fail()
            if items and self.skip(closing):
                break
            items.append(read_item())
        self.depth -= 1
        return items

    def read_call(self) -> tuple[str, dict[str, Any]]:
        name = self.match(_NAME)
        if name is None:
            self.fail()
        return name[1].removesuffix(".call"), dict(self.read_items("(", ")", self.read_named_value))

    def read_named_value(self) -> tuple[str, Any]:
        key = self.match(_NAME)
        if key is None or not self.skip("="):
            self.fail()
        return key[1], self.read_value()

    def read_pair(self) -> tuple[str, Any]:
        key = self.read_value()
        if not isinstance(key, str) or not self.skip(":"):
            self.fail()
        return key, self.read_value()

    def read_value(self) -> Any:
        token = self.match(_STRING)
        if token is not None:
            return _ESCAPE.sub(_unescape, token[1] if token[1] is not None else token[2])
        token = self.match(_NUMBER)
        if token is not None:
            return _to_number(token[1])
        token = self.match(_NAME)
        if token is not None:
            return CONSTANTS[token[1]] if token[1] in CONSTANTS else self.fail()
        if self.skip("["):
            self.position -= 1
            return self.read_items("[", "]", self.read_value)
        return dict(self.read_items("{", "}", self.read_pair))


def _to_number(text: str) -> int | float:
    if text.lstrip("+-").isdigit():
        return int(text)  # raises ValueError for more digits than Python converts
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise _MalformedCall(text)
    return value


def _unescape(match: re.Match[str]) -> str:
    code = match[1]
    if len(code) > 1:
        return chr(int(code[1:], 16))
    return ESCAPES.get(code, match[0])
