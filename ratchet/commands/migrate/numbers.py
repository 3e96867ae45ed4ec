"""Values as text or as another library's loader gives them: the one place of this package where
text becomes a number.

A number is read exactly or refused by a sentence that names its key. `float` and `int` alone are
too generous for that: Python reads "0.5_5" as 0.55, 2.5 as 2, True as 1 and " 3 " as 3. A hidden
value is handed on: to check it is not yet to use it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

WHOLE = re.compile(r"[+-]?\d+", re.ASCII)
DECIMAL = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?", re.ASCII)
# Hydra's grammar of a value on the command line (hydra.cc/docs/advanced/override_grammar): digits
# may be grouped by single underscores, a whole number has no leading zero, and words count in any
# mixture of case.
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
LONGEST = 400  # characters of a number as text


class Looked(Exception):
    """A conversion did something with a hidden value."""


def _raise(*_arguments: Any, **_named: Any) -> Any:
    raise Looked


USES = (
    "bool str repr format hash eq ne lt le gt ge len iter contains getitem call int float index "
    "complex round trunc floor ceil"
    " add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod divmod pow rpow neg "
    "pos abs getattr"
)
# Only `is` and being handed on go unseen: a value handed on is found in what comes out.
Unseen: type = type(
    "Unseen", (), {f"__{use}__": _raise for use in USES.split()} | {"__class__": property(_raise)}
)


class Misread(ValueError):
    """A value is not of the form that its key asks for. The message is a sentence for users."""


def number(value: Any, key: str = "") -> int | float:
    """Return a finite number, as it is or from plain decimal text. Raises Misread."""
    if type(value) is Unseen:
        return value
    got = _from_text(value) if isinstance(value, str) else value
    if isinstance(got, bool) or not isinstance(got, int | float):
        raise Misread(_wrong(value, key, "a number"))
    if isinstance(got, float) and not math.isfinite(got):
        raise Misread(_wrong(value, key, "a finite number"))
    return got


def real(value: Any, key: str = "") -> float:
    """Return a finite number in floating point. Raises Misread, also for a whole number that has no
    such form."""
    got = number(value, key)
    if type(value) is Unseen:
        return value
    try:
        converted = float(got)
    except OverflowError as error:
        raise Misread(_wrong(value, key, "a number below 1e308")) from error
    if isinstance(got, int) and int(converted) != got:
        raise Misread(_wrong(value, key, "a number of at most 15 digits"))
    return converted


def whole(value: Any, key: str = "", least: int | None = None) -> int:
    """Return a whole number; 3.0 is 3, and 2.5 is refused. Raises Misread, also below `least`."""
    got = number(value, key)
    if type(value) is Unseen:
        return value
    if isinstance(got, float):
        if not got.is_integer():
            raise Misread(_wrong(value, key, "a whole number"))
        got = int(got)
    if least is not None and got < least:
        raise Misread(_wrong(value, key, f"a whole number from {least} on"))
    return got


def flag(value: Any, key: str = "") -> bool:
    """Return a truth value; text and the numbers 0 and 1 count as transformers' parser counts them.
    Raises Misread."""
    if type(value) is Unseen or isinstance(value, bool):
        return value
    text = str(value).lower() if isinstance(value, str | int) else ""
    if text in YES or text in NO:
        return text in YES
    raise Misread(_wrong(value, key, "true or false"))


def quotient(total: int, part: int, what: str) -> int:
    """Return total / part where that is whole. Raises Misread, which names both by `what`."""
    if part <= 0 or total % part:
        raise Misread(
            f"{what} is {total} / {part}, which is not a whole number: set its counterpart by hand"
        )
    return total // part


def bounds(value: Any, key: str) -> tuple[float | None, float]:
    """Return (lower, upper) of one number, an upper bound alone (lower None), or of text
    "lower_upper". Raises Misread.

    verl writes both bounds of a ratio so, and parts them at the first underscore.
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
    """Return the value of a word of a Hydra command line: null, a truth value, a number, or the
    word itself.

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
    """Return Python's range of whole numbers as text. Raises Misread."""
    numbers = [whole(text, "range") for text in (first, last, step) if text is not None]
    if len(numbers) == 3 and numbers[2] == 0:
        raise Misread("a range has step 0")
    return range(*numbers)


def _from_text(text: str) -> Any:
    if len(text) <= LONGEST and WHOLE.fullmatch(text):
        return int(text)
    if len(text) <= LONGEST and DECIMAL.fullmatch(text):
        return float(text)
    return text


def _wrong(value: Any, key: str, wanted: str) -> str:
    shown = repr(value)
    shown = shown if len(shown) <= 40 else f"{shown[:37]}..."
    return f"{key + ' is' if key else 'is'} {shown}, and not {wanted}: set its counterpart by hand"
