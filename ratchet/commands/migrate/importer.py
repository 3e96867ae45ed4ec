"""Convert another library's keys to a recipe that `ratchet check` accepts, and account for each."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from ratchet.commands.migrate.nemo_rl import NEMO_RL
from ratchet.commands.migrate.numbers import Misread
from ratchet.commands.migrate.read_config import FlatConfig, read_source
from ratchet.commands.migrate.roll import ROLL
from ratchet.commands.migrate.table import (
    ABSENT,
    Idle,
    KeyRow,
    Method,
    Peer,
    PeerConfig,
    Sets,
    Without,
)
from ratchet.commands.migrate.trl import TRL
from ratchet.commands.migrate.used_keys import ConversionRuns
from ratchet.commands.migrate.verl import VERL
from ratchet.config.checks.stages import conflicts
from ratchet.config.diagnostics import RecipeProblem, explain, locate
from ratchet.config.layers import expand
from ratchet.config.schema import RunConfig
from ratchet.config.yaml_tree import read_text, write_text
from ratchet.errors import ConfigError

PEERS: Mapping[str, Peer] = {peer.name: peer for peer in (TRL, VERL, NEMO_RL, ROLL)}
UNKNOWN = (
    "is not in the table of {title}'s keys ({version}): look for what it does in docs/migrate.md"
)
ORDER = (
    "name",
    "seed",
    "run_dir",
    "model",
    "tokenizer",
    "cluster",
    "logging",
    "environment",
    "rewards",
    "algorithm",
    "steps",
)


Fate = Literal["same", "different", "without", "idle"]


@dataclass(frozen=True, slots=True)
class Item:
    """The account of one key of the peer: its value, and what the recipe has in its place."""

    theirs: str
    value: Any
    ours: Mapping[str, Any]  # keys and values in the recipe; empty without a counterpart
    note: str  # why there is no counterpart, or how the meaning of `ours` differs
    assumed: bool = False  # True if the file doesn't set the key, and it is the peer's default
    within: str = ""  # the peer's key whose conversion covers this one too
    idle: bool = False  # True if the key, as it is set, changes no result here

    @property
    def fate(self) -> Fate:
        """Return what became of the key.

        same: taken over. different: taken over with a change that `note` names. without: dropped.
        idle: dropped, without effect on results.
        """
        if self.within or self.ours:
            return "different" if self.note else "same"
        return "idle" if self.idle else "without"


@dataclass
class Imported:
    """The result of an import."""

    peer: Peer
    method: str
    items: list[Item]
    flat: dict[str, Any]  # the recipe by dotted key
    unset: list[str] = field(default_factory=list)  # the peer's keys that the file sets to null
    # keys that could not be resolved, each with what to do
    unread: Mapping[str, str] = field(default_factory=dict)
    # earlier values of keys that a script sets twice
    repeated: Mapping[str, str] = field(default_factory=dict)
    # problems that `ratchet check` still finds in the recipe
    refused: list[RecipeProblem] = field(default_factory=list)
    # keys of the recipe that the file determines
    told: set[str] = field(default_factory=lambda: {"name", "algorithm.kind", "environment.kind"})

    def fated(self, fate: Fate) -> list[Item]:
        """Return the items with one fate."""
        return [item for item in self.items if item.fate == fate]

    @property
    def same(self) -> list[Item]:
        return self.fated("same")

    @property
    def different(self) -> list[Item]:
        return self.fated("different")

    @property
    def without(self) -> list[Item]:
        return self.fated("without")

    @property
    def idle(self) -> list[Item]:
        return self.fated("idle")

    @property
    def chosen(self) -> dict[str, Any]:
        """Return the keys of the recipe that no key of the file determines."""
        return {key: value for key, value in self.flat.items() if key not in self.told}

    @property
    def recipe(self) -> dict[str, Any]:
        """Return `flat` as nested sections, in the order of a hand-written recipe."""
        places = {key: place for place, key in enumerate(ORDER)}
        nested: dict[str, Any] = {}
        for key, value in sorted(
            self.flat.items(), key=lambda pair: places.get(pair[0].partition(".")[0], len(ORDER))
        ):
            *sections, last = key.split(".")
            section = nested
            for name in sections:
                section = section.setdefault(name, {})
            section[last] = deepcopy(value)
        return nested


def read_config(path: Path, peer: str | None = None) -> Imported:
    """Import a file.

    Raises ConfigError if it can't be read, or if its keys don't tell the peer or the kind of
    training.
    """
    source = read_source(path)
    chosen_peer = PEERS[peer] if peer is not None else _detect_peer(source.values, path)
    if path.suffix not in (".sh", ".bash", ".txt") and chosen_peer.dialect != "omegaconf":
        source = read_source(path, chosen_peer.dialect)
    name = chosen_peer.method(source.values)
    if not name:
        raise ConfigError(
            f"{path}: what kind of training it is can't be told from its keys: "
            f"{chosen_peer.title}'s are {', '.join(chosen_peer.methods)}"
        )
    result = convert(chosen_peer, name, source)
    if not {f"environment.{key}" for key in ("train", "hub", "preset")} & set(result.flat):
        result.flat["environment.train"] = ["data/train.jsonl"]
    result.flat.setdefault("name", re.sub(r"[^\w.+-]+", "-", path.stem).lstrip("_.+-") or "run")
    _remove_refused(result)
    return result


def convert(peer: Peer, name: str, source: FlatConfig) -> Imported:
    """Return a source converted by a method's table, not yet checked by `ratchet check`."""
    method = peer.methods[name]
    result = Imported(
        peer, name, [], dict(method.fixed), unread=source.unread, repeated=source.repeated
    )
    _apply(result, method, PeerConfig(source.values, method.defaults))
    return result


