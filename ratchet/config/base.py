"""The base of every configuration section: frozen, and strict about its keys and types."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

LARGEST_WHOLE = 2**31 - 1  # of fields that state no upper bound of their own


class Section(BaseModel):
    """One section of a recipe. It needs no torch; an unknown key is an error that names the nearest
    known one.

    A section chosen by `kind:` names in `builds` ("module:callable") what `ratchet.training.build`
    calls with it, so that a driver never imports a backend that it does not run. A field's
    `description` says what it means and in which unit.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=()
    )

    builds: ClassVar[str] = ""

    @property
    def changed(self) -> frozenset[str]:
        """Return the keys whose value is not the default. (A saved recipe names every key, so the
        keys that a user wrote are not known.)"""
        fields = type(self).model_fields
        return frozenset(
            name for name, field in fields.items() if getattr(self, name) != field.default
        )

    @field_validator("*", mode="before")
    @classmethod
    def _is_what_it_looks_like(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse values whose YAML type is wrong: `true` is not 1, and "5" is not 5. Pydantic would
        convert both and hide a typing error."""
        if info.field_name is not None:
            field = cls.model_fields[info.field_name]
            _refuse_lookalikes(field.annotation, value)
            if not any(hasattr(bound, "le") or hasattr(bound, "lt") for bound in field.metadata):
                _refuse_huge(field.annotation, value)
        return value


def _refuse_lookalikes(annotation: Any, value: Any, item_of_list: str = "") -> None:
    if isinstance(value, list | tuple):
        items = _item_annotations(annotation)
        for index, item in enumerate(value if items else ()):
            _refuse_lookalikes(items[min(index, len(items) - 1)], item, f"item {index} ")
        return
    if not isinstance(value, bool | str):
        return
    accepted = _leaf_types(annotation)
    if accepted and accepted <= {int, float, type(None)}:
        expected = "a number" if float in accepted else "a whole number"
        raise PydanticCustomError(
            "not_a_number", "{which}must be {wanted}", {"which": item_of_list, "wanted": expected}
        )


def _refuse_huge(annotation: Any, value: Any, item_of_list: str = "") -> None:
    """Raise for a whole number that no count, size or index of a run has: it would cause an endless
    loop or array."""
    if isinstance(value, list | tuple):
        items = _item_annotations(annotation)
        for index, item in enumerate(value if items else ()):
            _refuse_huge(items[min(index, len(items) - 1)], item, f"item {index} ")
    elif (
        isinstance(value, int | float)
        and int in _leaf_types(annotation)
        and abs(value) > LARGEST_WHOLE
    ):
        raise PydanticCustomError(
            "huge", "{which}must be at most {most}", {"which": item_of_list, "most": LARGEST_WHOLE}
        )


def _item_annotations(annotation: Any) -> list[Any]:
    if get_origin(annotation) in (tuple, list):
        return [item for item in get_args(annotation) if item is not Ellipsis]
    return [item for part in get_args(annotation) for item in _item_annotations(part)]


def _leaf_types(annotation: Any) -> set[Any]:
    """Return the types that an annotation accepts, through unions and Annotated; a Literal counts
    as the types of its values."""
    origin = get_origin(annotation)
    if origin is Literal:
        return {type(value) for value in get_args(annotation)}
    if origin is Annotated:
        return _leaf_types(get_args(annotation)[0])
    if origin is None or origin in (tuple, list, dict):
        return {origin or annotation}
    return set().union(*(_leaf_types(part) for part in get_args(annotation)))
