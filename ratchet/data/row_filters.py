"""Look up values in a row by name, and filter rows by comparisons.

The comparisons are declared in the recipe, so that no recipe holds code.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from pydantic import Field

from ratchet.config.base import Section
from ratchet.data.jsonl import describe_type, is_text_or_number, list_names
from ratchet.errors import DataError

Scalar = str | int | float | bool
COLUMN_IN_BRACES = re.compile(r"\{([^{}\s]+)\}")
MAX_NUMBER_CHARS = 1000  # characters of a text that are searched for a number
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


class KeepConfig(Section):
    """A filter that keeps a row if a column's value meets all conditions set here.

    A null value meets only the condition `none_of`.
    """

    column: str = Field(min_length=1)
    """Name of the column in the file; dots reach nested values: extra_info.index."""
    at_least: float | None = None
    """Smallest number that passes; null: no bound."""
    at_most: float | None = None
    """Largest number that passes; null: no bound."""
    one_of: tuple[Scalar, ...] = ()
    """Values that pass; empty: all."""
    none_of: tuple[Scalar, ...] = ()
    """Values that do not pass."""
    contains: str = ""
    """Text that the column's text must contain, or item that its list must contain; empty: any
    passes."""
    min_chars: int | None = Field(None, ge=0)
    """Smallest number of characters of the text, or of the JSON of another value; null: no
    bound."""
    max_chars: int | None = Field(None, ge=0)
    """Largest number of characters of the text, or of the JSON of another value; null: no bound."""

    def check_keys(self) -> None:
        if not self.changed - {"column"}:
            raise ValueError(
                f"the filter of '{self.column}' has no condition: add at_least, at_most, one_of, "
                "none_of, contains, ..."
            )

    def keeps(self, values: Mapping[str, Any], where: str) -> bool:
        """True if the row is kept.

        Raises DataError if the row lacks the column, or a number to compare.
        """
        value = find_value(values, self.column, where)
        if value is None:
            return not self.changed - {"column", "none_of"}
        n_chars = 0 if self.min_chars is None and self.max_chars is None else _count_chars(value)
        return (
            (self.at_least is None or read_number(value, self.column, where) >= self.at_least)
            and (self.at_most is None or read_number(value, self.column, where) <= self.at_most)
            and (not self.one_of or any(_equals(value, item) for item in self.one_of))
            and not any(_equals(value, item) for item in self.none_of)
            and (not self.contains or _contains(value, self.contains))
            and (self.min_chars is None or n_chars >= self.min_chars)
            and (self.max_chars is None or n_chars <= self.max_chars)
        )


def find_value(values: Mapping[str, Any], name: str, where: str) -> Any:
    """Return the value of a column, or a value nested in it, such as "answers.text.0".

    Return None if an outer value is null, or a list is too short. Raise DataError if there is no
    such column.
    """
    if name in values:
        return values[name]
    value: Any = values
    for depth, part in enumerate(name.split(".")):
        if value is None:
            return None
        if isinstance(value, Mapping) and part in value:
            value = value[part]
        elif isinstance(value, list) and part.isdecimal():
            value = value[int(part)] if int(part) < len(value) else None
        else:
            outer = f"'{'.'.join(name.split('.')[:depth])}' of the row" if depth else "the row"
            content = list_names(value) if isinstance(value, Mapping) else describe_type(value)
            raise DataError(
                f"{where}: no column '{name}'; {outer} has {content or 'no columns'}: name one "
                "of these"
            )
    return value


def fill_template(template: str, values: Mapping[str, Any], where: str) -> str:
    """Return the template with each {column} replaced by the row's text or number.

    Other braces stay. Raise DataError if the row lacks the column, or its value is neither text nor
    a number.
    """

    def column_text(match: re.Match[str]) -> str:
        value = find_value(values, match[1], where)
        if not is_text_or_number(value):
            raise DataError(
                f"{where}: column '{match[1]}' is {describe_type(value)}, must be text or a number "
                "to be part of a prompt"
            )
        return str(value)

    return COLUMN_IN_BRACES.sub(column_text, template)


def read_number(value: Any, column: str, where: str) -> float:
    """Return a number, or the only number in a text ("Level 3", "0.25").

    Raise DataError for any other value.
    """
    if isinstance(value, str) and len(numbers := NUMBER.findall(value[:MAX_NUMBER_CHARS])) == 1:
        value = float(numbers[0])
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e308:
        raise DataError(
            f"{where}: column '{column}' is {value!r:.60}, must be a number, or text with one "
            "number"
        )
    return float(value)


def _equals(value: Any, expected: Scalar) -> bool:
    """True if a value of a row equals one in the recipe.

    1 equals 1.0 but not true. Text equals a number written the same way, because CSV has only text.
    """
    if isinstance(value, str) != isinstance(expected, str):
        return isinstance(value, str) and not isinstance(expected, bool) and value == str(expected)
    return value == expected and isinstance(value, bool) == isinstance(expected, bool)


def _contains(value: Any, item: str) -> bool:
    return item in value if isinstance(value, str | list) else item in str(value)


def _count_chars(value: Any) -> int:
    return len(
        value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    )
