"""The stages into which a pipeline cuts a model, as a pipeline schedule sees them.

The first stage embeds tokens, the last one has the final norm and the language head, and each has
consecutive layers. `ratchet.models.parallel.sharded_policy` has the stages of the built-in decoder,
`ratchet.models.transformers.pipeline_parallel` those of models that transformers runs.

U = tokens that are computed, T = tokens of packed sequences, d = hidden size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn

from ratchet.models.parallel.sharding import ShardIndex


class StageInputs(Protocol):
    """The inputs of a micro-batch that every stage has, besides hidden states."""

    @property
    def tokens_U(self) -> Tensor: ...

    def pad(self, tokens: int, /) -> Self:
        """Return the inputs padded to `tokens` tokens. Nothing attends to the padding."""
        ...

    def unfold(self, hidden_Ud: Tensor, /) -> Tensor:
        """Return the hidden states of all tokens in their original order [T, d]."""
        ...


class ModelStage(nn.Module, ABC):
    """Consecutive layers of a model, as a module that a pipeline schedule can run.

    index: index of the stage, and the number of stages.
    state_parts: number of ranks over which the tokens of hidden states between stages are divided.
    micro_inputs: the inputs of the micro-batches that a pipeline runs.
    autocast: True to compute matrix products in bfloat16.
    """

    def __init__(self, index: ShardIndex, *, state_parts: int = 1) -> None:
        super().__init__()
        self.index = index
        self.state_parts = state_parts
        self.micro_inputs: Sequence[StageInputs] = ()
        self.autocast = False

    @abstractmethod
    def layers(self) -> Sequence[nn.Module]:
        """Return the stage's layers."""

    @abstractmethod
    def experts(self) -> Sequence[nn.Module]:
        """Return the modules that hold this rank's experts, if experts are divided over ranks."""

    @abstractmethod
    def run(self, packed: Any, x: Tensor | None) -> Tensor:
        """Return the hidden states after the stage's layers.

        Args:
            packed: The `StageInputs` of a micro-batch.
            x: Hidden states from the previous stage; None in the first.
        """

    def forward(
        self, x: Tensor | None, number: Tensor | None = None, *, packed: StageInputs | None = None
    ) -> Tensor:
        """Return the hidden states after the stage's layers.

        Args:
            x: Hidden states from the previous stage. The first stage ignores them.
            number: [1], index of the micro-batch in `micro_inputs`; used if `packed` is None.
            packed: The inputs of the micro-batch.
        """
        if packed is None:
            assert number is not None, "neither packed inputs nor the number of a micro-batch"
            packed = self.micro_inputs[int(number)]
        device = packed.tokens_U.device.type
        with torch.autocast(device, torch.bfloat16, enabled=self.autocast):
            return self.run(packed, None if self.index.index == 0 else x)
