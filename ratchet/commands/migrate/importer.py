"""Convert another library's keys to a recipe that `ratchet check` accepts, and report on each key:
its counterpart in the recipe, or why it has none."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from ratchet.commands.migrate.nemo_rl.peer import NEMO_RL
from ratchet.commands.migrate.numbers import InvalidValue
from ratchet.commands.migrate.read_config import FlatConfig, read_source
from ratchet.commands.migrate.roll.peer import ROLL
from ratchet.commands.migrate.table import (
    ABSENT,
    Dropped,
    Inert,
    KeyRow,
    Method,
    Peer,
    PeerConfig,
    Values,
)
from ratchet.commands.migrate.trl import TRL
from ratchet.commands.migrate.used_keys import ConversionLog
from ratchet.commands.migrate.verl import VERL
from ratchet.config.checks.stages import conflicts
from ratchet.config.diagnostics import RecipeProblem, explain_validation_error, locate
from ratchet.config.layers import expand
from ratchet.config.schema import RunConfig
from ratchet.config.yaml_tree import read_text, write_text
from ratchet.errors import ConfigError

PEERS: Mapping[str, Peer] = {peer.name: peer for peer in (TRL, VERL, NEMO_RL, ROLL)}
UNKNOWN_NOTE = (
    "it is not in the table of {title}'s keys ({version}): docs/migrate.md lists the keys of "
    "recipes"
)
SECTION_ORDER = (
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


ItemStatus = Literal["same", "different", "dropped", "inert"]


@dataclass(frozen=True, slots=True)
class Item:
    """The result for one key of the peer: its value, and its counterpart in the recipe."""

    peer_key: str
    value: Any
    recipe_keys: Mapping[str, Any]  # keys and values in the recipe; empty without a counterpart
    note: str  # why there is no counterpart, or how the meaning differs in the recipe
    is_default: bool = False  # True if the value is the peer's default, not set in the file
    covered_by: str = ""  # another key of the peer, whose conversion also uses this key's value
    inert: bool = False  # True if this value of the key changes no result in Ratchet
    unused_note: str = ""  # why the value has no effect, if no conversion uses it

    @property
    def status(self) -> ItemStatus:
        """Return how the key was converted.

        same: taken over. different: taken over with a change that `note` names. dropped: without
        counterpart. inert: without effect on results.
        """
        if self.covered_by or self.recipe_keys:
            return "different" if self.note else "same"
        return "inert" if self.inert else "dropped"


@dataclass
class ImportResult:
    """The result of an import."""

    peer: Peer
    method: str
    items: list[Item]
    flat: dict[str, Any]  # the recipe by dotted key
    null_keys: list[str] = field(default_factory=list)  # the peer's keys that the file sets to null
    # Keys whose values could not be resolved, each with the reason or a remedy.
    unresolved: Mapping[str, str] = field(default_factory=dict)
    # Earlier values of keys that a script sets twice.
    repeated: Mapping[str, str] = field(default_factory=dict)
    # Problems that `ratchet check` still finds in the recipe.
    problems: list[RecipeProblem] = field(default_factory=list)
    # Keys of the recipe that the file determines.
    determined: set[str] = field(
        default_factory=lambda: {"name", "algorithm.kind", "environment.kind"}
    )

    def with_status(self, status: ItemStatus) -> list[Item]:
        """Return the items with this status."""
        return [item for item in self.items if item.status == status]

    @property
    def same(self) -> list[Item]:
        return self.with_status("same")

    @property
    def different(self) -> list[Item]:
        return self.with_status("different")

    @property
    def dropped(self) -> list[Item]:
        return self.with_status("dropped")

    @property
    def inert(self) -> list[Item]:
        return self.with_status("inert")

    @property
    def chosen(self) -> dict[str, Any]:
        """Return the keys of the recipe that no key of the file determines."""
        return {key: value for key, value in self.flat.items() if key not in self.determined}

    @property
    def recipe(self) -> dict[str, Any]:
        """Return `flat` as nested sections, in the order of a hand-written recipe."""
        positions = {key: position for position, key in enumerate(SECTION_ORDER)}
        nested: dict[str, Any] = {}
        for key, value in sorted(
            self.flat.items(),
            key=lambda pair: positions.get(pair[0].partition(".")[0], len(SECTION_ORDER)),
        ):
            *sections, last = key.split(".")
            section = nested
            for name in sections:
                section = section.setdefault(name, {})
            section[last] = deepcopy(value)
        return nested


class UnconvertedTask(ConfigError):
    """The file trains on a task, or by a method, that the importer does not convert."""


def read_config(path: Path, peer: str | None = None) -> ImportResult:
    """Import a file.

    Raises ConfigError if the file can't be read, or if its keys do not tell the peer or the kind of
    training. Raises UnconvertedTask if its task has no conversion.
    """
    source = read_source(path)
    chosen_peer = PEERS[peer] if peer is not None else _detect_peer(source.values, path)
    if path.suffix not in (".sh", ".bash", ".txt") and chosen_peer.dialect != "omegaconf":
        source = read_source(path, chosen_peer.dialect)
    if chosen_peer.keep_used is not None:
        source = replace(source, values=chosen_peer.keep_used(source.values))
    explain_unsupported_task = chosen_peer.explain_unsupported_task
    problem = None if explain_unsupported_task is None else explain_unsupported_task(source.values)
    if problem is not None:
        raise UnconvertedTask(
            f"{path}: {problem} To convert its other keys, run `ratchet import` on a copy that "
            "trains on questions."
        )
    method_name = chosen_peer.detect_method(source.values)
    if not method_name:
        raise ConfigError(
            f"{path}: the kind of training can't be detected from the keys. Of {chosen_peer.title} "
            f"these are converted: {', '.join(chosen_peer.methods)}"
        )
    result = convert(chosen_peer, method_name, source)
    data_keys = {"environment", *(f"environment.{key}" for key in ("train", "hub", "preset"))}
    if not data_keys & set(result.flat):
        result.flat["environment.train"] = ["data/train.jsonl"]
    result.flat.setdefault("name", re.sub(r"[^\w.+-]+", "-", path.stem).lstrip("_.+-") or "run")
    _remove_refused(result)
    return result


def convert(peer: Peer, method_name: str, source: FlatConfig) -> ImportResult:
    """Convert a source by the table of one of the peer's methods.

    The resulting recipe is not checked yet.
    """
    method = peer.methods[method_name]
    result = ImportResult(
        peer,
        method_name,
        [],
        dict(method.fixed),
        unresolved=source.unresolved,
        repeated=source.repeated,
    )
    _apply(result, method, PeerConfig(source.values, method.defaults, path=source.path))
    return result


def _detect_peer(values: Mapping[str, Any], path: Path) -> Peer:
    ranked = sorted(PEERS.values(), key=lambda peer: peer.count_marks(values), reverse=True)
    if ranked[0].count_marks(values) == ranked[1].count_marks(values):
        raise ConfigError(
            f"{path}: the library can't be detected from the keys: add --from with one of "
            f"{', '.join(PEERS)}"
        )
    return ranked[0]


def _apply(result: ImportResult, method: Method, config: PeerConfig) -> None:
    """Apply the rows in the table's order, so that later rows override earlier ones."""
    positions = {row.peer_key: position for position, row in enumerate(method.rows)}
    keys = [(key, value, method.find_row(key), False) for key, value in config.values.items()]
    keys += [
        (key, value, method.find_row(key), True)
        for key, value in config.defaults.items()
        if key not in config.values
    ]
    conversion_log = ConversionLog()
    setter_by_recipe_key: dict[str, str] = {}
    for key, value, row, is_default in sorted(
        keys, key=lambda entry: positions[entry[2].peer_key] if entry[2] else -1
    ):
        item: Item | None = None
        if row is None and value is not None:
            reason = UNKNOWN_NOTE.format(title=result.peer.title, version=result.peer.version)
            item = Item(key, value, {}, reason)
        elif value is None and (row is None or row.null is ABSENT):
            result.null_keys += [] if is_default else [key]
        elif row is not None:
            config.read_keys.clear()
            item = _convert_key(row, key, value, config, is_default)
            if row.convert is not None and item.recipe_keys:
                conversion_log.add(key, row.convert, value, config.read_keys)
        if item is None or (is_default and not (item.recipe_keys or item.covered_by)):
            continue
        result.items.append(item)
        for name, content in item.recipe_keys.items():
            set_recipe_key(result.flat, name, content)
            setter_by_recipe_key[name] = key
        result.determined |= set(item.recipe_keys)
    _correct_items(result, conversion_log, setter_by_recipe_key, config)


