"""The base classes of the algorithms' sections and of their parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, SerializeAsAny, model_validator

from ratchet.config.base import Section

Source = Literal["rows", "pairs", "labelled", "steps", "rollouts"]
AnySection = SerializeAsAny[Section]
# Directory of a model, or one directory for each task tag.
Teacher = str | Annotated[dict[str, str], Field(min_length=1)]


class AlgorithmConfig(Section):
    """The base class of the algorithms' sections.

    source: what the algorithm learns from: "rows" of given text, "pairs" of better and worse
    answers, "labelled" answers, answers with labelled "steps", or "rollouts" (its own attempts).
    """

    source: ClassVar[Source]

    @property
    def display_name(self) -> str:
        """The section's kind; for a section made in Python, the name of its class."""
        return str(getattr(self, "kind", type(self).__name__.removesuffix("Config").lower()))

    @property
    def reads_reward(self) -> bool:
        """True if anything learned depends on rewards; else attempts need none."""
        return True

    minibatches: int = Field(
        default=1, ge=1, description="Optimizer steps that a batch is split into."
    )
    epochs: int = Field(default=1, ge=1, description="Times that a batch is gone through.")

    @model_validator(mode="before")
    @classmethod
    def _complete_parts(cls, values: Any) -> Any:
        """Complete a part without `kind` with the algorithm's default for it.

        Such a part has the default's kind, and keeps the default's other keys.
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

    function: the function ("module:name") that gets the section's keys.
    reads: columns and attempts that it needs beyond those that every batch has.
    exempt: properties (see `ratchet.algorithms.properties`) that an algorithm with this part does
      not have, with the reason.
    """

    builds: ClassVar[str] = "ratchet.algorithms.config_binding:bind"
    function: ClassVar[str]
    reads: ClassVar[frozenset[str]] = frozenset()
    exempt: ClassVar[Mapping[str, str]] = {}
