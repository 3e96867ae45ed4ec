"""The section of supervised fine-tuning."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from ratchet.algorithms.config.base import AlgorithmConfig
from ratchet.config.sections import Source
from ratchet.types import TrainedTokens

Train = Annotated[
    TrainedTokens,
    Field(
        description="Tokens that train: those of all assistant messages, of the last one, or the "
        "whole text with its prompt."
    ),
]


class SFTConfig(AlgorithmConfig):
    """Supervised fine-tuning on the environment's demonstrations."""

    builds: ClassVar[str] = "ratchet.algorithms.sft:build_sft"
    source: ClassVar[Source] = "rows"

    train: Train = "all"
    weighting: Literal["token_mean", "sequence_mean"] = "token_mean"
    """Loss aggregation over an optimizer step: every token has the same weight, or every row
    has."""
