"""Read a config file of another library as flat keys: YAML with `defaults:` and `${...}`, JSON, or
the overrides in a shell script."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ratchet.commands.migrate.hydra_overrides import NotRead, Script, parse
from ratchet.commands.migrate.numbers import Misread, hydra, number
from ratchet.commands.migrate.yaml_dialects import ConfigReader, Dialect
from ratchet.errors import ConfigError

MISSING = "???"  # OmegaConf's mark of a value that the command line must give
INNERMOST = re.compile(r"\$\{([^${}]*)\}")
# Resolvers that NeMo RL registers, with two arguments each.
SUMS: Mapping[str, Callable[[Any, Any], Any]] = {
    "add": lambda first, second: first + second,
    "sum": lambda first, second: first + second,
    "mul": lambda first, second: first * second,
    "div": lambda first, second: first / second,
    "max": max,
    "min": min,
}
MAX_DEPTH = 50
MAX_TEXT = 20_000  # characters and items of a value after its ${...} are resolved


@dataclass
class FlatConfig:
    """The configuration of another library.

    values: the values by dotted key; a list is one value.
    unread: keys that could not be resolved: key -> text and reason.
    repeated: overrides that a later one in the script replaced: key -> replaced value as text.
    """

    values: dict[str, Any]
    unread: dict[str, str] = field(default_factory=dict)
    repeated: dict[str, str] = field(default_factory=dict)


def read_source(path: Path, dialect: Dialect = "omegaconf") -> FlatConfig:
    """Read a config file.

    Raises ConfigError if it is missing, is neither YAML nor JSON nor a script with overrides, or
    sets a key twice.
    """
    source = FlatConfig({})
    reader = ConfigReader(dialect)
    if path.suffix in (".sh", ".bash", ".txt"):
        try:
            script = Script(unread=source.unread, repeated=source.repeated)
            script.read(reader.text(path))
            nested = script.nested
        except ConfigError as error:
            raise (
                error if str(error).startswith(str(path)) else ConfigError(f"{path} {error}")
            ) from error
    elif path.suffix == ".json":
        nested = reader.json(path)
    else:
        nested = _yaml(path, source, reader, ())
    for key, value in _flat(nested):
        if key in source.values:
            raise ConfigError(
                f"{path}: {key} is set twice, once by a name with dots: remove one of them"
            )
        source.values[key] = value
    _Resolver(source).resolve()
    return source


def _yaml(
    path: Path, source: FlatConfig, reader: ConfigReader, chain: tuple[Path, ...]
) -> dict[str, Any]:
    """Return the file's keys, merged over those of the files in its `defaults`."""
    resolved = path.resolve()
    if resolved in chain:
        raise ConfigError(f"{path}: defaults name each other in a circle")
    content = reader.yaml(path)
    listed = content.pop("defaults", None)
    whole: dict[str, Any] = {}
    for entry in listed if isinstance(listed, list) else [listed]:
        if entry is None or entry == "_self_":
            continue
        for place, name in _files(entry):
            below_file = next(
                (
                    file
                    for file in (path.parent / name, path.parent / f"{name}.yaml")
                    if _is_file(file)
                ),
                None,
            )
            if below_file is None:
                why = (
                    "is not beside this file: what it sets is not read, and the peer's own "
                    "defaults stand for it"
                )
                source.unread[f"defaults: {name}"] = why
                continue
            below = _yaml(below_file, source, reader, (*chain, resolved))
            for word in reversed(place.split(".") if place else []):
                below = {word: below}
            whole = _laid(whole, below)
    return _laid(whole, content)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # the name is too long, or has a null byte
        return False


def _files(entry: Any) -> Iterator[tuple[str, str]]:
    """Yield (section, file without suffix) for an entry of `defaults`: a file, or {group@section:
    file}."""
    if not isinstance(entry, Mapping):
        yield "", str(entry)
        return
    for key, name in entry.items():
        group, at, place = str(key).removeprefix("override ").partition("@")
        yield (place if at else group.replace("/", ".")), f"{group}/{name}"


