"""Write docs/recipe.md: all keys of a recipe, a table for each section and each kind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ratchet.commands.help.entries import KeyEntry, summarize
from ratchet.config.base import Section
from ratchet.config.key_paths import STAGES, find_section, find_slot
from ratchet.config.registry import DEFAULT_KIND, KINDS
from ratchet.config.resolve import SLOT_FIELDS, section_class
from ratchet.config.schema import RunConfig, StageConfig

HEAD = """# All keys of a recipe

<!-- Made by `ratchet help --markdown > docs/recipe.md`; tests/commands/test_help.py compares. -->

A recipe is YAML. `ratchet help KEY` shows one key, `ratchet schema > recipe.schema.json` writes a
JSON schema for editors, and `ratchet check RECIPE` checks a whole recipe.

- Keys of a stage may stand at the top: then they are the default of all stages.
- A section with a kind is chosen by `kind:`, a name from its table or the import path of a class of
  your own (`my_package.module:Class`), whose parameters are then its keys.
- `extends: other.yaml` starts from another recipe, `extends: quickstart` from one that comes with
  Ratchet.
- On the command line a key is written with dots: `stages.grpo.algorithm.group_size=16`."""
TABLE_HEAD = "| Key | Values | Default | Meaning |\n|---|---|---|---|"


def make_recipe_page() -> str:
    """Return the text of docs/recipe.md."""
    page = _Page()
    blocks = [
        HEAD,
        *page.write_section("Keys of the run", "", RunConfig),
        *page.write_section("Keys of a stage", "", StageConfig),
        *page.write_rest(),
    ]
    return "\n\n".join(block for block in blocks if block) + "\n"


class _Page:
    """The state of the page: the sections and slots that are written, and those still pending."""

    def __init__(self) -> None:
        self._written: set[object] = set()
        self._kinds_written: set[tuple[str, str]] = set()
        self._pending_sections: list[tuple[str, type[Section]]] = []
        self._pending_slots: list[tuple[str, str]] = []

    def write_section(self, title: str, prefix: str, section: type[Section]) -> Iterator[str]:
        yield f"## {title}"
        yield summarize(section)
        yield self._make_table(section, prefix, list(section.model_fields))

    def write_rest(self) -> Iterator[str]:
        """Yield the pending sections and slots, in the order in which they were queued."""
        while self._pending_sections or self._pending_slots:
            if self._pending_sections:
                path, section = self._pending_sections.pop(0)
                yield from self.write_section(f"`{path}`", f"{path}.", section)
            else:
                yield from self._write_kinds(*self._pending_slots.pop(0))

    def _write_kinds(self, path: str, slot: str) -> Iterator[str]:
        """Yield a slot's kinds. A kind that an earlier slot has described is only named."""
        yield f"## `{path}`"
        default = DEFAULT_KIND.get(slot)
        yield f"The default kind is `{default}`." if default else ""
        written_kinds = [
            kind for kind, target in KINDS[slot].items() if (kind, target) in self._kinds_written
        ]
        if written_kinds:
            yield f"Kinds as above: {', '.join(f'`{kind}`' for kind in written_kinds)}."
            added_keys = list(SLOT_FIELDS.get(slot, {}))
            yield (
                self._make_table(section_class(slot, written_kinds[0]), f"{path}.", added_keys)
                if added_keys
                else ""
            )
        for kind, target in KINDS[slot].items():
            if kind in written_kinds:
                continue
            self._kinds_written.add((kind, target))
            section = section_class(slot, kind)
            parent = _find_parent(slot, kind, section)
            names = [name for name in section.model_fields if name != "kind"]
            # Keys that the slot adds (`weight` and `tag` of a reward) follow the kind's own keys.
            names.sort(key=lambda name: name in SLOT_FIELDS.get(slot, {}))
            if parent is not None:
                names = [name for name in names if _differs(name, section, parent[1])]
            yield f"### `{path}: {{kind: {kind}}}`"
            yield summarize(section)
            yield f"The keys of `{parent[0]}`{', but:' if names else '.'}" if parent else ""
            yield self._make_table(section, f"{path}.", names) if names else ""

    def _make_table(self, section: type[Section], prefix: str, names: Sequence[str]) -> str:
        rows = []
        for name in names:
            if name == STAGES:
                continue
            entry = KeyEntry(f"{prefix}{name}", (), section)
            cells = (f"`{name}`", entry.values, entry.default and f"`{entry.default}`")
            rows.append(f"| {' | '.join(_escape(cell) for cell in (*cells, entry.description))} |")
            self._queue_inner(entry)
        return "\n".join([TABLE_HEAD, *rows])

    def _queue_inner(self, entry: KeyEntry) -> None:
        field = entry.section.model_fields[entry.name]
        slot, inner = find_slot(field), find_section(field.annotation)
        if slot is not None and self._add_if_new(slot.name):
            self._pending_slots.append((entry.path, slot.name))
        elif slot is None and inner is not None and self._add_if_new(inner):
            self._pending_sections.append((entry.path, inner))

    def _add_if_new(self, section_or_slot: object) -> bool:
        is_new = section_or_slot not in self._written
        self._written.add(section_or_slot)
        return is_new


def _find_parent(slot: str, kind: str, section: type[Section]) -> tuple[str, type[Section]] | None:
    """Return the kind and class that the class of `kind` extends; None if it extends no kind."""
    other_sections = {
        other_kind: section_class(slot, other_kind)
        for other_kind in KINDS[slot]
        if other_kind != kind
    }
    # `section_class` completes some registered classes in a subclass of the same name.
    for base in section.__mro__[1:]:
        for name, other in other_sections.items():
            if base in (other, *other.__bases__) and base.__name__ == other.__name__:
                return name, other
    return None


def _differs(name: str, section: type[Section], parent: type[Section]) -> bool:
    if name not in parent.model_fields:
        return True
    entry = KeyEntry(name, (), section)
    parent_entry = KeyEntry(name, (), parent)
    return any(
        getattr(entry, attribute) != getattr(parent_entry, attribute)
        for attribute in ("values", "default")
    )


def _escape(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
