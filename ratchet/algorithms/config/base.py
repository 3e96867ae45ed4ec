"""What the sections of all algorithms share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, SerializeAsAny, model_validator

from ratchet.config.base import Section

Source = Literal["rows", "pairs", "labelled", "steps", "rollouts"]
Chosen = SerializeAsAny[Section]
# directory of a model; or one by task tag
Teacher = str | Annotated[dict[str, str], Field(min_length=1)]


class AlgorithmConfig(Section):
    """`source`: what the algorithm learns from: "rows" of given text, "pairs" of better and worse
    answers, "labelled" answers, answers with labelled "steps", or "rollouts" (attempts of its
    own)."""

    source: ClassVar[Source]

    @property
    def called(self) -> str:
        """Its kind; for a section made in Python, the name of its class."""
        return str(getattr(self, "kind", type(self).__name__.removesuffix("Config").lower()))

    @property
    def reads_reward(self) -> bool:
        """Whether anything learned depends on rewards; else attempts need none."""
        return True

    minibatches: int = Field(
        default=1, ge=1, description="Optimizer steps that a batch is split into."
    )
    epochs: int = Field(default=1, ge=1, description="Times that a batch is gone through.")

    @model_validator(mode="before")
    @classmethod
    def _complete_parts(cls, values: Any) -> Any:
        """A part given without its kind is of the algorithm's own kind, and keeps what it doesn't
        say."""
        if not isinstance(values, Mapping):
            return values
        given = dict(values)
        for name, value in given.items():
            default = cls.model_fields[name].default if name in cls.model_fields else None
            if isinstance(default, Section) and isinstance(value, Mapping):
                kind = getattr(default, "kind", None)
                if value.get("kind", kind) == kind:
                    given[name] = {**dict(default), **value}
        return given


class Part(Section):
    """A pure function with options: `function` ("module:name") is what the keys are handed to.

    reads: columns and attempts that it needs, beyond what every batch has. exempt: properties (see
    `ratchet.algorithms.properties`) that an algorithm with this part does not have, with the
    reason.
    """

    builds: ClassVar[str] = "ratchet.algorithms.config_binding:bind"
    function: ClassVar[str]
    reads: ClassVar[frozenset[str]] = frozenset()
    exempt: ClassVar[Mapping[str, str]] = {}
