"""The section of supervised fine-tuning."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from ratchet.algorithms.config.base import AlgorithmConfig
from ratchet.config.sections import Source


class SFTConfig(AlgorithmConfig):
    """Supervised fine-tuning on the environment's demonstrations."""

    builds: ClassVar[str] = "ratchet.algorithms.sft:build_sft"
    source: ClassVar[Source] = "rows"

    train: Literal["all", "last"] = Field(
        default="all", description="Assistant messages that train: all of them, or only the last."
    )
    weighting: Literal["token_mean", "sequence_mean"] = Field(
        default="token_mean",
        description="Loss aggregation over an optimizer step: every token has the same weight, or "
        "every row has.",
    )
