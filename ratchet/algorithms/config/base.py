"""The base classes of recipe sections for algorithms and for parts of algorithms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field, model_validator

from ratchet.config.base import Section
from ratchet.config.sections import AlgorithmSection
from ratchet.utils.terminal_text import shorten_text


def _refuse_path_key(teacher: Any) -> Any:
    if isinstance(teacher, Mapping) and list(teacher) == ["path"]:
        raise ValueError(
            "a map names a model for each task tag, and 'path' would be a tag. Write the directory "
            f"alone: teacher={shorten_text(str(teacher['path']), 200)}"
        )
    return teacher


# Directory of a model, or one directory for each task tag.
Teacher = Annotated[
    str | Annotated[dict[str, str], Field(min_length=1)], BeforeValidator(_refuse_path_key)
]


class WeightedTeacher(Section):
    """One of several teachers, which all score every row."""

    path: str
    """Directory of the teacher's model."""
    weight: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Factor of this teacher's loss in the sum of losses; null: 1 divided by the number of
    teachers."""


# A teacher for all tasks or for each tag, or several teachers for every row.
Teachers = Annotated[
    str
    | Annotated[dict[str, str], Field(min_length=1)]
    | Annotated[tuple[WeightedTeacher, ...], Field(min_length=2)],
    BeforeValidator(_refuse_path_key),
]


def list_teacher_paths(
    teacher: str | Mapping[str, str] | Sequence[WeightedTeacher] | None,
) -> tuple[str, ...]:
    """Return the distinct model directories that a recipe's key `teacher` names."""
    if teacher is None or isinstance(teacher, str):
        return () if teacher is None else (teacher,)
    if isinstance(teacher, Mapping):
        return tuple(dict.fromkeys(teacher.values()))
    return tuple(section.path for section in teacher)


class AlgorithmConfig(AlgorithmSection):
    """The base class of the built-in algorithms' sections."""

    @property
    def display_name(self) -> str:
        """Return the section's kind, or the name of its class if the section was made in Python."""
        return self.kind_name or type(self).__name__.removesuffix("Config").lower()

    @property
    def n_minibatches(self) -> int:
        return self.minibatches

    @property
    def n_epochs(self) -> int:
        return self.epochs

    minibatches: int = Field(default=1, ge=1)
    """Mini-batches that a batch is divided into, with one optimizer step each."""
    epochs: int = Field(default=1, ge=1)
    """Passes over all mini-batches of a batch."""

    @model_validator(mode="before")
    @classmethod
    def _complete_parts(cls, values: Any) -> Any:
        """Fill missing keys of each part from the algorithm's default for this part.

        A part without `kind` gets the default's kind. Parts of another kind are not filled.
        """
        if not isinstance(values, Mapping):
            return values
        completed = dict(values)
        for name, value in completed.items():
            default = cls.model_fields[name].default if name in cls.model_fields else None
            if not isinstance(default, Section) or not isinstance(value, Mapping):
                continue
            if value.get("kind", default.kind_name) == default.kind_name:
                completed[name] = {**dict(default), **value}
        return completed


class AlgorithmPart(Section):
    """A part of an algorithm: a pure function and its options.

    function: the function ("module:name") that gets the section's keys as arguments.
    reads: what the function needs beyond the columns of every batch: names of other columns,
      "group" (several attempts in a group), "greedy" (a greedy attempt) or "parts" (named parts of
      the reward).
    exempt: properties (see `ratchet.algorithms.properties`) that an algorithm with this part does
      not have, each with the reason.
    """

    builds: ClassVar[str] = "ratchet.algorithms.config_binding:bind"
    function: ClassVar[str]
    reads: ClassVar[frozenset[str]] = frozenset()
    exempt: ClassVar[Mapping[str, str]] = {}