def _detect_peer(values: Mapping[str, Any], path: Path) -> Peer:
    ranked = sorted(PEERS.values(), key=lambda peer: peer.likeness(values), reverse=True)
    if ranked[0].likeness(values) == ranked[1].likeness(values):
        raise ConfigError(
            f"{path}: whose configuration it is can't be told from its keys: say it by --from "
            f"{', '.join(PEERS)}"
        )
    return ranked[0]


def _apply(result: Imported, method: Method, config: PeerConfig) -> None:
    """Apply rows in the table's order, so that later ones override earlier ones."""
    places = {row.theirs: place for place, row in enumerate(method.rows)}
    keys = [(key, value, method.row(key), False) for key, value in config.values.items()]
    keys += [
        (key, value, method.row(key), True)
        for key, value in config.defaults.items()
        if key not in config.values
    ]
    runs = ConversionRuns()
    laid_by: dict[str, str] = {}
    for key, value, row, assumed in sorted(
        keys, key=lambda entry: places[entry[2].theirs] if entry[2] else -1
    ):
        item: Item | None = None
        if row is None and value is not None:
            why = UNKNOWN.format(title=result.peer.title, version=result.peer.version)
            item = Item(key, value, {}, why)
        elif value is None and (row is None or row.null is ABSENT):
            result.unset += [] if assumed else [key]
        elif row is not None:
            config.looked_up.clear()
            item = _convert_key(row, key, value, config, assumed)
            if row.how is not None and item.ours:
                runs.add(key, row.how, value, config.looked_up)
        if item is None or (assumed and not (item.ours or item.within)):
            continue
        result.items.append(item)
        for name, content in item.ours.items():
            lay(result.flat, name, content)
            laid_by[name] = key
        result.told |= set(item.ours)
    _correct_items(result, runs, laid_by, config)


def _convert_key(row: KeyRow, key: str, value: Any, config: PeerConfig, assumed: bool) -> Item:
    if value is None:
        return Item(key, None, {row.ours: row.null}, row.note, assumed)
    if row.within:
        return Item(key, value, {}, "", assumed, row.within)
    if not row.ours and row.how is None:
        return Item(key, value, {}, row.note, assumed, idle=row.idle)
    try:
        result = value if row.how is None else row.how(value, config)
    except Misread as error:
        result = Without(str(error))
    except (ArithmeticError, AttributeError, IndexError, KeyError, TypeError, ValueError):
        result = Without(
            "has not the form that it has there: set its counterpart by hand"
            + (f" ({row.ours})" if row.ours else "")
        )
    if isinstance(result, Without | Idle):
        return Item(key, value, {}, result.why, assumed, idle=isinstance(result, Idle))
    if isinstance(result, Sets):
        return Item(key, value, result.values, result.note or row.note, assumed)
    return Item(key, value, {row.ours: result}, row.note, assumed)


