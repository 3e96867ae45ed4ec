"""The section of a low-rank adapter."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from ratchet.config.base import Section


class LoRAConfig(Section):
    """A low-rank adapter (arXiv:2106.09685): W x becomes W x + scale B A x.

    Only A and B train; W is frozen.
    """

    rank: int = Field(default=16, ge=1)
    """Number of rows of each A and of columns of each B."""
    alpha: float = Field(default=32.0, gt=0)
    """The scale is alpha / rank."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout of A's inputs during updates."""
    target_modules: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    """Linear maps of each layer that get an adapter: all-linear, or their names (q_proj, ...). A
    map of experts gets one for each expert."""
    target_parameters: tuple[str, ...] = ()
    """Fused parameters of experts that get an adapter too, in a model that transformers runs, by
    the ends of their names: mlp.experts.gate_up_proj, mlp.experts.down_proj."""
    init: Literal["kaiming", "gaussian"] = "kaiming"
    """Initial values of A. B begins at 0: training starts from the base model."""
    rslora: bool = False
    """Rank-stabilised LoRA: the scale is alpha / sqrt(rank) (arXiv:2312.03732)."""
    base: Literal["nf4", "float8"] | None = None
    """Quantisation of the base weights: nf4 (4 bits, QLoRA) or float8; null: none."""

    @model_validator(mode="after")
    def _check_targets(self) -> Self:
        if not self.target_modules and not self.target_parameters:
            raise ValueError(
                "target_modules=[] leaves nothing to adapt. Name linear maps, or set "
                "target_parameters"
            )
        return self

    @property
    def scale(self) -> float:
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)
