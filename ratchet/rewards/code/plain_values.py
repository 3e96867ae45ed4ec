"""Plain values as text, between the process of a judged function and that of its tests.

Standard library only: both run in the sandbox, which has no Ratchet.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable
from typing import Any

MAX_ITEMS = 100_000  # of an iterator that a program returns
SMALL = 1 << 53
AWAITING = '{"answer"'  # in the text of a call that is made of awaited answers, and of no other


class Anything:
    """Stands for a value that follows from an answer not given yet: whatever is done with it
    succeeds."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()

    def __iter__(self) -> Any:
        return iter(())

    def __hash__(self) -> int:
        return 0


SELF = (
    "call getitem add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow "
    "rpow abs neg round and or"
)
for _words, _result in (
    (SELF, None),
    ("eq ne lt le gt ge bool contains", True),
    ("len int index", 0),
    ("float", 0.0),
):
    for _word in _words.split():
        setattr(
            Anything,
            f"__{_word}__",
            lambda self, *_, result=_result: Anything() if result is None else result,
        )


class Awaited(Anything):
    """An answer not given yet, to the call of number `index`: another call may be made of it."""

    def __init__(self, index: int) -> None:
        self.index = index


class Unplain(Exception):
    """The value is not made of None, bool, numbers, text, bytes, lists, tuples, sets, dicts, ranges
    and iterators."""


# --- plain values as text. A subclass goes as its built-in base: what it overrides stays behind.


def encode(value: Any) -> Any:
    """JSON in which None, bool, str and small int stand for themselves, all else is [type,
    content]. Raises Unplain."""
    if value is None or value is True or value is False:
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        whole = int.__int__(value)
        return whole if -SMALL < whole < SMALL else ["int", hex(whole)]
    if isinstance(value, float):
        return ["float", float.hex(value)]
    if isinstance(value, complex):
        return ["complex", [float.hex(value.real), float.hex(value.imag)]]
    if isinstance(value, bytes | bytearray):
        return ["bytes", bytes(value).hex()]
    if isinstance(value, dict):
        return ["dict", [[encode(key), encode(item)] for key, item in dict.items(value)]]
    if isinstance(value, range):
        return ["range", [encode(number) for number in (value.start, value.stop, value.step)]]
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):
            walk: Any = kind.__iter__  # not the subclass's own
            items = [encode(item) for item in walk(value)]
            # Equal sets are the same text: a call is recognised by its text.
            return [
                kind.__name__,
                sorted(items, key=json.dumps) if kind in (set, frozenset) else items,
            ]
    if hasattr(type(value), "__next__"):
        items = [encode(item) for item in itertools.islice(value, MAX_ITEMS + 1)]
        if len(items) <= MAX_ITEMS:
            return ["iterator", items]
    if isinstance(value, Awaited):  # only tests that look ahead pass one
        return {"answer": value.index}
    raise Unplain(type(value).__name__)


REBUILT: dict[str, Callable[[Any], Any]] = {
    "int": lambda content: int(content, 16),
    "float": float.fromhex,
    "complex": lambda content: complex(*map(float.fromhex, content)),
    "bytes": bytes.fromhex,
    "dict": lambda content: {decode(key): decode(item) for key, item in content},
    "range": lambda content: range(*map(decode, content)),
    "list": lambda content: [decode(item) for item in content],
    "tuple": lambda content: tuple(decode(item) for item in content),
    "set": lambda content: {decode(item) for item in content},
    "frozenset": lambda content: frozenset(decode(item) for item in content),
    "iterator": lambda content: iter([decode(item) for item in content]),
}


def decode(said: Any) -> Any:
    """Raises whatever it meets in text that `encode` didn't write; what it returns is plain all the
    same."""
    if said is None or isinstance(said, bool | str | int):
        return said
    kind, content = said
    return REBUILT[kind](content)


def take_stdout() -> int:
    """A channel of our own. What is printed goes to stderr, out of its way."""
    channel = os.dup(1)
    os.dup2(2, 1)
    return channel


def send(channel: int, text: str) -> None:
    unsent = memoryview(text.encode("ascii"))
    while unsent:
        unsent = unsent[os.write(channel, unsent) :]


def resolved(call: str, answers: list[str]) -> str | None:
    """Return `call` with the values that it awaits, out of `answers`; None where one is no value.

    Encoded values hold no JSON object, so that {"answer": i} is never one of them.
    """

    def filled(part: Any) -> Any:
        if isinstance(part, dict):
            return json.loads(answers[part["answer"]])["value"]
        return [filled(item) for item in part] if isinstance(part, list) else part

    if AWAITING not in call:
        return call
    try:
        return json.dumps(filled(json.loads(call)))
    except (LookupError, TypeError, ValueError):
        return None


def valid(source: str) -> Any:
    """`source` compiled; None where it is no Python."""
    try:
        return compile(source, "solution", "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return None
