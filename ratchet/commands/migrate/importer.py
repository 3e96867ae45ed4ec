"""Convert a peer's keys to a recipe that `ratchet check` accepts, with an account of every key."""

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
    """The account of a key. `ours` is empty if it has no counterpart, and then `note` says why;
    with both, `note` says what means something else.

    assumed: True if the file doesn't set it and it is the peer's default. within: the peer's key
    that was converted with it. idle: True if nothing that it says changes a result here.
    """

    theirs: str
    value: Any
    ours: Mapping[str, Any]
    note: str
    assumed: bool = False
    within: str = ""
    idle: bool = False

    @property
    def fate(self) -> Fate:
        """Return the one fate of each key: taken as it is, taken with a change that `note` names,
        dropped, or without effect."""
        if self.within or self.ours:
            return "different" if self.note else "same"
        return "idle" if self.idle else "without"


@dataclass
class Imported:
    """The result of an import.

    `flat`: the recipe by dotted key. `unset`: keys that are null there. `unread`: what could not be
    resolved. `repeated`: earlier values of what a script says twice. `refused`: what `ratchet
    check` says of the whole; "" if it accepts it.
    """

    peer: Peer
    method: str
    items: list[Item]
    flat: dict[str, Any]
    unset: list[str] = field(default_factory=list)
    unread: Mapping[str, str] = field(default_factory=dict)
    repeated: Mapping[str, str] = field(default_factory=dict)
    refused: list[RecipeProblem] = field(default_factory=list)
    told: set[str] = field(default_factory=lambda: {"name", "algorithm.kind", "environment.kind"})

    def fated(self, fate: Fate) -> list[Item]:
        """Return the keys with one fate."""
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
        """Return keys of the recipe that no key of the file sets."""
        return {key: value for key, value in self.flat.items() if key not in self.told}

    @property
    def recipe(self) -> dict[str, Any]:
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
    """Import a file. Raises ConfigError if it can't be read, if its keys are no peer's, or if the
    kind of training can't be told."""
    source = read_source(path)
    chosen = PEERS[peer] if peer is not None else _told(source.values, path)
    if path.suffix not in (".sh", ".bash", ".txt") and chosen.dialect != "omegaconf":
        source = read_source(path, chosen.dialect)
    name = chosen.method(source.values)
    if not name:
        raise ConfigError(
            f"{path}: what kind of training it is can't be told from its keys: {chosen.title}'s "
            f"are {', '.join(chosen.methods)}"
        )
    result = convert(chosen, name, source)
    if not {f"environment.{key}" for key in ("train", "hub", "preset")} & set(result.flat):
        result.flat["environment.train"] = ["data/train.jsonl"]
    result.flat.setdefault("name", re.sub(r"[^\w.+-]+", "-", path.stem).lstrip("_.+-") or "run")
    _settle(result)
    return result


def convert(peer: Peer, name: str, source: FlatConfig) -> Imported:
    """Return what a method's table makes of a source, before `ratchet check` has seen it."""
    method = peer.methods[name]
    result = Imported(
        peer, name, [], dict(method.fixed), unread=source.unread, repeated=source.repeated
    )
    _apply(result, method, PeerConfig(source.values, method.defaults))
    return result


def _told(values: Mapping[str, Any], path: Path) -> Peer:
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
            item = _item(row, key, value, config, assumed)
            if row.how is not None and item.ours:
                runs.add(key, row.how, value, config.looked_up)
        if item is None or (assumed and not (item.ours or item.within)):
            continue
        result.items.append(item)
        for name, content in item.ours.items():
            lay(result.flat, name, content)
            laid_by[name] = key
        result.told |= set(item.ours)
    _account(result, runs, laid_by, config)


