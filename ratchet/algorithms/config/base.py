"""The base classes of recipe sections for algorithms and for parts of algorithms."""

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

    source: the training data: "rows" of given text, "pairs" of better and worse answers, "labelled"
    answers, answers with labelled "steps", or "rollouts" (the policy's own attempts).
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
        default=1, ge=1, description="Optimizer steps that a batch is split into."
    )
    epochs: int = Field(default=1, ge=1, description="Times that a batch is gone through.")

    @model_validator(mode="before")
    @classmethod
    def _complete_parts(cls, values: Any) -> Any:
        """Fill missing keys of each part from the algorithm's default for this part.

        Only parts of the default's kind are filled; a part without `kind` gets the default's kind.
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
    reads: names of columns and attempts that it needs beyond those in every batch.
    exempt: properties (see `ratchet.algorithms.properties`) that an algorithm with this part does
      not have, each with the reason.
    """

    builds: ClassVar[str] = "ratchet.algorithms.config_binding:bind"
    function: ClassVar[str]
    reads: ClassVar[frozenset[str]] = frozenset()
    exempt: ClassVar[Mapping[str, str]] = {}