def lay(flat: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key in a flat recipe.

    It replaces keys below it and scalars above it. If a section above it is set, the key goes into
    a copy of that section.
    """
    for name in list(flat):
        if name.startswith(f"{key}.") or (
            key.startswith(f"{name}.") and not isinstance(flat[name], dict)
        ):
            del flat[name]
    above = next((name for name in flat if key.startswith(f"{name}.")), None)
    if above is None:
        flat[key] = value
        return
    *sections, last = key.removeprefix(f"{above}.").split(".")
    section = flat[above] = deepcopy(flat[above])
    for name in sections:
        section = section.setdefault(name, {})
    section[last] = value


# --- correct the accounts by the finished recipe


def _correct_items(
    result: Imported, runs: ConversionRuns, laid_by: Mapping[str, str], config: PeerConfig
) -> None:
    """Correct the items that a later key overrode, or whose value no conversion used."""
    recipe = result.recipe
    items = [_drop_overridden(item, recipe, laid_by) for item in result.items]
    by_key = {item.theirs: item for item in items}
    items = [item if item.assumed else _drop_unused(item, by_key, runs, config) for item in items]
    result.items = [item for item in items if not item.assumed or item.ours]


def _drop_overridden(item: Item, recipe: Mapping[str, Any], laid_by: Mapping[str, str]) -> Item:
    """Return the item without the keys of `ours` that a later key set to another value."""
    overridden = [key for key, value in item.ours.items() if not _has_value(recipe, key, value)]
    if not overridden:
        return item
    # The overriding key set this very key, or a section above it.
    setters = {
        key: laid_by.get(key)
        or next((setter for name, setter in laid_by.items() if key.startswith(f"{name}.")), "")
        for key in overridden
    }
    why = "; ".join(
        f"{key} goes under: {setters[key] or 'another key'} sets it" for key in overridden
    )
    kept = {key: value for key, value in item.ours.items() if key not in overridden}
    return replace(item, ours=kept, note="; ".join(filter(None, [item.note, why])))


def _has_value(recipe: Mapping[str, Any], key: str, value: Any) -> bool:
    content: Any = recipe
    for name in key.split("."):
        if not isinstance(content, Mapping) or name not in content:
            return False
        content = content[name]
    if isinstance(value, Mapping) and isinstance(content, Mapping):
        return all(_has_value(content, name, inner) for name, inner in value.items())
    return content == value and type(content) is type(value)


def _drop_unused(
    item: Item, by_key: Mapping[str, Item], runs: ConversionRuns, config: PeerConfig
) -> Item:
    """Return the item, corrected if its own conversion did not use its value.

    It is then covered by another key's conversion, or not taken over.
    """
    if not item.within and item.theirs not in runs.ran:
        return item
    used = [theirs for theirs in runs.users(item.theirs, config) if by_key[theirs].ours]
    if item.theirs in used:
        return item
    if used:
        return replace(item, ours={}, note="" if item.within else item.note, within=used[0])
    if not item.within:
        why = f"is not taken over: {', '.join(item.ours)} became what it is without it"
        return replace(item, ours={}, note="; ".join(filter(None, [item.note, why])))
    main = by_key.get(_main_key(item))
    if main is None:
        return replace(
            item,
            within="",
            note=f"counts with {_main_key(item)} alone, which the file doesn't set",
            idle=True,
        )
    if main.ours:
        return replace(
            item,
            within="",
            note=f"is not taken over: {main.theirs}={main.value} was converted without it",
        )
    return replace(item, within="", note=f"{main.theirs}: {main.note}", idle=main.idle)


def _main_key(item: Item) -> str:
    """Return `item.within`; if that is a pattern with `*`, the key of its name beside the item."""
    if "*" not in item.within:
        return item.within
    return f"{item.theirs.rpartition('.')[0]}.{item.within.rpartition('.')[2]}"


# --- remove what `ratchet check` refuses


def _remove_refused(result: Imported) -> None:
    """Remove the keys that `ratchet check` refuses, and note it in their items.

    Problems of keys that the peer didn't set stay in `refused`.
    """
    for _ in range(len(result.flat)):
        result.refused = list(_problems(result.recipe))
        if not result.refused:
            return
        removable = next(
            (
                (key, problem)
                for problem in result.refused
                if (key := _imported_key(result, problem.origin.path))
            ),
            None,
        )
        if removable is None:
            return
        key, problem = removable
        del result.flat[key]
        result.items = [_without_key(item, key, problem.message) for item in result.items]


def _imported_key(result: Imported, path: str) -> str | None:
    """Return the recipe's key at or above a problem's path, if a key of the peer set it."""
    keys = (key for item in result.items for key in item.ours if key in result.flat)
    return next((key for key in keys if path == key or path.startswith(f"{key}.")), None)


def _without_key(item: Item, key: str, message: str) -> Item:
    if key not in item.ours:
        return item
    kept = {name: value for name, value in item.ours.items() if name != key}
    return replace(
        item, ours=kept, note="; ".join(filter(None, [item.note, f"{key} was left out: {message}"]))
    )


def _problems(recipe: Mapping[str, Any]) -> Iterator[RecipeProblem]:
    problems: list[RecipeProblem] = []
    tree = expand(read_text(write_text(recipe), "the recipe")[0], problems)
    try:
        config = RunConfig.model_validate(tree.plain())
    except ValidationError as error:
        yield from [*problems, *explain(error, tree, RunConfig)]
        return
    yield from problems
    for conflict in conflicts(config):
        located = [locate(tree, key) for key in conflict.keys]
        # The first key that the recipe has; the others may be defaults.
        node = next((node for node, missing in located if not missing), located[0][0])
        yield RecipeProblem(node.origin, conflict.message)
