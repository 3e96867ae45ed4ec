"""Optimizers beside AdamW. Free of torch."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from ratchet.config.schema import OptimizerConfig


class MuonConfig(OptimizerConfig):
    """Muon (https://kellerjordan.github.io/posts/muon/, arXiv:2502.16982) for the matrices of
    hidden layers, and AdamW, with the same rate and decay, for everything else."""

    builds: ClassVar[str] = "ratchet.learners.optim.muon:Muon"
    whole_matrices: ClassVar[bool] = True

    momentum: float = Field(
        default=0.95,
        ge=0,
        lt=1,
        description="Share that the sum of gradients keeps of itself a step.",
    )


class AdamW8bitConfig(OptimizerConfig):
    """AdamW whose running means rest in 8 bits, by bitsandbytes (arXiv:2110.02861): 2 bytes a
    weight where it keeps 8."""

    builds: ClassVar[str] = "ratchet.learners.optim.adamw_8bit:AdamW8bit"
    needs: ClassVar[str | None] = "bitsandbytes"
