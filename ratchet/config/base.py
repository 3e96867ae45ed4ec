"""The base of every configuration section: frozen, and strict about its keys and types."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

# The upper bound of whole numbers in fields that declare none.
LARGEST_WHOLE = 2**31 - 1


class Section(BaseModel):
    """One section of a recipe. An unknown key is an error that names the nearest known one.

    Sections never import torch. The string below a field states the field's meaning and unit.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=()
    )

    builds: ClassVar[str] = ""
    """The "module:callable" that `ratchet.training.build` calls with a section chosen by `kind:`.
    It is text, so that only the backend that a run uses is imported. A section without it is built
    by the class or function that its kind names."""
    calls_model: ClassVar[bool] = False
    """True if the object that the section builds calls a service or loads a model."""

    @property
    def kind_name(self) -> str:
        """Return the section's `kind`; "" if it has none, because it was made in Python."""
        return str(dict(self).get("kind", ""))

    @property
    def metric_name(self) -> str:
        """Return the part's name in metrics: its kind, and of an import path the last part."""
        return self.kind_name.rpartition(":")[2]

    def list_data_files(self) -> list[Path]:
        """Return the files that the section and its subsections name, in order.

        A section with file patterns or directories overrides it.
        """
        return _list_files(dict(self))

    @property
    def changed(self) -> frozenset[str]:
        """Return the keys whose value is not the default.

        Which keys a user wrote is not known, because a saved recipe names every key.
        """
        fields = type(self).model_fields
        return frozenset(
            name for name, field in fields.items() if getattr(self, name) != field.default
        )

    @classmethod
    def describe_field(cls, name: str) -> str:
        """Return a field's meaning: its `description`, or the string below it; "" without both."""
        texts = (_read_field_docs(base).get(name) for base in cls.__mro__)
        return cls.model_fields[name].description or next(filter(None, texts), "")

    @model_validator(mode="after")
    def _run_check_keys(self) -> Self:
        self.check_keys()
        return self

    def check_keys(self) -> None:
        """Raise ValueError if keys contradict each other, or if one that is set has no effect."""

    @field_validator("*", mode="before")
    @classmethod
    def _check_yaml_types(cls, value: Any, info: ValidationInfo) -> Any:
        """Raise for values whose YAML type is wrong, such as `true` or "5" in a field of numbers.

        Pydantic would convert them to 1 and 5 and hide the mistake.
        """
        if info.field_name is not None:
            field = cls.model_fields[info.field_name]
            _refuse_non_numbers(field.annotation, value)
            has_upper_bound = any(
                hasattr(bound, "le") or hasattr(bound, "lt") for bound in field.metadata
            )
            if not has_upper_bound:
                _refuse_huge(field.annotation, value)
        return value


def _read_field_docs(section: type) -> Mapping[str, str]:
    """Return the strings below the fields of a class, without those of its bases."""
    return _read_module_docs(section.__module__).get(section.__name__, {})


@cache
def _read_module_docs(name: str) -> Mapping[str, Mapping[str, str]]:
    """Return the strings below the fields of a module's classes, by class and field.

    Pydantic reads them too (`use_attribute_docstrings`), but for each class when it is created,
    which more than doubles the time to import `ratchet.config.schema`.
    """
    try:
        tree = ast.parse(inspect.getsource(sys.modules[name]))
    except (KeyError, OSError, TypeError):
        return {}
    return {
        node.name: dict(_iterate_field_docs(node))
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }


def _iterate_field_docs(class_node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for statement, next_statement in pairwise(class_node.body):
        match statement, next_statement:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                yield name, " ".join(text.split())


def _list_files(value: object) -> list[Path]:
    if isinstance(value, Path):
        return [value] if value.is_file() else []
    if isinstance(value, Section):
        return value.list_data_files()
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, list | tuple):
        return []
    return [path for part in value for path in _list_files(part)]


def _refuse_non_numbers(annotation: Any, value: Any, item_label: str = "") -> None:
    """Raise for text or a boolean in a field that takes numbers only."""
    if isinstance(value, list | tuple | dict):
        for item_annotation, item, label in _list_items(annotation, value):
            _refuse_non_numbers(item_annotation, item, label)
        return
    if not isinstance(value, bool | str):
        return
    accepted = _list_leaf_types(annotation)
    expected = "a number" if float in accepted else "a whole number"
    if accepted and accepted <= {int, float, type(None)}:
        raise PydanticCustomError(
            "not_a_number", "{item}must be {expected}", {"item": item_label, "expected": expected}
        )
    # A field that also takes words, such as "auto"
    if isinstance(value, bool) and accepted & {int, float} and bool not in accepted:
        raise PydanticCustomError(
            "not_a_number",
            "{item}must be {expected} or a word",
            {"item": item_label, "expected": expected},
        )


def _refuse_huge(annotation: Any, value: Any, item_label: str = "") -> None:
    """Raise for a whole number above `LARGEST_WHOLE`, which is too much for any loop or array."""
    if isinstance(value, list | tuple | dict):
        for item_annotation, item, label in _list_items(annotation, value):
            _refuse_huge(item_annotation, item, label)
    elif (
        isinstance(value, int | float)
        and int in _list_leaf_types(annotation)
        and abs(value) > LARGEST_WHOLE
    ):
        raise PydanticCustomError(
            "huge", "{item}must be at most {limit}", {"item": item_label, "limit": LARGEST_WHOLE}
        )


def _list_items(annotation: Any, value: Any) -> Iterator[tuple[Any, Any, str]]:
    """Yield the annotation, the value and the label of each item of a list, a tuple or a dict.

    Yields nothing if the annotation does not say what the items are.
    """
    if isinstance(value, dict):
        for item_annotation in _list_item_annotations(annotation, (dict, Mapping))[1:2]:
            for key, item in value.items():
                yield item_annotation, item, f"{key!s:.40} "
        return
    annotations = _list_item_annotations(annotation, (tuple, list))
    for index, item in enumerate(value if annotations else ()):
        yield annotations[min(index, len(annotations) - 1)], item, f"item {index} "


def _list_item_annotations(annotation: Any, origins: tuple[Any, ...]) -> list[Any]:
    """Return the annotations of the items of a tuple, list or dict, also within a union.

    A dict has those of its keys and of its values.
    """
    if get_origin(annotation) in origins:
        return [item for item in get_args(annotation) if item is not Ellipsis]
    return [item for part in get_args(annotation) for item in _list_item_annotations(part, origins)]


def _list_leaf_types(annotation: Any) -> set[Any]:
    """Return the types that an annotation accepts, through unions and Annotated.

    A Literal accepts the types of its values.
    """
    origin = get_origin(annotation)
    if origin is Literal:
        return {type(value) for value in get_args(annotation)}
    if origin is Annotated:
        return _list_leaf_types(get_args(annotation)[0])
    if origin is None or origin in (tuple, list, dict):
        return {origin or annotation}
    return set().union(*(_list_leaf_types(part) for part in get_args(annotation)))
