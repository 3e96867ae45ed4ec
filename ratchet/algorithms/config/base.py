"""The base classes of recipe sections for algorithms and for parts of algorithms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, SerializeAsAny, model_validator

from ratchet.config.base import Section
from ratchet.utils.terminal_text import shorten_text

Source = Literal["rows", "pairs", "labelled", "steps", "rollouts"]
AnySection = SerializeAsAny[Section]


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


class AlgorithmConfig(Section):
    """The base class of the algorithms' sections.

    source: the kind of training data: "rows" (demonstrations), "pairs" (a better and a worse
      answer), "labelled" (answers with a label), "steps" (answers with a label for each step) or
      "rollouts" (attempts that the policy samples).
    """

    source: ClassVar[Source]

    @property
    def display_name(self) -> str:
        """Return the section's kind, or the name of its class if the section was made in Python."""
        return str(getattr(self, "kind", type(self).__name__.removesuffix("Config").lower()))

    @property
    def reads_reward(self) -> bool:
        """True if training depends on rewards; if False, attempts need no reward."""
        return True

    minibatches: int = Field(
        default=1,
        ge=1,
        description="Mini-batches that a batch is divided into, with one optimizer step each.",
    )
    epochs: int = Field(default=1, ge=1, description="Passes over all mini-batches of a batch.")

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
            if isinstance(default, Section) and isinstance(value, Mapping):
                kind = getattr(default, "kind", None)
                if value.get("kind", kind) == kind:
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
