"""Offloading: a learner's tensors move to host memory while its device is used for other work."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ratchet.learners.optim.adamw import AdamW


class Offloader:
    """A mover of weights, buffers and optimizer state between device and host memory.

    A colocated learner uses it to free its accelerator for the generator. Gradients exist only
    during updates, so they are not moved. Parameters stay the same objects. Saving, loading and
    weight sync work on offloaded tensors too.

    On CUDA the copies in host memory are page-locked: the device copies from and to such memory at
    the rate of its bus, and the host waits once for all copies. Locking memory takes longer than
    copying to it, so each copy's memory is made once and kept while its tensor is on the device.
    """

    def __init__(self, modules: Sequence[nn.Module | None], optimizer: AdamW | None) -> None:
        self.modules = [module for module in modules if module is not None]
        self.optimizer = optimizer
        self.device = next(self.modules[0].parameters()).device
        # The copy of each tensor at the last offload, in the order of `_move`; None: it had none.
        self._host_copies: list[Tensor | None] = []

    def offload(self) -> None:
        """Move everything to host memory."""
        if self.device.type != "cuda":
            self._move(lambda tensor: tensor.to("cpu"))
            return
        copies = iter(self._host_copies)
        self._host_copies = []
        self._move(lambda tensor: self._copy_to_host(tensor, next(copies, None)))
        torch.cuda.synchronize(self.device)
        # Without this the allocator would keep the freed memory from other processes.
        torch.cuda.empty_cache()

    def onload(self) -> None:
        """Move everything back to the device."""
        self._move(lambda tensor: tensor.to(self.device, non_blocking=True))

    def _copy_to_host(self, tensor: Tensor, previous: Tensor | None) -> Tensor:
        """Return a copy in host memory, perhaps still in progress.

        previous: the copy at the last offload, whose memory is used again if it has the right
            layout.
        """
        # It may have moved already: the reference of a LoRA run is the policy's learner, which
        # then is offloaded twice.
        if tensor.is_cpu:
            self._host_copies.append(previous)
            return tensor
        copy = previous
        if copy is None or not _has_layout(copy, tensor):
            copy = make_page_locked(tensor)
        with torch.no_grad():
            copy.copy_(tensor, non_blocking=True)
        self._host_copies.append(copy)
        return copy

    def _move(self, move: Callable[[Tensor], Tensor]) -> None:
        """Replace each tensor by the result of `move`."""
        # The tensors of a learner on the CPU are in host memory already.
        if self.device.type == "cpu":
            return
        for module in self.modules:
            module._apply(move)
        if self.optimizer is not None:
            self.optimizer.apply(move)


def _has_layout(copy: Tensor, tensor: Tensor) -> bool:
    return (copy.dtype, copy.shape, copy.stride()) == (tensor.dtype, tensor.shape, tensor.stride())


def make_page_locked(tensor: Tensor) -> Tensor:
    """Return an empty tensor like `tensor` in page-locked memory.

    It is in ordinary host memory, to which copies are slower, if no more can be locked.
    """
    tensor = tensor.detach()
    try:
        return torch.empty_like(tensor, device="cpu", pin_memory=True)
    except RuntimeError:
        return torch.empty_like(tensor, device="cpu")
