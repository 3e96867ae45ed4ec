"""The parts of a peer library's table: rows of keys, and conversions of their values."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import translate
from functools import cached_property
from typing import Any

from ratchet.commands.migrate import numbers
from ratchet.commands.migrate.yaml_dialects import Dialect

ABSENT: Any = object()


@dataclass(frozen=True)
class PeerConfig:
    """A peer's configuration, flat, by dotted key.

    values: the values in the file.
    defaults: the peer's own defaults.
    looked_up: receives every key that a conversion reads.
    """

    values: Mapping[str, Any]
    defaults: Mapping[str, Any]
    looked_up: set[str] = field(default_factory=set)

    def __getitem__(self, key: str) -> Any:
        """Return the file's value, or else the peer's default; None if it is null or there is
        neither."""
        self.looked_up.add(key)
        return self.values[key] if key in self.values else self.defaults.get(key)

    def flag(self, key: str) -> bool:
        """Return a boolean; null is False. Raises Misread."""
        value = self[key]
        return False if value is None else numbers.flag(value, key)

    def whole(self, key: str, otherwise: int | None = None, least: int = 1) -> int:
        """Return a whole number from `least` on, or `otherwise` for null. Raises Misread."""
        value = self[key]
        if value is None and otherwise is not None:
            return otherwise
        return numbers.whole(value, key, least)

    def number(self, key: str) -> int | float:
        """Return a number. Raises Misread."""
        return numbers.number(self[key], key)


@dataclass(frozen=True, slots=True)
class Sets:
    """The result of a conversion that sets several keys, or adds a note on the value."""

    values: Mapping[str, Any]
    note: str = ""


@dataclass(frozen=True, slots=True)
class Without:
    """The result of a conversion for a value without a counterpart: why, or what to do."""

    why: str


@dataclass(frozen=True, slots=True)
class Idle:
    """The result of a conversion for a value without effect: it is off in the peer, or Ratchet does
    the same anyway."""

    why: str


Convert = Callable[[Any, PeerConfig], Any]


@dataclass(frozen=True, slots=True)
class KeyRow:
    """A key of a peer.

    theirs: the peer's dotted key; `*` in it stands for any characters.
    ours: the key of the recipe, or several with commas; "" if there is none.
    note: without `ours`, why there is none, or what to do; with it, what differs in meaning.
    how: returns the value of `ours`, or `Sets`, `Without` or `Idle`; None: the value is copied.
    within: the peer's key whose conversion also covers this one.
    default: the peer's default, if Ratchet's differs.
    null: the value of `ours` if the peer's is null; ABSENT: null sets nothing.
    idle: True if the missing counterpart changes no training result.
    """

    theirs: str
    ours: str = ""
    note: str = ""
    how: Convert | None = None
    within: str = ""
    default: Any = ABSENT
    null: Any = ABSENT
    idle: bool = False


@dataclass(frozen=True)
class Method:
    """A training method of a peer. `fixed`: keys that every recipe made from it has, unless a row
    overrides them."""

    fixed: Mapping[str, Any]
    rows: tuple[KeyRow, ...]

    @property
    def defaults(self) -> dict[str, Any]:
        return {row.theirs: row.default for row in self.rows if row.default is not ABSENT}

    def row(self, key: str) -> KeyRow | None:
        """Return the row that names a key, or else the longest pattern that matches it; None if the
        key is unknown."""
        if key not in self._found:
            self._found[key] = next(
                (row for pattern, row in self._wide if pattern.match(key)), None
            )
        return self._found[key]

    @cached_property
    def _found(self) -> dict[str, KeyRow | None]:
        """Return the rows by key. `row` adds the keys that it looks up."""
        return {row.theirs: row for row in self.rows}

    @cached_property
    def _wide(self) -> list[tuple[re.Pattern[str], KeyRow]]:
        """Return the rows whose keys are patterns, longest first."""
        wide = sorted(
            (row for row in self.rows if "*" in row.theirs),
            key=lambda row: len(row.theirs),
            reverse=True,
        )
        return [(re.compile(translate(row.theirs)), row) for row in wide]


@dataclass(frozen=True, slots=True)
class Peer:
    """A library whose configurations are imported.

    version: its version that has these keys and defaults.
    marks: keys, or prefixes of keys, that no other peer has.
    method: returns the name of a configuration's method; "" if the keys don't tell.
    dialect: the YAML dialect of its files.
    """

    name: str
    title: str
    version: str
    marks: tuple[str, ...]
    method: Callable[[Mapping[str, Any]], str]
    methods: Mapping[str, Method]
    dialect: Dialect = "omegaconf"

    def likeness(self, values: Mapping[str, Any]) -> int:
        return sum(
            any(key == mark or key.startswith(f"{mark}.") for key in values) for mark in self.marks
        )


def choose(choices: Mapping[Any, Any]) -> Convert:
    """Return a conversion that looks values up; an unlisted value has no counterpart."""

    def how(value: Any, config: PeerConfig) -> Any:
        if isinstance(next(iter(choices)), bool):
            value = numbers.flag(value)
        if not isinstance(value, str | bool):
            raise numbers.Misread(f"is {value!r}, and not one of {', '.join(map(str, choices))}")
        if value in choices:
            return choices[value]
        return Without(
            f"{value} is not one of those that have a counterpart: {', '.join(map(str, choices))}"
        )

    return how


def when(condition: Callable[[PeerConfig], Any], how: Convert | None, why: str) -> Convert:
    """Return `how` with a condition, without which the key has no effect."""

    def checked(value: Any, config: PeerConfig) -> Any:
        if not condition(config):
            return Idle(why)
        return value if how is None else how(value, config)

    return checked


def alone(name: str, why: str) -> Convert:
    """Return a conversion for which the value `name` needs no counterpart, and others have none."""

    def how(value: Any, config: PeerConfig) -> Any:
        return Idle(why) if value == name or value == [name] else Without(why)

    return how


def number(value: Any, config: PeerConfig) -> int | float:
    """Return a number as it stands."""
    return numbers.number(value)


def real(value: Any, config: PeerConfig) -> float:
    """Return a number in floating point."""
    return numbers.real(value)


def whole(value: Any, config: PeerConfig) -> int:
    """Return a whole number as it stands."""
    return numbers.whole(value)


def flag(value: Any, config: PeerConfig) -> bool:
    """Return a boolean."""
    return numbers.flag(value)


def positive(why: str) -> Convert:
    """Return a conversion of whole numbers; only those above 0 have an effect."""

    def how(value: Any, config: PeerConfig) -> Any:
        count = numbers.whole(value)
        return count if count > 0 else Idle(why)

    return how


def at_least_0(value: Any, config: PeerConfig) -> int:
    """Return a whole number; the peer's -1 becomes 0."""
    return max(0, numbers.whole(value, least=-1))


def within(key: str, *keys: str) -> Iterator[KeyRow]:
    """Yield rows of `keys` that the conversion of `key` covers."""
    return (KeyRow(name, within=key) for name in keys)


def nothing(why: str, *keys: str) -> Iterator[KeyRow]:
    """Yield rows of keys that have no counterpart for the same reason."""
    return (KeyRow(key, note=why) for key in keys)


def idle(why: str, *keys: str) -> Iterator[KeyRow]:
    """Yield rows of keys that need no counterpart, because they change no training result."""
    return (KeyRow(key, note=why, idle=True) for key in keys)
