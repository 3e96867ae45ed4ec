"""Offload a Megatron learner: its tensors move to host memory, while their storages stay the same.

Megatron keeps views of one buffer in many places: parameters, their gradients, the optimizer's
parts of both. Views follow their storage, so the storages themselves are emptied and filled again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from ratchet.learners.offload import make_page_locked


class StorageOffloader:
    """A mover of tensors, and of all views of their memory, between device and host memory.

    An offloaded tensor lies in host memory and can be read, saved and written there. A view of it
    that `list_tensors` does not list must not be used until `onload`. The copies' memory is kept
    for the next time, as `Offloader` does.

    Args:
        list_tensors: Returns the tensors to move.
        list_gradients: Returns the buffers of gradients, which are zero between updates. Their
            memory is freed and not copied.
    """

    def __init__(
        self,
        list_tensors: Callable[[], Iterable[Tensor]],
        list_gradients: Callable[[], Iterable[Tensor]],
        device: torch.device,
    ) -> None:
        self.list_tensors = list_tensors
        self.list_gradients = list_gradients
        self.device = device
        self._host_copies: list[Tensor] = []  # of the last offload, by its order of storages
        self._offloaded: list[tuple[Tensor, UntypedStorage]] = []
        # Each emptied storage with its content, or with its size in bytes if that was zeros.
        self._contents: list[tuple[UntypedStorage, Tensor | int]] = []

    def offload(self) -> None:
        """Move everything to host memory. Does nothing if it is there."""
        if self._contents:
            return
        previous_copies = iter(self._host_copies)
        copies: dict[int, tuple[UntypedStorage, Tensor]] = {}
        # A weight may be listed as the model's and as the optimizer's.
        listed = {id(tensor): tensor for tensor in self.list_tensors()}
        tensors = [tensor for tensor in listed.values() if tensor.device == self.device]
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in copies:
                copy = _copy_to_host(storage, next(previous_copies, None))
                copies[storage.data_ptr()] = (storage, copy)
        self._host_copies = [copy for _, copy in copies.values()]
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        for tensor in tensors:
            storage, copy = copies[tensor.untyped_storage().data_ptr()]
            self._offloaded.append((tensor, storage))
            _move_to(copy.untyped_storage(), tensor)
        self._contents = [*copies.values()]
        for gradients in self.list_gradients():
            storage = gradients.untyped_storage()
            self._contents.append((storage, storage.nbytes()))
        for storage, _ in self._contents:
            storage.resize_(0)
        if self.device.type == "cuda":
            # Without this the allocator would keep the freed memory from other processes.
            torch.cuda.empty_cache()

    def onload(self) -> None:
        """Move everything back to the device. Does nothing if it is there."""
        for storage, content in self._contents:
            storage.resize_(content if isinstance(content, int) else content.nbytes)
            device_bytes = _view_bytes(storage)
            if isinstance(content, int):
                device_bytes.zero_()
            else:
                device_bytes.copy_(content, non_blocking=True)
        for tensor, storage in self._offloaded:
            _move_to(storage, tensor)
        self._contents, self._offloaded = [], []


def list_real_optimizers(optimizer: Any) -> list[Any]:
    """Return the parts of Megatron's optimizer that have parameters; [] without an optimizer.

    With expert parallelism, experts have one of their own, and all other weights one that is empty
    if an adapter is of experts alone.
    """
    return (
        []
        if optimizer is None
        else [inner for inner in optimizer.chained_optimizers if not inner.is_stub_optimizer]
    )


def list_learner_tensors(model: Any, optimizer: Any) -> list[Tensor]:
    """Return the tensors of a `MegatronPolicy` and of its optimizer, master weights included."""
    tensors = [
        tensor for chunk in model.chunks for tensor in (*chunk.parameters(), *chunk.buffers())
    ]
    for inner in list_real_optimizers(optimizer):
        tensors += [parameter for group in inner.param_groups for parameter in group["params"]]
        tensors += [
            entry
            for state in inner.optimizer.state.values()
            for entry in state.values()
            if isinstance(entry, Tensor)
        ]
    return tensors


def list_gradient_buffers(chunks: Iterable[Any]) -> list[Tensor]:
    """Return the gradient buffers of chunks that Megatron's `DistributedDataParallel` wraps."""
    return [
        buffer.grad_data
        for chunk in chunks
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
    ]


def _copy_to_host(storage: UntypedStorage, previous: Tensor | None) -> Tensor:
    """Return a copy of the bytes in host memory, perhaps still in progress.

    previous: an earlier copy, whose memory is used again if it has the right size.
    """
    device_bytes = _view_bytes(storage)
    copy = previous
    if copy is None or copy.nbytes != device_bytes.nbytes:
        copy = make_page_locked(device_bytes) if storage.is_cuda else torch.empty_like(device_bytes)
    return copy.copy_(device_bytes, non_blocking=True)


def _view_bytes(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _move_to(storage: UntypedStorage, tensor: Tensor) -> None:
    """Make the tensor a view of another storage, at the same place and of the same shape."""
    view = torch.empty(0, dtype=tensor.dtype, device=storage.device)
    view.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
    tensor.data = view
