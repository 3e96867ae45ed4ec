"""Convert values of another library's configuration, which are text or loaded YAML, to numbers.

This is the only module of the package that turns text into a number. It reads a number exactly or
raises `InvalidValue`, whose message names the key. `float` and `int` accept too much: Python reads
"0.5_5" as 0.55, 2.5 as 2, True as 1 and " 3 " as 3.

A `HiddenValue` is returned unchecked, because checking a value does not count as using it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

INTEGER = re.compile(r"[+-]?\d+", re.ASCII)
DECIMAL = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?", re.ASCII)
# Numbers in Hydra's grammar of the command line (hydra.cc/docs/advanced/override_grammar). Single
# underscores may group digits, a whole number has no leading zero, and the case of words does not
# matter.
_DIGITS = r"\d(?:_?\d)*"
_UNSIGNED = r"(?:0|[1-9](?:_?\d)*)"
HYDRA_INTEGER = re.compile(rf"[+-]?{_UNSIGNED}", re.ASCII)
HYDRA_FLOAT = re.compile(
    rf"[+-]?(?:{_UNSIGNED}\.|{_UNSIGNED}?\.{_DIGITS}"
    rf"|(?:{_UNSIGNED}\.?|{_UNSIGNED}?\.{_DIGITS})[eE][+-]?{_DIGITS}|inf|nan)",
    re.IGNORECASE | re.ASCII,
)
WORD_VALUES = {"true": True, "false": False, "null": None}
# The text that transformers' HfArgumentParser reads as true or false.
YES = {"true", "yes", "t", "y", "1"}
NO = {"false", "no", "f", "n", "0"}
MAX_NUMBER_CHARS = 400  # maximum length, in characters, of text that is read as a number


class HiddenValueUsed(Exception):
    """The error that a `HiddenValue` raises when a conversion uses it."""


def _refuse_use(*_arguments: Any, **_named: Any) -> Any:
    raise HiddenValueUsed


_refuse: Any = _refuse_use


class _Hidden:
    """A placeholder for a value, to find out if a conversion uses a key (see `used_keys`).

    Every special method by which code can use a value raises `HiddenValueUsed`. Code can still test
    a placeholder with `is` and pass it on. A placeholder that was passed on is then found in the
    conversion's result.
    """

    __bool__ = __str__ = __repr__ = __format__ = __hash__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __len__ = __iter__ = __contains__ = __getitem__ = __call__ = __getattr__ = _refuse
    __int__ = __float__ = __index__ = __complex__ = _refuse
    __round__ = __trunc__ = __floor__ = __ceil__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = _refuse
    __mod__ = __rmod__ = __divmod__ = __pow__ = __rpow__ = _refuse
    __neg__ = __pos__ = __abs__ = _refuse
    __class__ = property(_refuse)  # pyright: ignore[reportIncompatibleMethodOverride]


# Declared as any type, because a conversion returns a placeholder in place of its own type.
HiddenValue: type = _Hidden


class InvalidValue(ValueError):
    """The error for a value that does not have the form its key requires.

    The message is a sentence for users.
    """


def number(value: Any, key: str = "") -> int | float:
    """Return a finite number from a number or from plain decimal text.

    Raises InvalidValue for any other value.
    """
    if type(value) is HiddenValue:
        return value
    converted = _parse_text(value) if isinstance(value, str) else value
    if isinstance(converted, bool) or not isinstance(converted, int | float):
        raise InvalidValue(_format_problem(value, key, "a number"))
    if isinstance(converted, float) and not math.isfinite(converted):
        raise InvalidValue(_format_problem(value, key, "a finite number"))
    return converted


def real(value: Any, key: str = "") -> float:
    """Return a finite number as a float.

    Raises InvalidValue if the value is not a finite number, or is an integer that no float equals.
    """
    exact = number(value, key)
    if type(value) is HiddenValue:
        return value
    try:
        converted = float(exact)
    except OverflowError as error:
        raise InvalidValue(_format_problem(value, key, "a number below 1e308")) from error
    if isinstance(exact, int) and int(converted) != exact:
        raise InvalidValue(_format_problem(value, key, "a number of at most 15 digits"))
    return converted


def whole(value: Any, key: str = "", least: int | None = None) -> int:
    """Return an integer; the float 3.0 counts as 3.

    Raises InvalidValue if the value is not an integer (such as 2.5), or is below `least`.
    """
    converted = number(value, key)
    if type(value) is HiddenValue:
        return value
    if isinstance(converted, float):
        if not converted.is_integer():
            raise InvalidValue(_format_problem(value, key, "a whole number"))
        converted = int(converted)
    if least is not None and converted < least:
        raise InvalidValue(_format_problem(value, key, f"a whole number from {least} on"))
    return converted


def flag(value: Any, key: str = "") -> bool:
    """Return a boolean. Raises InvalidValue for any other value.

    Text and the numbers 0 and 1 have the meaning that transformers' HfArgumentParser gives them.
    """
    if type(value) is HiddenValue or isinstance(value, bool):
        return value
    text = str(value).lower() if isinstance(value, str | int) else ""
    if text in YES or text in NO:
        return text in YES
    raise InvalidValue(_format_problem(value, key, "true or false"))


def quotient(total: int, part: int, meaning: str) -> int:
    """Return total / part. Raises InvalidValue if the quotient is not an integer.

    `meaning` is the meaning of the quotient; the error message begins with it.
    """
    if part <= 0 or total % part:
        raise InvalidValue(
            f"{meaning} is {total} / {part}, which is not a whole number: set its counterpart by "
            "hand"
        )
    return total // part


# A product and a sum of two whole numbers.
PRODUCT = re.compile(r"(\d{1,18})\s*([*/])\s*(\d{1,18})")
SUM = re.compile(r"(\d{1,18})\s*([+-])\s*(\d{1,18})")


def compute_whole(text: str) -> int | None:
    """Return the value of whole numbers with + - * / and parentheses, as the shell computes it.

    Return None for any other expression, or if an intermediate result is below 0.
    """
    if re.search(r"\b0\d", text):  # octal in the shell
        return None
    while (group := re.search(r"\(([^()]*)\)", text)) is not None:
        value = compute_whole(group[1].strip())
        if value is None or value < 0:
            return None
        text = f"{text[: group.start()]} {value} {text[group.end() :]}"
    text = text.strip()
    for operation in (PRODUCT, SUM):
        while not text.startswith("-") and (part := operation.search(text)) is not None:
            left, right = int(part[1]), int(part[3])
            if part[2] == "/" and not right:
                return None
            results = {"*": left * right, "+": left + right, "-": left - right}
            result = left // right if part[2] == "/" else results[part[2]]
            text = f"{text[: part.start()]}{result}{text[part.end() :]}"
    return int(text) if re.fullmatch(r"-?\d{1,18}", text) else None


def bounds(value: Any, key: str) -> tuple[float | None, float]:
    """Return (lower, upper) bounds of a ratio, as verl writes them.

    A single number is the upper bound, and `lower` is None. Text "lower_upper" has both bounds;
    verl splits it at the first underscore. Raises InvalidValue unless 0 < lower <= upper.
    """
    if isinstance(value, str) and "_" in value:
        low, _, high = value.strip().partition("_")
        limits: tuple[float | None, float] = real(low, key), real(high, key)
    else:
        limits = None, real(value.strip() if isinstance(value, str) else value, key)
    if limits[1] <= 0 or (limits[0] is not None and not 0 < limits[0] <= limits[1]):
        raise InvalidValue(
            _format_problem(value, key, "a positive bound, or lower_upper with 0 < lower <= upper")
        )
    return limits


def parse_hydra_word(text: str) -> Any:
    """Return the value of a word of a Hydra command line.

    The value is None for null, a boolean, a number, or else the word itself.

    Source: https://hydra.cc/docs/advanced/override_grammar/basic/#primitives.
    """
    if text.lower() in WORD_VALUES:
        return WORD_VALUES[text.lower()]
    if len(text) <= MAX_NUMBER_CHARS and HYDRA_INTEGER.fullmatch(text):
        return int(text)
    if len(text) <= MAX_NUMBER_CHARS and HYDRA_FLOAT.fullmatch(text):
        return float(text)
    return text


def parse_range(first: str, last: str | None = None, step: str | None = None) -> Sequence[int]:
    """Return `range(first, last, step)` of integers that are given as text.

    As with Python's `range`, a single argument is the end. Raises InvalidValue if a text is not an
    integer, or if the step is 0.
    """
    limits = [whole(text, "range") for text in (first, last, step) if text is not None]
    if len(limits) == 3 and limits[2] == 0:
        raise InvalidValue("a range has step 0")
    return range(*limits)


def _parse_text(text: str) -> Any:
    """Return the number in plain decimal text; other text is returned unchanged."""
    if len(text) <= MAX_NUMBER_CHARS and INTEGER.fullmatch(text):
        return int(text)
    if len(text) <= MAX_NUMBER_CHARS and DECIMAL.fullmatch(text):
        return float(text)
    return text


def _format_problem(value: Any, key: str, expected: str) -> str:
    """Return the message of an InvalidValue: what the key's value is and what it should be."""
    value_text = repr(value)
    value_text = value_text if len(value_text) <= 40 else f"{value_text[:37]}..."
    subject = f"{key} is" if key else "is"
    return f"{subject} {value_text}, and not {expected}: set its counterpart by hand"