def _convert_key(row: KeyRow, key: str, value: Any, config: PeerConfig, is_default: bool) -> Item:
    """Return the result for one key: converted by its row, or with the reason why it is not."""
    if value is None:
        return Item(key, None, {row.recipe_key: row.null}, row.note, is_default)
    if not (row.covered_by or row.recipe_key or row.convert):
        return Item(key, value, {}, row.note, is_default, inert=row.inert)
    try:
        result = value if row.convert is None else row.convert(value, config)
    except InvalidValue as error:
        result = Dropped(str(error))
    except (ArithmeticError, AttributeError, IndexError, KeyError, TypeError, ValueError):
        result = Dropped(
            "does not have the expected form: set its counterpart by hand"
            + (f" ({row.recipe_key})" if row.recipe_key else "")
        )
    if row.covered_by:
        unused = result.reason if isinstance(result, Inert) else ""
        return Item(key, value, {}, "", is_default, row.covered_by, unused_note=unused)
    if isinstance(result, Dropped | Inert):
        return Item(key, value, {}, result.reason, is_default, inert=isinstance(result, Inert))
    if isinstance(result, Values):
        return Item(key, value, result.values, result.note or row.note, is_default)
    return Item(key, value, {row.recipe_key: result}, row.note, is_default)


def set_recipe_key(flat: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key in a flat recipe.

    The new value replaces keys below it and scalars above it. If a section above it is set, the key
    is set in a copy of that section.
    """
    for name in list(flat):
        if name.startswith(f"{key}.") or (
            key.startswith(f"{name}.") and not isinstance(flat[name], dict)
        ):
            del flat[name]
    parent = next((name for name in flat if key.startswith(f"{name}.")), None)
    if parent is None:
        flat[key] = value
        return
    *sections, last = key.removeprefix(f"{parent}.").split(".")
    section = flat[parent] = deepcopy(flat[parent])
    for name in sections:
        section = section.setdefault(name, {})
    section[last] = value


# --- correct the items after the recipe is complete


def _correct_items(
    result: ImportResult,
    conversion_log: ConversionLog,
    setter_by_recipe_key: Mapping[str, str],
    config: PeerConfig,
) -> None:
    """Correct items whose recipe keys a later key has set anew, or whose value wasn't used."""
    recipe = result.recipe
    items = [_drop_overridden(item, recipe, setter_by_recipe_key) for item in result.items]
    item_by_key = {item.peer_key: item for item in items}
    items = [
        item if item.is_default else _drop_unused(item, item_by_key, conversion_log, config)
        for item in items
    ]
    result.items = [item for item in items if not item.is_default or item.recipe_keys]


def _drop_overridden(
    item: Item, recipe: Mapping[str, Any], setter_by_recipe_key: Mapping[str, str]
) -> Item:
    """Return the item without the recipe keys that a later key set to another value."""
    overridden = [
        key for key, value in item.recipe_keys.items() if not _has_value(recipe, key, value)
    ]
    if not overridden:
        return item
    # The overriding key set the same key of the recipe, or a section above it.
    setting_keys = {
        key: setter_by_recipe_key.get(key)
        or next(
            (setter for name, setter in setter_by_recipe_key.items() if key.startswith(f"{name}.")),
            "",
        )
        for key in overridden
    }
    reason = "; ".join(
        f"{key} is overridden by {setting_keys[key] or 'another key'}" for key in overridden
    )
    remaining_keys = {
        key: value for key, value in item.recipe_keys.items() if key not in overridden
    }
    return replace(
        item, recipe_keys=remaining_keys, note="; ".join(filter(None, [item.note, reason]))
    )


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
    item: Item, item_by_key: Mapping[str, Item], conversion_log: ConversionLog, config: PeerConfig
) -> Item:
    """Return the item, corrected if its own conversion did not use its value.

    The corrected item names the key whose conversion used the value, or why the value isn't taken
    over.
    """
    if not item.covered_by and item.peer_key not in conversion_log.conversion_by_key:
        return item
    using_keys = [
        peer_key
        for peer_key in conversion_log.find_users(item.peer_key, config)
        if item_by_key[peer_key].recipe_keys
    ]
    if item.peer_key in using_keys:
        return item
    if using_keys:
        return replace(
            item,
            recipe_keys={},
            note="" if item.covered_by else item.note,
            covered_by=using_keys[0],
        )
    if not item.covered_by and list(item.recipe_keys.values()) == [item.value]:
        return replace(item, recipe_keys={}, note="other keys set the same value", inert=True)
    if not item.covered_by:
        reason = f"it is not taken over: {', '.join(item.recipe_keys)} does not depend on it"
        return replace(item, recipe_keys={}, note="; ".join(filter(None, [item.note, reason])))
    if item.unused_note:
        return replace(item, covered_by="", note=item.unused_note, inert=True)
    main = item_by_key.get(_get_main_key(item))
    if main is None:
        return replace(
            item,
            covered_by="",
            note=f"it counts only with {_get_main_key(item)}, which the file doesn't set",
            inert=True,
        )
    if main.recipe_keys:
        return replace(
            item,
            covered_by="",
            note=f"it is not taken over: {main.peer_key}={main.value} was converted without it",
        )
    return replace(item, covered_by="", note=f"{main.peer_key}: {main.note}", inert=main.inert)