def _laid(base: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    joined = {} if over.get("_override_") is True else dict(base)
    for key, value in over.items():
        if key == "_override_":
            continue
        below = joined.get(key)
        joined[key] = (
            _laid(below, value) if isinstance(below, dict) and isinstance(value, Mapping) else value
        )
    return joined


def _flat(nested: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in nested.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", None if value == {} else value


# --- ${...}


@dataclass
class _Resolver:
    """A resolver of `${...}`. It resolves each key once, to a value or to an error."""

    source: FlatConfig
    resolved: dict[str, Any] = field(default_factory=dict)
    under_way: list[str] = field(default_factory=list)

    def resolve(self) -> None:
        """Resolve all values; move keys that the file alone can't resolve to `unread`."""
        values: dict[str, Any] = {}
        for key, value in self.source.values.items():
            try:
                values[key] = self._of_key(key)
            except LookupError as error:
                self.source.unread[key] = f"{value}: {error.args[0]}"
        self.source.values = {
            key: value for key, value in values.items() if key not in self.source.unread
        }

    def _of_key(self, key: str) -> Any:
        if key not in self.resolved:
            if key in self.under_way:
                raise LookupError("refers to itself")
            if len(self.under_way) > MAX_DEPTH:
                raise LookupError(f"refers through more than {MAX_DEPTH} keys: write the value out")
            self.under_way.append(key)
            try:
                value = self._value(self.source.values[key], key)
                if _rest(value, MAX_TEXT) < 0:
                    raise LookupError("the file's ${...} multiply each other: write the value out")
                self.resolved[key] = value
            except LookupError as error:
                self.resolved[key] = error
            self.under_way.pop()
        if isinstance(self.resolved[key], LookupError):
            raise LookupError(*self.resolved[key].args)
        return self.resolved[key]

    def _value(self, value: Any, key: str) -> Any:
        if isinstance(value, list):
            return [self._value(item, key) for item in value]
        if isinstance(value, Mapping):
            return {name: self._value(item, key) for name, item in value.items()}
        if not isinstance(value, str):
            return value
        if value == MISSING:
            raise LookupError("must be given on the command line there")
        while (inside := INNERMOST.search(value)) is not None:
            inner = self._referred(inside[1].strip(), key)
            if inside[0] == value:
                return inner
            value = value[: inside.start()] + str(inner) + value[inside.end() :]
            if len(value) > MAX_TEXT:
                raise LookupError("the file's ${...} multiply each other: write the value out")
        return value

    def _referred(self, inside: str, key: str) -> Any:
        resolver, colon, rest = inside.partition(":")
        arguments = [word.strip() for word in rest.split(",")]
        if not colon:
            return self._looked_up(inside, key)
        if resolver in SUMS:
            return _sum(resolver, arguments)
        if resolver == "oc.select":
            try:
                return self._looked_up(arguments[0], key)
            except LookupError:
                if len(arguments) > 1:
                    try:
                        return parse(",".join(arguments[1:]))
                    except NotRead as error:
                        raise LookupError(str(error)) from error
                raise
        raise LookupError(f"'{resolver}:' is known there alone: set what it works out to")

    def _looked_up(self, name: str, key: str) -> Any:
        """Return the value of a key; each leading dot goes up one section from `key`."""
        values = self.source.values
        ups = len(name) - len(name.lstrip("."))
        place = key.split(".")[: -ups or None] if ups else []
        whole = ".".join([*place, name.lstrip(".")])
        if whole in values:
            return self._of_key(whole)
        if any(other.startswith(f"{whole}.") for other in values):
            raise LookupError(f"stands for the whole section {whole}: write its keys out")
        raise LookupError(f"the file has no key {whole}")


def _rest(value: Any, left: int) -> int:
    """Return `left` minus the value's characters and items; stop counting below 0."""
    if isinstance(value, list | Mapping):
        for item in value if isinstance(value, list) else value.values():
            left = _rest(item, left - 1)
            if left < 0:
                break
        return left
    return left - (len(value) if isinstance(value, str) else 1)


def _sum(resolver: str, arguments: list[str]) -> Any:
    """Compute a resolver of SUMS as Python does: integers stay integers, except in a quotient."""
    try:
        numbers = [number(hydra(word)) for word in arguments]
        if len(numbers) != 2:
            raise Misread("takes two numbers")
        return SUMS[resolver](*numbers)
    except (Misread, ArithmeticError) as error:
        raise LookupError(f"{resolver}: {error}") from error
