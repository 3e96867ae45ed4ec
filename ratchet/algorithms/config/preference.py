"""Recipe sections of preference optimisation on pairs (DPO, ...) and on labelled answers (KTO)."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from ratchet.algorithms.config.base import AlgorithmConfig
from ratchet.config.sections import Source

LOSSES = "ratchet.algorithms.losses.preference"

Beta = Annotated[
    float,
    Field(
        gt=0,
        description="Strength of the implicit KL penalty: with a higher beta the policy stays "
        "nearer the model at the start of the stage.",
    ),
]
SFTCoef = Annotated[
    float,
    Field(ge=0, description="Weight of an added SFT loss (NLL) on the chosen answers."),
]
Normalize = Annotated[
    Literal["sum", "mean"],
    Field(description="Log-ratio of an answer: the sum, or the mean, over its tokens."),
]


class PreferenceConfig(AlgorithmConfig):
    """The base class of algorithms with a preference loss on pairs.

    function: the loss ("module:name"), which gets the section's keys as arguments.
    needs_reference: True if the loss reads log-probabilities of the reference model (the model at
      the start of the stage).
    """

    builds: ClassVar[str] = "ratchet.algorithms.preference:build_pairs"
    source: ClassVar[Source] = "pairs"
    function: ClassVar[str]
    needs_reference: ClassVar[bool] = True

    sft_coef: SFTCoef = 0.0

    @property
    def preference_coef(self) -> float:
        """Return the weight of the preference loss."""
        return 1.0


class DPOConfig(PreferenceConfig):
    """DPO, direct preference optimisation (arXiv:2305.18290)."""

    function: ClassVar[str] = f"{LOSSES}:dpo"

    beta: Beta = 0.1
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """Share of pairs assumed to be in the wrong order (conservative DPO)."""
    normalize: Normalize = "sum"


class IPOConfig(PreferenceConfig):
    """IPO, identity preference optimisation (arXiv:2310.12036)."""

    function: ClassVar[str] = f"{LOSSES}:ipo"

    beta: Beta = 0.1
    normalize: Normalize = "mean"


class RPOConfig(PreferenceConfig):
    """RPO, reward-aware preference optimisation (arXiv:2406.11704).

    The answers of the environment's pairs must have rewards.
    """

    function: ClassVar[str] = f"{LOSSES}:rpo"

    beta: Beta = 0.1
    eta: float = Field(default=1.0, gt=0)
    """Factor on the difference of rewards."""
    normalize: Normalize = "sum"


class SimPOConfig(PreferenceConfig):
    """SimPO, simple preference optimisation without a reference model (arXiv:2405.14734)."""

    function: ClassVar[str] = f"{LOSSES}:simpo"
    needs_reference: ClassVar[bool] = False

    beta: float = Field(default=2.0, gt=0)
    """Factor on the mean log-probabilities."""
    gamma: float = Field(default=1.0, ge=0)
    """Margin that the chosen answer must win by."""


class ORPOConfig(PreferenceConfig):
    """ORPO, odds ratio preference optimisation without a reference model (arXiv:2403.07691)."""

    function: ClassVar[str] = f"{LOSSES}:odds_ratio"
    needs_reference: ClassVar[bool] = False

    sft_coef: SFTCoef = 1.0
    odds_coef: float = Field(default=0.1, gt=0)
    """Weight of the odds ratio loss (the paper's lambda)."""

    @property
    def preference_coef(self) -> float:
        return self.odds_coef


class KTOConfig(AlgorithmConfig):
    """KTO, Kahneman-Tversky optimisation on answers labelled good or bad (arXiv:2402.01306)."""

    builds: ClassVar[str] = "ratchet.algorithms.preference:build_kto"
    source: ClassVar[Source] = "labelled"
    # Each row gets a second row for KTO's reference point: its prompt with the answer to another
    # prompt.
    uses_mismatched_pairs: ClassVar[bool] = True

    beta: Beta = 0.1
    desirable: float = Field(default=1.0, gt=0)
    """Weight of good answers (reward above 0)."""
    undesirable: float = Field(default=1.0, gt=0)
    """Weight of bad answers (all other rewards)."""
