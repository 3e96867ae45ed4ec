"""The section of supervised fine-tuning."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from ratchet.algorithms.config.base import AlgorithmConfig, Source


class SFTConfig(AlgorithmConfig):
    """Supervised fine-tuning on the environment's demonstrations."""

    builds: ClassVar[str] = "ratchet.algorithms.sft:build_sft"
    source: ClassVar[Source] = "rows"

    train: Literal["all", "last"] = Field(
        default="all", description="Assistant messages that train: every one, or the last alone."
    )
    weighting: Literal["token_mean", "sequence_mean"] = Field(
        default="token_mean",
        description="Unit that weighs the same within an optimizer step: each token, or each row.",
    )
