"""Optimizers beside AdamW. Free of torch."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from ratchet.config.schema import OptimizerConfig


class MuonConfig(OptimizerConfig):
    """Muon (https://kellerjordan.github.io/posts/muon/, arXiv:2502.16982) for the matrices of hidden layers, and AdamW, with
    the same rate and decay, for everything else."""

    builds: ClassVar[str] = "ratchet.learners.muon:Muon"
    whole_matrices: ClassVar[bool] = True

    momentum: float = Field(default=0.95, ge=0, lt=1, description="Share that the sum of gradients keeps of itself a step.")
