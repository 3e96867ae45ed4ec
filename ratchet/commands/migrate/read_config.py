"""Read a config file of another library as flat keys: YAML with `defaults:` and `${...}`, JSON, or
the overrides in a shell script."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ratchet.commands.migrate.hydra_overrides import Script, UnreadableOverride, parse
from ratchet.commands.migrate.numbers import InvalidValue, number, parse_hydra_word
from ratchet.commands.migrate.yaml_dialects import ConfigReader, Dialect
from ratchet.errors import ConfigError

SAME_PLACE = ("_here_", "_global_")  # Hydra's names for the place of an entry of `defaults`
MANDATORY = "???"  # OmegaConf's mark of a value that must be set on the command line
INNERMOST = re.compile(r"\$\{([^${}]*)\}")
# Resolvers that NeMo RL registers, with two arguments each.
RESOLVERS: Mapping[str, Callable[[Any, Any], Any]] = {
    "add": lambda first, second: first + second,
    "sum": lambda first, second: first + second,
    "mul": lambda first, second: first * second,
    "div": lambda first, second: first / second,
    "max": max,
    "min": min,
}
MAX_DEPTH = 50
MAX_TEXT = 20_000  # characters and items of a value after its ${...} are resolved
TOO_LONG = (
    f"its ${{...}} resolve to more than {MAX_TEXT:,} characters, the limit: write the value out"
)


@dataclass
class FlatConfig:
    """The configuration of another library."""

    values: dict[str, Any]
    """The values by dotted key; a list is one value."""
    unresolved: dict[str, str] = field(default_factory=dict)
    """The keys that could not be resolved: key -> text and reason."""
    repeated: dict[str, str] = field(default_factory=dict)
    """Overrides that a later override in the script replaced: key -> replaced value as text."""
    path: Path | None = None
    """The config file."""


def read_source(path: Path, dialect: Dialect = "omegaconf") -> FlatConfig:
    """Read a config file.

    Raises ConfigError if it is missing, is neither YAML nor JSON nor a shell script with overrides,
    or sets a key twice.
    """
    if path.suffix == ".py":
        raise ConfigError(
            f"{path} is a Python script, and `ratchet import` runs none. Write the arguments of "
            "its config (GRPOConfig(...), DPOConfig(...)) into a YAML file, with "
            "model_name_or_path, dataset_name and reward_funcs, and import that "
            "(docs/start/from-trl.md)"
        )
    source = FlatConfig({}, path=path)
    reader = ConfigReader(dialect)
    if path.suffix in (".sh", ".bash", ".txt"):
        try:
            script = Script(unresolved=source.unresolved, repeated=source.repeated)
            script.read(reader.read_text(path))
            nested = script.nested
        except ConfigError as error:
            raise (
                error if str(error).startswith(str(path)) else ConfigError(f"{path} {error}")
            ) from error
    elif path.suffix == ".json":
        nested = reader.read_json(path)
    else:
        nested = _read_yaml(path, source, reader, ())
    for key, value in _flatten(nested):
        if key in source.values:
            raise ConfigError(
                f"{path}: {key} is set twice, once as a key with dots: remove one of them"
            )
        source.values[key] = value
    _Resolver(source).resolve()
    return source


def _read_yaml(
    path: Path, source: FlatConfig, reader: ConfigReader, including_files: tuple[Path, ...]
) -> dict[str, Any]:
    """Return the file's keys, merged with those of the files in its `defaults`.

    Later files take precedence. The file's own keys are where `_self_` is, or else last.
    """
    resolved = path.resolve()
    if resolved in including_files:
        raise ConfigError(f"{path}: the files in `defaults` refer to each other in a circle")
    content = reader.read_yaml(path, may_be_empty=bool(including_files))
    defaults = content.pop("defaults", None)
    merged: dict[str, Any] = {}
    entries = defaults if isinstance(defaults, list) else [defaults]
    for entry in entries if "_self_" in entries else [*entries, "_self_"]:
        if entry is None:
            continue
        if entry == "_self_":
            merged = _merge(merged, content)
            continue
        for section_name, name in _parse_defaults_entry(entry):
            default_file = next(
                (
                    file
                    for file in (path.parent / name, path.parent / f"{name}.yaml")
                    if _is_file(file)
                ),
                None,
            )
            if default_file is None:
                reason = (
                    "is not beside this file, so its keys are not read: the peer's own defaults "
                    "are used for them"
                )
                source.unresolved[f"defaults: {name}"] = reason
                continue
            content_of_default = _read_yaml(
                default_file, source, reader, (*including_files, resolved)
            )
            for word in reversed(section_name.split(".") if section_name else []):
                content_of_default = {word: content_of_default}
            merged = _merge(merged, content_of_default)
    return merged


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # the name is too long, or has a null byte
        return False


def _parse_defaults_entry(entry: Any) -> Iterator[tuple[str, str]]:
    """Yield (section, file without suffix) for an entry of `defaults`.

    The entry is file, file@section, or {group@section: file}. The sections `_here_` and `_global_`
    stand for the place of the file that has the entry.
    """
    if not isinstance(entry, Mapping):
        name, _, section = str(entry).partition("@")
        yield ("" if section in SAME_PLACE else section), name
        return
    for key, name in entry.items():
        group, has_section, section = str(key).removeprefix("override ").partition("@")
        if not has_section:
            section = group.replace("/", ".")
        yield ("" if section in SAME_PLACE else section), f"{group}/{name}"


def _merge(base: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    merged = {} if overrides.get("_override_") is True else dict(base)
    for key, value in overrides.items():
        if key == "_override_":
            continue
        base_value = merged.get(key)
        merged[key] = (
            _merge(base_value, value)
            if isinstance(base_value, dict) and isinstance(value, Mapping)
            else value
        )
    return merged


def _flatten(nested: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in nested.items():
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", None if value == {} else value


# --- ${...}


@dataclass
class _Resolver:
    """A resolver of `${...}`. It resolves each key once, to a value or to an error."""

    source: FlatConfig
    resolved: dict[str, Any] = field(default_factory=dict)
    in_progress: list[str] = field(default_factory=list)

    def resolve(self) -> None:
        """Resolve all values. Keys that can't be resolved from the file move to `unresolved`."""
        values: dict[str, Any] = {}
        for key, value in self.source.values.items():
            try:
                values[key] = self._resolve_key(key)
            except LookupError as error:
                self.source.unresolved[key] = f"{value}: {error.args[0]}"
        self.source.values = {
            key: value for key, value in values.items() if key not in self.source.unresolved
        }

    def _resolve_key(self, key: str) -> Any:
        """Return the value of a key. Raises LookupError if it can't be resolved."""
        if key not in self.resolved:
            if key in self.in_progress:
                raise LookupError("refers to itself")
            if len(self.in_progress) > MAX_DEPTH:
                raise LookupError(f"refers through more than {MAX_DEPTH} keys: write the value out")
            self.in_progress.append(key)
            try:
                value = self._resolve_value(self.source.values[key], key)
                if _count_down(value, MAX_TEXT) < 0:
                    raise LookupError(TOO_LONG)
                self.resolved[key] = value
            except LookupError as error:
                self.resolved[key] = error
            self.in_progress.pop()
        if isinstance(self.resolved[key], LookupError):
            raise LookupError(*self.resolved[key].args)
        return self.resolved[key]

    def _resolve_value(self, value: Any, key: str) -> Any:
        """Return the value with each `${...}` in it replaced, the innermost first."""
        if isinstance(value, list):
            return [self._resolve_value(item, key) for item in value]
        if isinstance(value, Mapping):
            return {name: self._resolve_value(item, key) for name, item in value.items()}
        if not isinstance(value, str):
            return value
        if value == MANDATORY:
            raise LookupError("must be set on the peer's command line")
        while (match := INNERMOST.search(value)) is not None:
            inner = self._resolve_reference(match[1].strip(), key)
            if match[0] == value:
                return inner
            value = value[: match.start()] + str(inner) + value[match.end() :]
            if len(value) > MAX_TEXT:
                raise LookupError(TOO_LONG)
        return value

    def _resolve_reference(self, reference: str, key: str) -> Any:
        """Return the value of the text inside `${...}`: a key's value, or a resolver's result."""
        resolver, colon, arguments_text = reference.partition(":")
        arguments = [word.strip() for word in arguments_text.split(",")]
        if not colon:
            return self._look_up(reference, key)
        if resolver in RESOLVERS:
            return _compute(resolver, arguments)
        if resolver == "oc.select":
            try:
                return self._look_up(arguments[0], key)
            except LookupError:
                if len(arguments) > 1:
                    try:
                        return parse(",".join(arguments[1:]))
                    except UnreadableOverride as error:
                        raise LookupError(str(error)) from error
                raise
        raise LookupError(f"'{resolver}:' is a resolver of the peer: set its result")

    def _look_up(self, name: str, key: str) -> Any:
        """Return the value of the key `name`. Each leading dot goes up one section from `key`."""
        values = self.source.values
        n_levels = len(name) - len(name.lstrip("."))
        parents = key.split(".")[: -n_levels or None] if n_levels else []
        full_name = ".".join([*parents, name.lstrip(".")])
        if full_name in values:
            return self._resolve_key(full_name)
        if any(other.startswith(f"{full_name}.") for other in values):
            raise LookupError(f"refers to the whole section {full_name}: write its keys out")
        raise LookupError(f"the file has no key {full_name}")


def _count_down(value: Any, remaining: int) -> int:
    """Return `remaining` minus the value's characters and items. Counting stops below 0."""
    if isinstance(value, list | Mapping):
        for item in value if isinstance(value, list) else value.values():
            remaining = _count_down(item, remaining - 1)
            if remaining < 0:
                break
        return remaining
    return remaining - (len(value) if isinstance(value, str) else 1)


def _compute(resolver: str, arguments: list[str]) -> Any:
    """Return the result of one of the RESOLVERS. Integers stay integers, except in a quotient."""
    try:
        numbers = [number(parse_hydra_word(word)) for word in arguments]
        if len(numbers) != 2:
            raise InvalidValue("takes two numbers")
        return RESOLVERS[resolver](*numbers)
    except (InvalidValue, ArithmeticError) as error:
        raise LookupError(f"{resolver}: {error}") from error
