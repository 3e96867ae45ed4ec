"""Look up values in a row by name, and filter rows by comparisons.

The comparisons are declared in the recipe, so that no recipe holds code.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from pydantic import Field, model_validator

from ratchet.config.base import Section
from ratchet.data.jsonl import describe_type, names
from ratchet.errors import DataError

Scalar = str | int | float | bool
PLACE = re.compile(r"\{([^{}\s]+)\}")
MAX_NUMBER_CHARS = 1000  # characters of a text in which a number is looked for
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


class KeepConfig(Section):
    """A filter that keeps a row if a column's value meets all conditions set here.

    A null value meets no condition but `none_of`.
    """

    column: str = Field(
        min_length=1,
        description="The file's own name; of a value inside it, with dots: extra_info.index.",
    )
    at_least: float | None = Field(None, description="The number is this or more.")
    at_most: float | None = Field(None, description="The number is this or less.")
    one_of: tuple[Scalar, ...] = Field((), description="The value is one of these.")
    none_of: tuple[Scalar, ...] = Field((), description="The value is none of these.")
    contains: str = Field("", description="The text, or an item of the list, contains this.")
    min_chars: int | None = Field(
        None, ge=0, description="Characters of the text, or of the JSON of what is no text."
    )
    max_chars: int | None = Field(
        None, ge=0, description="Characters of the text, or of the JSON of what is no text."
    )

    @model_validator(mode="after")
    def _says_something(self) -> KeepConfig:
        if not self.changed - {"column"}:
            raise ValueError(
                f"nothing is asked of '{self.column}': add at_least, at_most, one_of, none_of, "
                "contains, ..."
            )
        return self

    def keeps(self, values: Mapping[str, Any], where: str) -> bool:
        """Return True if the row is kept.

        Raises DataError if it lacks the column, or a number to compare.
        """
        value = value_at(values, self.column, where)
        if value is None:
            return not self.changed - {"column", "none_of"}
        chars = 0 if self.min_chars is None and self.max_chars is None else _chars(value)
        return (
            (self.at_least is None or number_in(value, self.column, where) >= self.at_least)
            and (self.at_most is None or number_in(value, self.column, where) <= self.at_most)
            and (not self.one_of or any(_same(value, one) for one in self.one_of))
            and not any(_same(value, one) for one in self.none_of)
            and (not self.contains or _contains(value, self.contains))
            and (self.min_chars is None or chars >= self.min_chars)
            and (self.max_chars is None or chars <= self.max_chars)
        )


def value_at(values: Mapping[str, Any], name: str, where: str) -> Any:
    """Return the value of a column, or one inside it, such as "answers.text.0".

    Return None if the value around it is null or the list too short. Raise DataError if there is
    no such column.
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
            inside = f"'{'.'.join(name.split('.')[:depth])}' of the row" if depth else "the row"
            has = names(value) if isinstance(value, Mapping) else describe_type(value)
            raise DataError(
                f"{where}: no column '{name}'; {inside} has {has or 'no columns'}: name yours in "
                "`columns`"
            )
    return value


def fill(template: str, values: Mapping[str, Any], where: str) -> str:
    """Return the template with each {column} replaced by the row's text or number.

    Other braces stay. Raise DataError if the row lacks the column, or its value is neither text nor
    a number.
    """

    def said(match: re.Match[str]) -> str:
        value = value_at(values, match[1], where)
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise DataError(
                f"{where}: column '{match[1]}' is {describe_type(value)}, must be text or a number "
                "to "
                "stand in a prompt"
            )
        return str(value)

    return PLACE.sub(said, template)


def number_in(value: Any, column: str, where: str) -> float:
    """Return a number, or the only number in a text ("Level 3", "0.25").

    Raise DataError for any other value.
    """
    if isinstance(value, str) and len(found := NUMBER.findall(value[:MAX_NUMBER_CHARS])) == 1:
        value = float(found[0])
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e308:
        raise DataError(
            f"{where}: column '{column}' is {value!r:.60}, must be a number, or text that holds one"
        )
    return float(value)


def _same(value: Any, wanted: Scalar) -> bool:
    """Return True if a value equals the wanted one.

    1 equals 1.0 but not true. Text equals a number written the same way, because CSV has only text.
    """
    if isinstance(value, str) != isinstance(wanted, str):
        return isinstance(value, str) and not isinstance(wanted, bool) and value == str(wanted)
    return value == wanted and isinstance(value, bool) == isinstance(wanted, bool)


def _contains(value: Any, wanted: str) -> bool:
    return wanted in value if isinstance(value, str | list) else wanted in str(value)


def _chars(value: Any) -> int:
    return len(
        value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    )