def _get_main_key(item: Item) -> str:
    """Return `item.covered_by`. A pattern with `*` becomes the key in the item's own section."""
    if "*" not in item.covered_by:
        return item.covered_by
    return f"{item.peer_key.rpartition('.')[0]}.{item.covered_by.rpartition('.')[2]}"


# --- remove keys that `ratchet check` refuses


def _remove_refused(result: ImportResult) -> None:
    """Remove the keys that `ratchet check` refuses, and add the reasons to their items.

    Problems of keys that the peer didn't set stay in `result.problems`.
    """
    _add_served_rank(result)
    for _ in range(len(result.flat)):
        result.problems = list(_find_problems(result.recipe))
        if not result.problems:
            return
        removable = next(
            (
                (key, problem)
                for problem in result.problems
                if (key := _find_imported_key(result, problem.origin.path))
            ),
            None,
        )
        if removable is None:
            return
        key, problem = removable
        del result.flat[key]
        result.items = [_drop_key(item, key, problem.message) for item in result.items]


def _add_served_rank(result: ImportResult) -> None:
    """Set vLLM's lora_rank to the rank of the adapter, which the peer's file gives only once."""
    recipe = result.recipe
    rank = (recipe.get("lora") or {}).get("rank")
    generator, path = recipe.get("generator") or {}, "generator"
    if generator.get("kind") == "workers":
        generator, path = generator.get("worker") or {}, "generator.worker"
    if isinstance(rank, int) and generator.get("kind") == "vllm" and "lora_rank" not in generator:
        set_recipe_key(result.flat, f"{path}.lora_rank", rank)


