"""Offloading: a learner's tensors move to host memory while its device is used for other work."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ratchet.learners.optim.adamw import AdamW


class Offloader:
    """A mover of weights, buffers and optimizer state between device and host memory.

    A colocated learner uses it to free its accelerator for the generator. Gradients exist only
    during updates, so they are not moved. Parameters stay the same objects. Saving, loading and
    weight sync work on offloaded tensors too.
    """

    def __init__(self, modules: Sequence[nn.Module | None], optimizer: AdamW | None) -> None:
        self.modules = [module for module in modules if module is not None]
        self.optimizer = optimizer
        self.device = next(self.modules[0].parameters()).device

    def offload(self) -> None:
        """Move everything to host memory."""
        self._move(torch.device("cpu"))
        if self.device.type == "cuda":
            # Without this the allocator would keep the freed memory from other processes.
            torch.cuda.empty_cache()

    def onload(self) -> None:
        """Move everything back to the device."""
        self._move(self.device)

    def _move(self, device: torch.device) -> None:
        # The tensors of a learner on the CPU are in host memory already.
        if self.device.type == "cpu":
            return
        for module in self.modules:
            module.to(device)
        if self.optimizer is not None:
            self.optimizer.to(device)
