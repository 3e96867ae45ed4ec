"""Define the parts of a peer library's table: rows of keys, and conversions of their values.

A note in a table is shown to users beside the peer's key. In notes, "there" and "their" refer to
the peer, and "here" refers to Ratchet.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import translate
from functools import cached_property
from pathlib import Path
from typing import Any

from ratchet.commands.migrate import numbers
from ratchet.commands.migrate.yaml_dialects import Dialect

ABSENT: Any = object()  # marks a row without a default, or without a value for null


@dataclass(frozen=True)
class PeerConfig:
    """A peer's configuration, flat, by dotted key."""

    values: Mapping[str, Any]
    """The values in the file."""
    defaults: Mapping[str, Any]
    """The peer's own defaults."""
    read_keys: set[str] = field(default_factory=set)
    """The keys that conversions have read."""
    path: Path | None = None
    """The config file; None if the values come from none."""

    def find_file(self, name: str) -> Path | None:
        """Return a file that the config names, from one of the directories above the config."""
        folders = [] if self.path is None else self.path.resolve().parents
        return next((folder / name for folder in folders if (folder / name).is_file()), None)

    def __getitem__(self, key: str) -> Any:
        """Return the file's value, which is None for null, or else the peer's default.

        Return None if there is neither.
        """
        self.read_keys.add(key)
        return self.values[key] if key in self.values else self.defaults.get(key)

    def flag(self, key: str) -> bool:
        """Return a boolean; null is False. Raises InvalidValue."""
        value = self[key]
        return False if value is None else numbers.flag(value, key)

    def whole(self, key: str, otherwise: int | None = None, least: int = 1) -> int:
        """Return an integer of at least `least`, or `otherwise` for null. Raises InvalidValue."""
        value = self[key]
        if value is None and otherwise is not None:
            return otherwise
        return numbers.whole(value, key, least)

    def number(self, key: str) -> int | float:
        """Return a number. Raises InvalidValue."""
        return numbers.number(self[key], key)


@dataclass(frozen=True, slots=True)
class Values:
    """The result of a conversion that sets several keys, or adds a note on the value."""

    values: Mapping[str, Any]
    note: str = ""


@dataclass(frozen=True, slots=True)
class Dropped:
    """The result of a conversion for a value without a counterpart, with the reason or a hint."""

    reason: str


@dataclass(frozen=True, slots=True)
class Inert:
    """The result of a conversion for a value without effect, with the reason.

    The value turns something off in the peer, or Ratchet does the same anyway.
    """

    reason: str


Conversion = Callable[[Any, PeerConfig], Any]


@dataclass(frozen=True, slots=True)
class KeyRow:
    """A key of a peer."""

    peer_key: str
    """The peer's dotted key; `*` in it matches any characters."""
    recipe_key: str = ""
    """The key of the recipe, or several keys with commas; "" if there is none."""
    note: str = ""
    """How the meaning differs; without `recipe_key`, why there is no counterpart, or what to set
    instead."""
    convert: Conversion | None = None
    """A function that returns the value of `recipe_key`, or `Values`, `Dropped` or `Inert`; None
    copies the value."""
    covered_by: str = ""
    """Another key of the peer, whose conversion also uses this key's value. `convert` then only
    tells whether the value has no effect."""
    default: Any = ABSENT
    """The peer's default, if it differs from Ratchet's."""
    null: Any = ABSENT
    """The value of `recipe_key` if the peer's value is null; ABSENT: null sets nothing."""
    inert: bool = False
    """True if the missing counterpart changes no training result."""


@dataclass(frozen=True)
class Method:
    """A training method of a peer."""

    fixed: Mapping[str, Any]
    """Keys and values of every recipe for this method, unless a row overrides them."""
    rows: tuple[KeyRow, ...]
    """The keys that a configuration of this method may have."""

    @property
    def defaults(self) -> dict[str, Any]:
        return {row.peer_key: row.default for row in self.rows if row.default is not ABSENT}

    def find_row(self, key: str) -> KeyRow | None:
        """Return the row that names a key, or else the row with the longest pattern that matches.

        Return None if the key is unknown.
        """
        if key not in self._rows_by_key:
            self._rows_by_key[key] = next(
                (row for pattern, row in self._pattern_rows if pattern.match(key)), None
            )
        return self._rows_by_key[key]

    @cached_property
    def _rows_by_key(self) -> dict[str, KeyRow | None]:
        """Return the rows by key. `find_row` adds the keys that it looks up."""
        return {row.peer_key: row for row in self.rows}

    @cached_property
    def _pattern_rows(self) -> list[tuple[re.Pattern[str], KeyRow]]:
        """Return the rows whose keys are patterns, longest first."""
        pattern_rows = sorted(
            (row for row in self.rows if "*" in row.peer_key),
            key=lambda row: len(row.peer_key),
            reverse=True,
        )
        return [(re.compile(translate(row.peer_key)), row) for row in pattern_rows]


