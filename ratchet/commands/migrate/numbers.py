"""Convert values of another library's configuration, which are text or loaded YAML, to numbers.

This is the only module of the package that turns text into a number. It reads a number exactly or
raises `Misread`, whose message names the key. `float` and `int` alone accept too much: Python reads
"0.5_5" as 0.55, 2.5 as 2, True as 1 and " 3 " as 3.

An `Unseen` value is returned unchecked, because checking a value does not count as using it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

WHOLE = re.compile(r"[+-]?\d+", re.ASCII)
DECIMAL = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?", re.ASCII)
# Numbers in Hydra's grammar of the command line (hydra.cc/docs/advanced/override_grammar): single
# underscores may group digits, a whole number has no leading zero, and the case of words does not
# matter.
_DIGITS = r"\d(?:_?\d)*"
_UNSIGNED = r"(?:0|[1-9](?:_?\d)*)"
HYDRA_WHOLE = re.compile(rf"[+-]?{_UNSIGNED}", re.ASCII)
HYDRA_FLOAT = re.compile(
    rf"[+-]?(?:{_UNSIGNED}\.|{_UNSIGNED}?\.{_DIGITS}|(?:{_UNSIGNED}\.?|{_UNSIGNED}?\.{_DIGITS})[eE][+-]?{_DIGITS}|inf|nan)",
    re.IGNORECASE | re.ASCII,
)
WORDS = {"true": True, "false": False, "null": None}
YES = {"true", "yes", "t", "y", "1"}  # as transformers' HfArgumentParser reads text for a flag
NO = {"false", "no", "f", "n", "0"}
LONGEST = 400  # maximum length, in characters, of text that is read as a number


class Looked(Exception):
    """The error that an `Unseen` value raises when a conversion uses it."""


def _raise(*_arguments: Any, **_named: Any) -> Any:
    raise Looked


# Names of the special methods that reveal something of a value.
USES = (
    "bool str repr format hash eq ne lt le gt ge len iter contains getitem call int float index "
    "complex round trunc floor ceil"
    " add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod divmod pow rpow neg "
    "pos abs getattr"
)
# A stand-in for a value, to find out if a conversion uses a key (see `used_keys`): any use of it
# raises `Looked`. Only `is` and passing it on raise nothing, and a stand-in that was passed on is
# found in the conversion's result.
Unseen: type = type(
    "Unseen", (), {f"__{use}__": _raise for use in USES.split()} | {"__class__": property(_raise)}
)


class Misread(ValueError):
    """The error for a value that does not have the form its key requires.

    The message is a sentence for users.
    """


def number(value: Any, key: str = "") -> int | float:
    """Return a finite number, given as a number or as plain decimal text.

    Raises Misread for any other value.
    """
    if type(value) is Unseen:
        return value
    converted = _from_text(value) if isinstance(value, str) else value
    if isinstance(converted, bool) or not isinstance(converted, int | float):
        raise Misread(_wrong(value, key, "a number"))
    if isinstance(converted, float) and not math.isfinite(converted):
        raise Misread(_wrong(value, key, "a finite number"))
    return converted


def real(value: Any, key: str = "") -> float:
    """Return a finite number as a float.

    Raises Misread if it is no finite number, or a whole number that no float equals.
    """
    exact = number(value, key)
    if type(value) is Unseen:
        return value
    try:
        converted = float(exact)
    except OverflowError as error:
        raise Misread(_wrong(value, key, "a number below 1e308")) from error
    if isinstance(exact, int) and int(converted) != exact:
        raise Misread(_wrong(value, key, "a number of at most 15 digits"))
    return converted


def whole(value: Any, key: str = "", least: int | None = None) -> int:
    """Return a whole number; the float 3.0 counts as 3.

    Raises Misread if it is no whole number, such as 2.5, or is below `least`.
    """
    converted = number(value, key)
    if type(value) is Unseen:
        return value
    if isinstance(converted, float):
        if not converted.is_integer():
            raise Misread(_wrong(value, key, "a whole number"))
        converted = int(converted)
    if least is not None and converted < least:
        raise Misread(_wrong(value, key, f"a whole number from {least} on"))
    return converted


def flag(value: Any, key: str = "") -> bool:
    """Return a truth value. Raises Misread for any other value.

    Text and the numbers 0 and 1 have the meaning that transformers' HfArgumentParser gives them.
    """
    if type(value) is Unseen or isinstance(value, bool):
        return value
    text = str(value).lower() if isinstance(value, str | int) else ""
    if text in YES or text in NO:
        return text in YES
    raise Misread(_wrong(value, key, "true or false"))


def quotient(total: int, part: int, what: str) -> int:
    """Return total / part. Raises Misread if that is not a whole number.

    what: the meaning of the quotient, with which the message begins.
    """
    if part <= 0 or total % part:
        raise Misread(
            f"{what} is {total} / {part}, which is not a whole number: set its counterpart by hand"
        )
    return total // part


def bounds(value: Any, key: str) -> tuple[float | None, float]:
    """Return (lower, upper) bounds of a ratio, as verl writes them.

    A single number is the upper bound alone, and lower is None. Text "lower_upper" has both bounds;
    verl splits it at the first underscore. Raises Misread unless 0 < lower <= upper.
    """
    if isinstance(value, str) and "_" in value:
        low, _, high = value.strip().partition("_")
        limits: tuple[float | None, float] = real(low, key), real(high, key)
    else:
        limits = None, real(value.strip() if isinstance(value, str) else value, key)
    if limits[1] <= 0 or (limits[0] is not None and not 0 < limits[0] <= limits[1]):
        raise Misread(
            _wrong(value, key, "a positive bound, or lower_upper with 0 < lower <= upper")
        )
    return limits


def hydra(text: str) -> Any:
    """Return the value of a word of a Hydra command line.

    The value is None for null, a truth value, a number, or else the word itself.

    Source: https://hydra.cc/docs/advanced/override_grammar/basic/#primitives.
    """
    if text.lower() in WORDS:
        return WORDS[text.lower()]
    if len(text) <= LONGEST and HYDRA_WHOLE.fullmatch(text):
        return int(text)
    if len(text) <= LONGEST and HYDRA_FLOAT.fullmatch(text):
        return float(text)
    return text


def span(first: str, last: str | None = None, step: str | None = None) -> Sequence[int]:
    """Return `range(first, last, step)` of whole numbers that are given as text.

    As with Python's `range`, `first` alone is the end. Raises Misread if a text is no whole number,
    or the step is 0.
    """
    numbers = [whole(text, "range") for text in (first, last, step) if text is not None]
    if len(numbers) == 3 and numbers[2] == 0:
        raise Misread("a range has step 0")
    return range(*numbers)


def _from_text(text: str) -> Any:
    """Return the number that plain decimal text stands for, or other text unchanged."""
    if len(text) <= LONGEST and WHOLE.fullmatch(text):
        return int(text)
    if len(text) <= LONGEST and DECIMAL.fullmatch(text):
        return float(text)
    return text


def _wrong(value: Any, key: str, wanted: str) -> str:
    """Return the message of a Misread: what the key's value is and what it should be."""
    shown = repr(value)
    shown = shown if len(shown) <= 40 else f"{shown[:37]}..."
    return f"{key + ' is' if key else 'is'} {shown}, and not {wanted}: set its counterpart by hand"
