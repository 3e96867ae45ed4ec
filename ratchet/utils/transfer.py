"""Copy tensors between main memory and an accelerator with few waits.

Uploads wait for nothing, because they go through page-locked ("pinned") memory. PyTorch keeps and
reuses such memory, but not before a copy from it has ended. A fetch waits for the device once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

ALIGNMENT = 16  # bytes; the start of each tensor in a joint copy


def upload(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Return the tensor on the device. A tensor that is there already is returned as it is."""
    device = torch.device(device)
    if not tensor.is_cpu or device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def upload_together(tensors: Sequence[Tensor], device: torch.device | str) -> list[Tensor]:
    """Return the tensors on the device, contiguous.

    Tensors in main memory cross in one copy, because small copies cost as much as larger ones.
    """
    device = torch.device(device)
    if device.type != "cuda" or not all(tensor.is_cpu for tensor in tensors):
        return [tensor.to(device) for tensor in tensors]
    sizes = [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors]
    staging_n = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=True)
    for tensor, part_n in zip(tensors, staging_n.split(sizes), strict=True):
        _view_as(part_n, tensor).copy_(tensor)
    moved_n = staging_n.to(device, non_blocking=True)
    parts = moved_n.split(sizes)
    return [_view_as(part_n, tensor) for tensor, part_n in zip(tensors, parts, strict=True)]


def fetch_together(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors in main memory, after one wait for the device.

    Tensors that are all there already are returned as they are; copies are contiguous.
    """
    if all(tensor.is_cpu for tensor in tensors):
        return list(tensors)
    flat = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors]
    sizes = [-(-len(bytes_n) // ALIGNMENT) * ALIGNMENT for bytes_n in flat]
    padded = [
        F.pad(bytes_n, (0, size - len(bytes_n))) for bytes_n, size in zip(flat, sizes, strict=True)
    ]
    parts = torch.cat(padded).cpu().split(sizes)
    return [_view_as(part_n, tensor) for tensor, part_n in zip(tensors, parts, strict=True)]


class Fetch:
    """A copy of a tensor to main memory, in progress until `wait`.

    On CUDA the device goes on computing meanwhile; elsewhere the copy has ended already.
    """

    def __init__(self, tensor: Tensor) -> None:
        # PyTorch makes the copy in page-locked memory.
        self._copy = tensor.to("cpu", non_blocking=tensor.is_cuda)
        self._event = None
        if tensor.is_cuda:
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(tensor.device))

    def wait(self) -> Tensor:
        """Return the copy, after all that the device had to do before it."""
        if self._event is not None:
            self._event.synchronize()
        return self._copy


def _view_as(bytes_n: Tensor, tensor: Tensor) -> Tensor:
    """Return the first of these bytes as a tensor of the same dtype and shape as another."""
    return bytes_n[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
