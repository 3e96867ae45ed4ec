"""Sections of distillation by divergence, over the vocabulary or the teacher's top-k tokens."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from ratchet.algorithms.config.base import AlgorithmConfig, Source, Teacher
from ratchet.config.experience import Temperature

Objective = Annotated[
    Literal["forward", "reverse", "js", "skewed_forward", "skewed_reverse", "mixed"],
    Field(description="KL(teacher || student), KL(student || teacher), or what lies between."),
]
MIXED = ("js", "skewed_forward", "skewed_reverse", "mixed")


class DistillationConfig(AlgorithmConfig):
    """The base class of off-policy and on-policy distillation by divergence."""

    builds: ClassVar[str] = "ratchet.algorithms.distillation:build"

    teacher: Teacher = Field(description="Directory of the teacher's model, or one by task tag.")
    objective: Objective = "forward"
    mix: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="Share of the teacher in js and skewed ones, of forward in mixed; null: 0.5.",
    )
    top_k: int | None = Field(
        default=64,
        ge=1,
        description="Teacher's likeliest tokens compared, and any other; null: the whole "
        "vocabulary, if small.",
    )

    @property
    def reads_reward(self) -> bool:
        return False

    @property
    def tau(self) -> float:
        """The softmax temperature for given text, which has no sampling temperature."""
        return 1.0

    @model_validator(mode="after")
    def _keys_agree(self) -> DistillationConfig:
        if self.mix is not None and self.objective not in MIXED:
            raise ValueError(
                f"mix is not read with objective={self.objective}: set objective to "
                f"{', '.join(MIXED)}, or remove mix"
            )
        return self


class OffPolicyDistillationConfig(DistillationConfig):
    """Distillation on given text: the environment's demonstrations."""

    source: ClassVar[Source] = "rows"

    temperature: Temperature = Field(
        default=1.0, gt=0, description="Both softmaxes are taken at this temperature."
    )

    @property
    def tau(self) -> float:
        return self.temperature


class DivergenceOnPolicyConfig(DistillationConfig):
    """Distillation on the student's own attempts (GKD, arXiv:2306.13649).

    Both softmaxes are taken at the sampling temperature.
    """

    source: ClassVar[Source] = "rollouts"

    objective: Objective = "reverse"
    group_size: int = Field(default=1, ge=1, description="Attempts at each prompt.")
