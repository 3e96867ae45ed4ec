"""Recipe sections of algorithms that learn from pairs of answers, or from good and bad labels."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from ratchet.algorithms.config.base import AlgorithmConfig, Source

LOSSES = "ratchet.algorithms.losses.preference"

Beta = Annotated[
    float,
    Field(gt=0, description="Strength of the pull towards the reference: the smaller, the looser."),
]
SFTCoef = Annotated[
    float,
    Field(ge=0, description="Weight of the likelihood of the chosen answers beside the loss."),
]
Normalize = Annotated[
    Literal["sum", "mean"],
    Field(description="The log-ratio of an answer: the sum over its tokens, or their mean."),
]


class PreferenceConfig(AlgorithmConfig):
    """A preference loss on pairs.

    function: the loss, which gets the section's own keys as arguments.
    needs_reference: True if the loss reads log-probabilities of the model at the stage's start.
    """

    builds: ClassVar[str] = "ratchet.algorithms.preference:build_pairs"
    source: ClassVar[Source] = "pairs"
    function: ClassVar[str]
    needs_reference: ClassVar[bool] = True

    sft_coef: SFTCoef = 0.0


class DPOConfig(PreferenceConfig):
    """Direct preference optimisation (arXiv:2305.18290)."""

    function: ClassVar[str] = f"{LOSSES}:dpo"

    beta: Beta = 0.1
    label_smoothing: float = Field(
        default=0.0,
        ge=0,
        lt=0.5,
        description="Share of pairs taken to be the wrong way round (cDPO).",
    )
    normalize: Normalize = "sum"


class IPOConfig(PreferenceConfig):
    """Identity preference optimisation (arXiv:2310.12036)."""

    function: ClassVar[str] = f"{LOSSES}:ipo"

    beta: Beta = 0.1
    normalize: Normalize = "mean"


class RPOConfig(PreferenceConfig):
    """Reward-aware preference optimisation (arXiv:2406.11704).

    The environment's pairs must carry rewards.
    """

    function: ClassVar[str] = f"{LOSSES}:rpo"

    beta: Beta = 0.1
    eta: float = Field(default=1.0, gt=0, description="Factor on the difference of rewards.")
    normalize: Normalize = "sum"


class SimPOConfig(PreferenceConfig):
    """Simple preference optimisation, without a reference (arXiv:2405.14734)."""

    function: ClassVar[str] = f"{LOSSES}:simpo"
    needs_reference: ClassVar[bool] = False

    beta: float = Field(default=2.0, gt=0, description="Factor on the mean log-probabilities.")
    gamma: float = Field(
        default=1.0, ge=0, description="Margin that the chosen answer must win by."
    )


class ORPOConfig(PreferenceConfig):
    """Odds ratio preference optimisation, without a reference (arXiv:2403.07691)."""

    function: ClassVar[str] = f"{LOSSES}:odds_ratio"
    needs_reference: ClassVar[bool] = False

    sft_coef: SFTCoef = 1.0
    odds_coef: float = Field(
        default=0.1, gt=0, description="Weight of the odds ratio beside it (the paper's lambda)."
    )


class KTOConfig(AlgorithmConfig):
    """Kahneman-Tversky optimisation: answers labelled good or bad (arXiv:2402.01306)."""

    builds: ClassVar[str] = "ratchet.algorithms.preference:build_kto"
    source: ClassVar[Source] = "labelled"
    # Each row comes with the answer to another prompt.
    reference_rows: ClassVar[bool] = True

    beta: Beta = 0.1
    desirable: float = Field(default=1.0, gt=0, description="Weight of good answers.")
    undesirable: float = Field(default=1.0, gt=0, description="Weight of bad answers.")
