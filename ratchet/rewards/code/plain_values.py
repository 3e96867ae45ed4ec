"""Encode plain values as text, to send between a judged function's process and its tests' process.

To foresee further calls, the tests run on while a call's result is not known yet (look-ahead, see
`sandbox_program`). `Awaited` and `Anything` then stand in for the unknown values.

This file uses the standard library only: both processes run in the sandbox, which has no Ratchet.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable
from typing import Any

MAX_ITEMS = 100_000  # maximum length of an iterator that a program returns
SMALL_INT_LIMIT = 1 << 53  # integers from this absolute value on are encoded as hex text
AWAITED_MARK = '{"answer"'  # occurs only in the text of calls with an `Awaited` argument


class Anything:
    """A stand-in for a value computed from the result of a call that has not returned yet.

    The operations below, iteration and attribute access all succeed on it.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()

    def __iter__(self) -> Any:
        return iter(())

    def __hash__(self) -> int:
        return 0


# Operations that return another `Anything`. The table below marks them with the result None. The
# other operations have results of built-in types.
SELF_OPERATIONS = (
    "call getitem add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow "
    "rpow abs neg round and or"
)
for _words, _result in (
    (SELF_OPERATIONS, None),
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
    """The result of call number `index` of the judged function, which has not returned yet.

    It may be an argument of another call.
    """

    def __init__(self, index: int) -> None:
        self.index = index


# What `keys`, `values` and `items` of a dict return.
VIEWS: dict[str, Any] = {name: type(getattr({}, name)()) for name in ("keys", "values", "items")}


class NotPlainError(Exception):
    """An error for a value that is not plain.

    Plain values consist of None, bool, numbers, text, bytes, lists, tuples, sets, dicts and their
    views, ranges and iterators.
    """


# --- plain values as text. A subclass is encoded as its built-in base, without its overrides.


def encode(value: Any) -> Any:
    """Return a value as JSON data.

    None, bool, str and small int stay as they are, and other values become [type, content]. An
    `Awaited` becomes {"answer": index}. Raises NotPlainError.
    """
    if value is None or value is True or value is False:
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        number = int.__int__(value)
        return number if -SMALL_INT_LIMIT < number < SMALL_INT_LIMIT else ["int", hex(number)]
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
            iterate: Any = kind.__iter__  # not an override of a subclass
            items = [encode(item) for item in iterate(value)]
            # Sort sets: equal sets need equal text, since a call is recognised by its text.
            return [
                kind.__name__,
                sorted(items, key=json.dumps) if kind in (set, frozenset) else items,
            ]
    for name, kind in VIEWS.items():
        if isinstance(value, kind):
            return [name, [encode(item) for item in kind.__iter__(value)]]
    if hasattr(type(value), "__next__"):
        items = [encode(item) for item in itertools.islice(value, MAX_ITEMS + 1)]
        if len(items) <= MAX_ITEMS:
            return ["iterator", items]
    if isinstance(value, Awaited):  # in the look-ahead of `sandbox_program`
        return {"answer": value.index}
    raise NotPlainError(type(value).__name__)


# For each encoded type, a function from its content to the value.
DECODERS: dict[str, Callable[[Any], Any]] = {
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
    "keys": lambda content: dict.fromkeys(map(decode, content)).keys(),
    "values": lambda content: dict(enumerate(map(decode, content))).values(),
    "items": lambda content: dict(map(decode, content)).items(),
}


def decode(data: Any) -> Any:
    """Return the value that `encode` turned into this data.

    Data that `encode` didn't write may raise any exception, but every returned value is plain.
    """
    if data is None or isinstance(data, bool | str | int):
        return data
    kind, content = data
    return DECODERS[kind](content)


def take_stdout() -> int:
    """Return a private copy of stdout, and redirect printed text to stderr.

    Output of the judged code or of the tests then never mixes with results.
    """
    channel = os.dup(1)
    os.dup2(2, 1)
    return channel


def send(channel: int, text: str) -> None:
    """Write ASCII text to a file descriptor, completely."""
    unsent = memoryview(text.encode("ascii"))
    while unsent:
        unsent = unsent[os.write(channel, unsent) :]


def fill_in_answers(call: str, answers: list[str]) -> str | None:
    """Return `call` (JSON text) with each {"answer": i} replaced by the result of call i.

    `answers[i]` is the line of call i: JSON text with "value" if the call returned a plain value.
    None if the line of an awaited call is missing or has no value. Encoded plain values contain no
    JSON object, so {"answer": i} always stands for an awaited result.
    """

    def fill(part: Any) -> Any:
        if isinstance(part, dict):
            return json.loads(answers[part["answer"]])["value"]
        return [fill(item) for item in part] if isinstance(part, list) else part

    if AWAITED_MARK not in call:
        return call
    try:
        return json.dumps(fill(json.loads(call)))
    except (LookupError, TypeError, ValueError):
        return None


def compile_if_valid(source: str) -> Any:
    """Return `source` compiled; None if it is not valid Python."""
    try:
        return compile(source, "solution", "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return None
