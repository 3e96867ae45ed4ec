"""Sections of knowledge distillation: a KL or similar divergence between teacher and student."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from ratchet.algorithms.config.base import AlgorithmConfig, Teachers, list_teacher_paths
from ratchet.algorithms.config.sft import Train
from ratchet.config.experience import Temperature
from ratchet.config.sections import Source
from ratchet.types import TrainedTokens

Objective = Annotated[
    Literal["forward", "reverse", "js", "skewed_forward", "skewed_reverse", "mixed", "adaptive"],
    Field(
        description="Divergence to minimise. forward: KL(teacher || student); reverse: "
        "KL(student || teacher); js: Jensen-Shannon; skewed_forward and skewed_reverse: KL to a "
        "mixture of both; mixed: weighted sum of forward and reverse; adaptive: this sum with a "
        "weight for each token, by where student and teacher differ (AKL)."
    ),
]
# The objectives that read `mix`.
OBJECTIVES_WITH_MIX = ("js", "skewed_forward", "skewed_reverse", "mixed", "adaptive")


class DistillationConfig(AlgorithmConfig):
    """The base class of off-policy and on-policy distillation by divergence."""

    builds: ClassVar[str] = "ratchet.algorithms.distillation:build"

    teacher: Teachers
    """Directory of the teacher's model, or a directory for each task tag, or a list of several
    teachers ({path: ..., weight: 0.5}) whose losses are summed."""
    teacher_tokens: Literal["same", "aligned"] = "same"
    """same: each teacher has the policy's tokenizer. aligned: teachers may have other tokenizers,
    so the text is tokenised again for them, and the likelihoods of common text spans are compared
    (ALM)."""
    span_temperature: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """With teacher_tokens=aligned: the likelihoods of spans are compared to the power of 1 /
    span_temperature. Above 1, unlikely spans count more."""
    objective: Objective = "forward"
    mix: float | None = Field(default=None, gt=0, lt=1)
    """js and skewed_forward: share of the teacher in the mixture. skewed_reverse: share of the
    student in the mixture. mixed: weight of the forward KL. adaptive: total probability of the
    teacher's likeliest tokens, whose differences weigh the forward KL. null: 0.5."""
    top_k: int | None = Field(default=64, ge=1)
    """Number of the teacher's likeliest tokens to compare; all other tokens count as one outcome.
    null: compare the whole vocabulary (use only if it is small)."""
    teacher_temperature: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Factor on the softmax temperature of the teacher alone. Above 1 its distribution is softer
    than the student's."""
    token_clip: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Highest divergence of a token; a token above it has no gradient. null: no clip."""

    @property
    def reads_reward(self) -> bool:
        return False

    @property
    def teacher_paths(self) -> tuple[str, ...]:
        return list_teacher_paths(self.teacher)

    @property
    def tau(self) -> float:
        """The softmax temperature of tokens that no sampler wrote.

        Sampled tokens use their sampling temperature.
        """
        return 1.0

    @property
    def trained_tokens(self) -> TrainedTokens:
        """The tokens of a demonstration on which teacher and student are compared."""
        return "all"

    @property
    def likelihood_coef(self) -> float:
        """The weight of an added SFT loss on the tokens that train."""
        return 0.0

    def check_keys(self) -> None:
        self._check_teachers()
        if self.mix is not None and self.objective not in OBJECTIVES_WITH_MIX:
            raise ValueError(
                f"mix is not read with objective={self.objective}: remove mix, or set objective to "
                f"one of {', '.join(OBJECTIVES_WITH_MIX)}"
            )

    def _check_teachers(self) -> None:
        """Raise ValueError for a repeated teacher, and for keys that `teacher_tokens` rules out."""
        if isinstance(self.teacher, tuple):
            paths = self.teacher_paths
            repeated = next((path for path in paths if paths.count(path) > 1), None)
            if repeated is not None:
                raise ValueError(f"two teachers are {repeated}: give it once, with one weight")
            if self.teacher_tokens == "same" and self.top_k is not None:
                raise ValueError(
                    "each of several teachers has its own likeliest tokens, but a batch has one "
                    "list: set top_k=null to compare the whole vocabulary, or "
                    "teacher_tokens=aligned"
                )
        if self.teacher_tokens == "same":
            if "span_temperature" in self.changed:
                raise ValueError(
                    "span_temperature is not read with teacher_tokens=same: remove it, or set "
                    "teacher_tokens=aligned"
                )
            return
        keys = ("objective", "mix", "top_k", "teacher_temperature", "token_clip")
        unread = next((key for key in keys if key in self.changed), None)
        if unread is not None:
            raise ValueError(
                f"{unread} compares distributions over tokens, and teacher_tokens=aligned compares "
                f"likelihoods of text: remove {unread}"
            )


class OffPolicyDistillationConfig(DistillationConfig):
    """Off-policy distillation: on the environment's demonstrations."""

    source: ClassVar[Source] = "rows"

    train: Train = "all"
    temperature: Temperature = Field(default=1.0, gt=0)
    """Softmax temperature of both teacher and student."""
    sft_coef: float = Field(default=0.0, ge=0)
    """Weight of an added SFT loss (NLL, cross-entropy) on the demonstrations."""

    @property
    def tau(self) -> float:
        return self.temperature

    @property
    def trained_tokens(self) -> TrainedTokens:
        return self.train

    @property
    def likelihood_coef(self) -> float:
        return self.sft_coef

    def check_keys(self) -> None:
        super().check_keys()
        if self.sft_coef and self.temperature != 1:
            raise ValueError(
                f"sft_coef={self.sft_coef:g} adds an SFT loss, which needs temperature 1, but "
                f"temperature={self.temperature:g} applies to both losses: set temperature=1, or "
                "sft_coef=0"
            )


class DivergenceOnPolicyConfig(DistillationConfig):
    """Distillation by divergence on the student's own attempts (GKD, arXiv:2306.13649).

    The softmax temperature of teacher and student is the sampling temperature.
    """

    source: ClassVar[Source] = "rollouts"

    objective: Objective = "reverse"
    group_size: int = Field(default=1, ge=1)
    """Attempts at each prompt."""

    @property
    def n_attempts(self) -> int:
        return self.group_size
