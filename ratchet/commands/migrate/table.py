"""The parts of the tables of peers: a row for each key, and what a row may say of a value."""

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
    """A peer's configuration, flat: `values` by dotted key as the file has them, `defaults` as the
    peer would add them.

    `looked_up` receives every key that a conversion reads.
    """

    values: Mapping[str, Any]
    defaults: Mapping[str, Any]
    looked_up: set[str] = field(default_factory=set)

    def __getitem__(self, key: str) -> Any:
        """Return the value that counts there; None where it is null, or neither file nor peer gives
        one."""
        self.looked_up.add(key)
        return self.values[key] if key in self.values else self.defaults.get(key)

    def flag(self, key: str) -> bool:
        """Return a truth value; null is false. Raises Misread."""
        value = self[key]
        return False if value is None else numbers.flag(value, key)

    def whole(self, key: str, otherwise: int | None = None, least: int = 1) -> int:
        """Return a whole number, `otherwise` for null. Raises Misread."""
        value = self[key]
        if value is None and otherwise is not None:
            return otherwise
        return numbers.whole(value, key, least)

    def number(self, key: str) -> int | float:
        """Return a number. Raises Misread."""
        return numbers.number(self[key], key)


@dataclass(frozen=True, slots=True)
class Sets:
    """The result of a conversion: several keys of a recipe for one of theirs, or a note on this
    very value."""

    values: Mapping[str, Any]
    note: str = ""


@dataclass(frozen=True, slots=True)
class Without:
    """The result of a conversion for a value without a counterpart: why, or what to do."""

    why: str


@dataclass(frozen=True, slots=True)
class Idle:
    """The result of a conversion for a value that changes nothing: it is off there, or holds here
    anyway."""

    why: str


Convert = Callable[[Any, PeerConfig], Any]


@dataclass(frozen=True, slots=True)
class KeyRow:
    """A key of a peer.

    `theirs`: a dotted key; `*` in it stands for any characters. `ours`: key of a recipe; "" if
    there is none, and then `note` says why, or what to do. With both, `note` says what means
    something else here. `how`: the value of `ours` from theirs, or `Sets`, `Without` or `Idle`;
    None: as it is. `within`: their key that is converted together with this one. `default`: theirs
    if a file is silent and ours differs. `null`: the value of `ours` for a null of theirs; without
    it a null takes nothing over. `idle`: True if the missing counterpart changes no result of the
    training.
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
    """One kind of training of a peer. `fixed`: keys of every recipe that comes of it; rows override
    them."""

    fixed: Mapping[str, Any]
    rows: tuple[KeyRow, ...]

    @property
    def defaults(self) -> dict[str, Any]:
        return {row.theirs: row.default for row in self.rows if row.default is not ABSENT}

    def row(self, key: str) -> KeyRow | None:
        """Return that of the key itself, else the narrowest that stands for several; None: the key
        is unknown."""
        if key not in self._found:
            self._found[key] = next(
                (row for pattern, row in self._wide if pattern.match(key)), None
            )
        return self._found[key]

    @cached_property
    def _found(self) -> dict[str, KeyRow | None]:
        """Hold rows by key: those that name it, and what was looked up."""
        return {row.theirs: row for row in self.rows}

    @cached_property
    def _wide(self) -> list[tuple[re.Pattern[str], KeyRow]]:
        """Return the rows that stand for several keys, narrowest first."""
        wide = sorted(
            (row for row in self.rows if "*" in row.theirs),
            key=lambda row: len(row.theirs),
            reverse=True,
        )
        return [(re.compile(translate(row.theirs)), row) for row in wide]


@dataclass(frozen=True, slots=True)
class Peer:
    """A library. `version`: whose keys and defaults these are. `marks`: (prefixes of) keys that no
    other peer has. `method`: returns the name of a configuration's method; "" if it can't be told.
    `dialect`: whose YAML its files are."""

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
    """Return a conversion by value; an unlisted value has no counterpart."""

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
    """Return `how` restricted to where another key makes this one count."""

    def checked(value: Any, config: PeerConfig) -> Any:
        if not condition(config):
            return Idle(why)
        return value if how is None else how(value, config)

    return checked


def alone(name: str, why: str) -> Convert:
    """Convert a key of which one value needs no counterpart, and others have none."""

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
    """Return a truth value."""
    return numbers.flag(value)


def positive(why: str) -> Convert:
    """Convert a whole number above 0; others have no effect, for a reason."""

    def how(value: Any, config: PeerConfig) -> Any:
        count = numbers.whole(value)
        return count if count > 0 else Idle(why)

    return how


def at_least_0(value: Any, config: PeerConfig) -> int:
    """Return a whole number; -1 there is 0 here."""
    return max(0, numbers.whole(value, least=-1))


def within(key: str, *keys: str) -> Iterator[KeyRow]:
    """Yield rows of keys that the conversion of another one reads."""
    return (KeyRow(name, within=key) for name in keys)


def nothing(why: str, *keys: str) -> Iterator[KeyRow]:
    """Yield rows of keys without a counterpart, for one reason."""
    return (KeyRow(key, note=why) for key in keys)


def idle(why: str, *keys: str) -> Iterator[KeyRow]:
    """Yield rows of keys that need no counterpart, as nothing that they say changes a result here,
    for one reason."""
    return (KeyRow(key, note=why, idle=True) for key in keys)