@dataclass(frozen=True, slots=True)
class Peer:
    """A library whose configurations are imported."""

    name: str
    """The library's name on the command line."""
    title: str
    """The library's name in messages."""
    version: str
    """The version of the library that has these keys and defaults."""
    marks: tuple[str, ...]
    """Keys, or prefixes of keys, by which a configuration of this peer is recognised."""
    detect_method: Callable[[Mapping[str, Any]], str]
    """A function that returns the name of a configuration's method; "" if the method can't be
    detected."""
    methods: Mapping[str, Method]
    """The methods by name."""
    explain_unsupported_task: Callable[[Mapping[str, Any]], str | None] | None = None
    """A function that returns why a task is not converted, and what to do instead; None if the task
    is converted. None in its place: all tasks are converted."""
    dialect: Dialect = "omegaconf"
    """The YAML dialect of the library's files."""
    keep_used: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None
    """A function that returns the values without definitions that the file does not use; None: all
    count."""

    def count_marks(self, values: Mapping[str, Any]) -> int:
        """Return how many of the peer's marks a configuration has."""
        return sum(
            any(key == mark or key.startswith(f"{mark}.") for key in values) for mark in self.marks
        )


def choose(choices: Mapping[Any, Any]) -> Conversion:
    """Return a conversion that looks a value up in a table. Other values have no counterpart."""

    def convert(value: Any, config: PeerConfig) -> Any:
        if isinstance(next(iter(choices)), bool):
            value = numbers.flag(value)
        if not isinstance(value, str | bool):
            raise numbers.InvalidValue(
                f"is {value!r}, and not one of {', '.join(map(str, choices))}"
            )
        if value in choices:
            return choices[value]
        return Dropped(f"{value} has no counterpart here, only {', '.join(map(str, choices))}")

    return convert


def only_if(
    condition: Callable[[PeerConfig], Any], convert: Conversion | None, reason: str
) -> Conversion:
    """Return the conversion, limited to files that meet a condition.

    In other files the key has no effect, for the reason `reason`.
    """

    def checked(value: Any, config: PeerConfig) -> Any:
        if not condition(config):
            return Inert(reason)
        return value if convert is None else convert(value, config)

    return checked


def choose_inert(name: Any, reason: str) -> Conversion:
    """Return a conversion of a key for which Ratchet always does what the value `name` says.

    Other values are dropped, and their note names the value.
    """

    def convert(value: Any, config: PeerConfig) -> Any:
        return Inert(reason) if value == name else Dropped(f"{value} has no counterpart: {reason}")

    return convert


def only_value(name: str, reason: str) -> Conversion:
    """Return a conversion of a key whose value `name` has no effect. Other values are dropped."""

    def convert(value: Any, config: PeerConfig) -> Any:
        return Inert(reason) if value == name or value == [name] else Dropped(reason)

    return convert


def number(value: Any, config: PeerConfig) -> int | float:
    """Convert a number to itself: an int stays an int."""
    return numbers.number(value)


def real(value: Any, config: PeerConfig) -> float:
    """Convert a number to a float: an int becomes a float."""
    return numbers.real(value)


def whole(value: Any, config: PeerConfig) -> int:
    """Convert an integer to itself."""
    return numbers.whole(value)


def flag(value: Any, config: PeerConfig) -> bool:
    """Convert a boolean to itself."""
    return numbers.flag(value)


def positive(reason: str) -> Conversion:
    """Return a conversion of integers. An integer below 1 has no effect, for the reason given."""

    def convert(value: Any, config: PeerConfig) -> Any:
        count = numbers.whole(value)
        return count if count > 0 else Inert(reason)

    return convert


def at_least_0(value: Any, config: PeerConfig) -> int:
    """Convert an integer to itself, and the peer's -1 to 0."""
    return max(0, numbers.whole(value, least=-1))


def rows_covered_by(key: str, *keys: str, convert: Conversion | None = None) -> Iterator[KeyRow]:
    """Yield rows of `keys` that the conversion of `key` covers.

    `convert` may return `Inert` for values without effect.
    """
    return (KeyRow(name, covered_by=key, convert=convert) for name in keys)


def without_effect_if(*values: Any) -> Conversion:
    """Return a conversion for covered keys: these values have no effect."""
    return lambda value, config: Inert("it is off there") if value in values else None


def dropped(reason: str, *keys: str) -> Iterator[KeyRow]:
    """Yield rows of keys that have no counterpart, for the same reason.

    Without these keys, a run in Ratchet may give other results. For keys that change no result, see
    `no_effect`.
    """
    return (KeyRow(key, note=reason) for key in keys)


def switches(reason: str, *keys: str) -> Iterator[KeyRow]:
    """Yield rows of switches without counterpart, which have no effect if they are off there."""

    def convert(value: Any, config: PeerConfig) -> Any:
        return Inert("it is off there") if is_off(value) else Dropped(reason)

    return (KeyRow(key, note=reason, convert=convert) for key in keys)


def is_off(value: Any) -> bool:
    """Return True if the value turns a switch off: false, 0, "none" or empty."""
    return value in (False, 0, "none", "") or value == [] or value == {}


def no_effect(reason: str, *keys: str) -> Iterator[KeyRow]:
    """Yield rows of keys that need no counterpart, because they change no training result."""
    return (KeyRow(key, note=reason, inert=True) for key in keys)
