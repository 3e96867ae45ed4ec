"""Recipe sections of optimizers other than AdamW. Imports no torch."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from ratchet.config.schema import OptimizerConfig


class MuonConfig(OptimizerConfig):
    """Muon for the matrices of hidden layers, and AdamW for everything else.

    Both use the same learning rate and weight decay.
    https://kellerjordan.github.io/posts/muon/, arXiv:2502.16982.
    """

    builds: ClassVar[str] = "ratchet.learners.optim.muon:Muon"
    needs_whole_matrices: ClassVar[bool] = True

    momentum: float = Field(default=0.95, ge=0, lt=1)
    """Momentum: the share of the accumulated gradient that each step keeps."""


class AdamW8bitConfig(OptimizerConfig):
    """AdamW with 8-bit moments, by bitsandbytes (arXiv:2110.02861).

    The moments take 2 bytes per weight instead of 8.
    """

    builds: ClassVar[str] = "ratchet.learners.optim.adamw_8bit:AdamW8bit"
    required_package: ClassVar[str | None] = "bitsandbytes"
