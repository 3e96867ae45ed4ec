"""Where the tensors of a learner are: on the device that computes with them, or, while others need
that, in main memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ratchet.learners.optim.adamw import AdamW


class Residence:
    """Moves weights, buffers and what the optimizer keeps; gradients exist in updates only.
    Parameters stay the same objects. What is saved, loaded or sent meanwhile is read and written
    where it is."""

    def __init__(self, modules: Sequence[nn.Module | None], optimizer: AdamW | None) -> None:
        self.modules = [module for module in modules if module is not None]
        self.optimizer = optimizer
        self.device = next(self.modules[0].parameters()).device

    def leave(self) -> None:
        self._move(torch.device("cpu"))
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # or the allocator would keep what was freed from the others

    def enter(self) -> None:
        self._move(self.device)

    def _move(self, device: torch.device) -> None:
        if self.device.type == "cpu":  # weights rest in main memory as it is
            return
        for module in self.modules:
            module.to(device)
        if self.optimizer is not None:
            self.optimizer.to(device)
