"""List every key of a recipe with its values, default and meaning, read from the sections."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from ratchet.commands.help.json_schema import describe_schema, get_key_schemas
from ratchet.config.base import Section
from ratchet.config.key_paths import STAGES, find_section, find_slot, get_default
from ratchet.config.registry import KINDS
from ratchet.config.resolve import SLOT_FIELDS, section_class
from ratchet.config.schema import RunConfig, StageConfig
from ratchet.config.yaml_tree import write_flow


@dataclass(frozen=True)
class KeyEntry:
    """One key of one section class, and the kinds of the enclosing section that have it."""

    path: str  # as a recipe writes it, without the stage: optimizer.lr
    kinds: tuple[str, ...]  # empty for a section without kinds
    section: type[Section]

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def description(self) -> str:
        """Return the key's description; for an inner section, the first line of its docstring."""
        inner = find_section(self.section.model_fields[self.name].annotation)
        own_text = self.section.describe_field(self.name)
        return own_text or (summarize(inner) if inner is not None else "")

    @property
    def values(self) -> str:
        """Return the values that the key may have, in words."""
        field = self.section.model_fields[self.name]
        slot = find_slot(field)
        if slot is None:
            return describe_schema(get_key_schemas(self.section)[self.name])
        section = f"{'list of sections' if slot.is_list else 'section'} with a kind"
        return section + (" or null" if slot.is_optional else "")

    @property
    def default(self) -> str:
        """Return the default as YAML writes it.

        It is "" for a required key, for a default that depends on other keys, and for a section
        whose keys all have their own defaults.
        """
        try:
            default = get_default(self.section.model_fields[self.name])
        except LookupError:
            return ""
        plain = _to_plain(default)
        return "" if isinstance(default, Section) and not plain else write_flow(plain)


def list_entries() -> list[KeyEntry]:
    """Return each key of each section class, at the first path where it occurs.

    Entries that differ only in the kind of their section are merged.
    """
    entry_by_identity: dict[tuple[str, ...], KeyEntry] = {}
    for entry in _walk_all():
        identity = (entry.path, entry.values, entry.default, entry.description)
        earlier_entry = entry_by_identity.get(identity)
        kinds = dict.fromkeys([*(earlier_entry.kinds if earlier_entry else ()), *entry.kinds])
        entry_by_identity[identity] = KeyEntry(entry.path, tuple(kinds), entry.section)
    return list(entry_by_identity.values())


def _walk_all() -> Iterator[KeyEntry]:
    walked_kinds: set[tuple[str, str]] = set()  # (import path, kind) of sections with a kind
    yield from _walk_section(RunConfig, "", (), walked_kinds)
    yield from _walk_section(StageConfig, "", (), walked_kinds)


def _walk_section(
    section: type[Section], prefix: str, kinds: tuple[str, ...], walked_kinds: set[tuple[str, str]]
) -> Iterator[KeyEntry]:
    for name, field in section.model_fields.items():
        if name == "kind" or name == STAGES:
            continue
        path = f"{prefix}{name}"
        yield KeyEntry(path, kinds, section)
        slot, inner = find_slot(field), find_section(field.annotation)
        if slot is not None:
            yield from _walk_kinds(slot.name, path, walked_kinds)
        elif inner is not None:
            yield from _walk_section(inner, f"{path}.", kinds, walked_kinds)


def _walk_kinds(slot: str, path: str, walked_kinds: set[tuple[str, str]]) -> Iterator[KeyEntry]:
    for kind, target in KINDS[slot].items():
        section = section_class(slot, kind)
        if (target, kind) not in walked_kinds:
            walked_kinds.add((target, kind))
            yield from _walk_section(section, f"{path}.", (kind,), walked_kinds)
        # The kind's keys were yielded under another slot; this slot may add keys of its own.
        else:
            for added_key in SLOT_FIELDS.get(slot, ()):
                yield KeyEntry(f"{path}.{added_key}", (kind,), section)


def summarize(section: type[Section]) -> str:
    """Return the first paragraph of a section's docstring."""
    return " ".join(inspect.cleandoc(section.__doc__ or "").split("\n\n")[0].split())


def _to_plain(value: object) -> object:
    """Return a value as plain data. A section becomes its kind and its changed keys."""
    if isinstance(value, Section):
        return _list_changed_keys(value)
    return [_to_plain(item) for item in value] if isinstance(value, tuple | list) else value


def _list_changed_keys(section: Section) -> dict[str, object]:
    changed_values: dict[str, object] = {}
    if section.kind_name:
        changed_values["kind"] = section.kind_name
    for key, field in sorted(type(section).model_fields.items()):
        value = _to_plain(getattr(section, key))
        with suppress(LookupError):
            # Plain values are compared, because a section's class may have been created again.
            if value == _to_plain(get_default(field)):
                continue
        changed_values.setdefault(key, value)
    return changed_values