def _item(row: KeyRow, key: str, value: Any, config: PeerConfig, assumed: bool) -> Item:
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
    """Put a key into a recipe by dotted keys, over what is there at it, below it, or in a section
    above it."""
    for name in list(flat):
        if name.startswith(f"{key}.") or (
            key.startswith(f"{name}.") and not isinstance(flat[name], dict)
        ):
            del flat[name]
    above = next((name for name in flat if key.startswith(f"{name}.")), None)
    if above is None:
        flat[key] = value
        return
    *places, last = key.removeprefix(f"{above}.").split(".")
    section = flat[above] = deepcopy(flat[above])
    for place in places:
        section = section.setdefault(place, {})
    section[last] = value


# --- the account: what each key did in the end


def _account(
    result: Imported, runs: ConversionRuns, laid_by: Mapping[str, str], config: PeerConfig
) -> None:
    """Correct what the table says of each key by what the conversions did with its value, and by
    what stands in the end."""
    recipe = result.recipe
    standing = [_standing(item, recipe, laid_by) for item in result.items]
    by_key = {item.theirs: item for item in standing}
    items = [item if item.assumed else _effective(item, by_key, runs, config) for item in standing]
    result.items = [item for item in items if not item.assumed or item.ours]


def _standing(item: Item, recipe: Mapping[str, Any], laid_by: Mapping[str, str]) -> Item:
    """Return the item without those keys of ours that another of theirs set to something else
    afterwards."""
    lost = [key for key, value in item.ours.items() if not _stands(recipe, key, value)]
    if not lost:
        return item
    by = {
        key: laid_by.get(key)
        or next((by for name, by in laid_by.items() if key.startswith(f"{name}.")), "")
        for key in lost
    }
    why = "; ".join(f"{key} goes under: {by[key] or 'another key'} sets it" for key in lost)
    kept = {key: value for key, value in item.ours.items() if key not in lost}
    return replace(item, ours=kept, note="; ".join(filter(None, [item.note, why])))


def _stands(recipe: Mapping[str, Any], key: str, value: Any) -> bool:
    place: Any = recipe
    for name in key.split("."):
        if not isinstance(place, Mapping) or name not in place:
            return False
        place = place[name]
    if isinstance(value, Mapping) and isinstance(place, Mapping):
        return all(_stands(place, name, inner) for name, inner in value.items())
    return place == value and type(place) is type(value)


def _effective(
    item: Item, by_key: Mapping[str, Item], runs: ConversionRuns, config: PeerConfig
) -> Item:
    """Return the item, as what it is if no conversion made anything of its value."""
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
    main = by_key.get(_main(item))
    if main is None:
        return replace(
            item,
            within="",
            note=f"counts with {_main(item)} alone, which the file doesn't set",
            idle=True,
        )
    if main.ours:
        return replace(
            item,
            within="",
            note=f"is not taken over: {main.theirs}={main.value} was converted without it",
        )
    return replace(item, within="", note=f"{main.theirs}: {main.note}", idle=main.idle)


def _main(item: Item) -> str:
    """Return the key that an item stands with; where a table says it by `*`, the one beside it."""
    if "*" not in item.within:
        return item.within
    return f"{item.theirs.rpartition('.')[0]}.{item.within.rpartition('.')[2]}"


# --- what check says of it


def _settle(result: Imported) -> None:
    """Remove what `ratchet check` refuses, and say so; what can't be removed stays in `refused`."""
    for _ in range(len(result.flat)):
        result.refused = list(_problems(result.recipe))
        if not result.refused:
            return
        wrong = next(
            (
                (key, problem)
                for problem in result.refused
                if (key := _taken(result, problem.origin.path))
            ),
            None,
        )
        if wrong is None:
            return
        key, problem = wrong
        del result.flat[key]
        result.items = [_less(item, key, problem.message) for item in result.items]


def _taken(result: Imported, path: str) -> str | None:
    """Return our key that a problem is at, if a key of the peer set it."""
    keys = (key for item in result.items for key in item.ours if key in result.flat)
    return next((key for key in keys if path == key or path.startswith(f"{key}.")), None)


def _less(item: Item, key: str, message: str) -> Item:
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
        # the first that was written
        node = next((node for node, left in located if not left), located[0][0])
        yield RecipeProblem(node.origin, conflict.message)