def _find_imported_key(result: ImportResult, path: str) -> str | None:
    """Return the recipe's key at or above a problem's path, if a key of the peer set it."""
    keys = (key for item in result.items for key in item.recipe_keys if key in result.flat)
    return next((key for key in keys if path == key or path.startswith(f"{key}.")), None)


def _drop_key(item: Item, key: str, message: str) -> Item:
    if key not in item.recipe_keys:
        return item
    remaining_keys = {name: value for name, value in item.recipe_keys.items() if name != key}
    return replace(
        item,
        recipe_keys=remaining_keys,
        note="; ".join(filter(None, [item.note, f"{key} was left out: {message}"])),
    )


def _find_problems(recipe: Mapping[str, Any]) -> Iterator[RecipeProblem]:
    problems: list[RecipeProblem] = []
    tree = expand(read_text(write_text(recipe), "the recipe")[0], problems)
    try:
        config = RunConfig.model_validate(tree.plain())
    except ValidationError as error:
        yield from [*problems, *explain_validation_error(error, tree, RunConfig)]
        return
    yield from problems
    for conflict in conflicts(config):
        located = [locate(tree, key) for key in conflict.keys]
        # The problem is reported at the first key that the recipe has. Other keys may be defaults.
        node = next((node for node, missing in located if not missing), located[0][0])
        yield RecipeProblem(node.origin, conflict.message)
