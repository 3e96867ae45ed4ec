"""List the keys of the config schema, for suggestions and for the test that every key is read."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from inspect import isclass
from typing import TYPE_CHECKING, Any, get_args

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from ratchet.config.base import Section
from ratchet.config.registry import KINDS
from ratchet.config.resolve import Slot, read_kind, section_class
from ratchet.errors import ConfigError

if TYPE_CHECKING:
    from ratchet.config.yaml_tree import Node

STAGES = "stages"


@dataclass(frozen=True, slots=True)
class Key:
    """A key of the schema."""

    # The kinds of sections stand in brackets: stages.algorithm[grpo].group_size.
    path: str
    is_leaf: bool  # it holds a value, not a section

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def recipe_path(self) -> str:
        """Return the key's path in a recipe, without kinds. A stage's key stands at the top."""
        return re.sub(r"\[.*?\]", "", self.path.removeprefix(f"{STAGES}."))

    @property
    def kinds(self) -> str:
        """Return the kinds that the enclosing sections must have, outermost first."""
        return ", ".join(re.findall(r"\[(.*?)\]", self.path))


def find_slot(field: FieldInfo) -> Slot | None:
    """Return the slot of a field whose section is chosen by `kind:`; None for other fields."""
    return next((item for item in field.metadata if isinstance(item, Slot)), None)


def find_section(annotation: Any) -> type[Section] | None:
    """Return the section class in an annotation, also within a tuple, union or Annotated."""
    if isclass(annotation) and issubclass(annotation, Section):
        return annotation
    sections = (find_section(part) for part in get_args(annotation))
    return next((section for section in sections if section is not None), None)


def get_default(field: FieldInfo) -> Any:
    """Return a key's default.

    Raises LookupError for a required key, and for a default that depends on other keys.
    """
    try:
        default = field.get_default(call_default_factory=True)
    except ValueError as error:  # the factory needs the other keys
        raise LookupError("the default depends on other keys") from error
    if default is PydanticUndefined:
        raise LookupError("the key is required")
    return default


@cache
def keys(model: type[Section], prefix: str = "") -> tuple[Key, ...]:
    """Return every key below a section, including the keys of every built-in kind."""
    return tuple(_walk(model, prefix))


def _walk(model: type[Section], prefix: str) -> Iterator[Key]:
    for name, field in model.model_fields.items():
        path = f"{prefix}{name}"
        slot, inner = find_slot(field), find_section(field.annotation)
        if name == "kind":
            continue
        yield Key(path, is_leaf=inner is None)
        if slot is not None:
            for kind in KINDS[slot.name]:
                yield from _walk(section_class(slot.name, kind), f"{path}[{kind}].")
        elif inner is not None:
            yield from _walk(inner, f"{path}.")


def leaf_keys(model: type[Section]) -> tuple[str, ...]:
    """Return the path of every key that holds a value, such as "stages.optimizer[adamw].lr"."""
    return tuple(key.path for key in keys(model) if key.is_leaf)


def model_at(model: type[Section], place: Sequence[str | int], tree: Node) -> type[Section] | None:
    """Return the section class at a location; None below free-form values.

    The kind of a section, if it has kinds, is read from the tree.
    """
    current: type[Section] | None = model
    node: Node | None = tree
    slot: Slot | None = None
    for part in place:
        value = node.value if node is not None else None
        if isinstance(part, int):
            node = value[part] if isinstance(value, list) and part < len(value) else None
        elif current is None or part not in current.model_fields:
            return None
        else:
            field = current.model_fields[part]
            node = value.get(part) if isinstance(value, dict) else None
            slot, current = find_slot(field), find_section(field.annotation)
        if slot is not None and node is not None and node.is_section:
            current = _find_kind_class(slot, node)
    return current


def _find_kind_class(slot: Slot, node: Node) -> type[Section] | None:
    try:
        return section_class(slot.name, read_kind(slot.name, node.plain()))
    except ConfigError:
        return None


def list_children(model: type[Section], place: Sequence[str | int], tree: Node) -> list[str]:
    """Return the keys allowed at a location; at the top these include the keys of a stage."""
    section = model_at(model, place, tree)
    if section is None:
        return []
    names = list(section.model_fields)
    if not place and STAGES in section.model_fields:
        stage = find_section(section.model_fields[STAGES].annotation)
        assert stage is not None
        names += ["extends", *(key for key in stage.model_fields if key != "name")]
    return names
