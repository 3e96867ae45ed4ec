"""Share memory of the learner's accelerator with vLLM's workers by CUDA IPC.

The sender copies each push into a buffer that it exports once. Every worker maps the buffer once
and keeps it mapped, because PyTorch counts one release for each export. The memory is a copy of the
model in vLLM's dtype.

This has not been run on an accelerator. Tests replace the first four functions by those of files.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from ratchet.errors import ModelError
from ratchet.generators.vllm.weights import PushReader, WeightCarrier, align_offset, make_entry
from ratchet.models.weights.checksums import checksum, copy_with_checksum

# The arguments of `rebuild_cuda_tensor` that make up a handle: plain values, which vLLM's messages
# carry.
HANDLE_ARGUMENTS = (
    "storage_handle",
    "storage_size_bytes",
    "storage_offset_bytes",
    "ref_counter_handle",
    "ref_counter_offset",
    "event_handle",
    "event_sync_required",
)
SAMPLE_BYTES = 2**20  # at most so much is compared when a worker maps the buffer


def can_export(tensor: Tensor) -> bool:
    """True if a weight lies where other processes can map memory by CUDA IPC."""
    return tensor.is_cuda


def allocate_memory(n_bytes: int, device: torch.device) -> Tensor:
    """Return memory on an accelerator, uint8 [n_bytes]."""
    return torch.empty(n_bytes, dtype=torch.uint8, device=device)


def export_memory(bytes_n: Tensor) -> dict[str, Any]:
    """Return a handle of memory on an accelerator, with which `map_memory` maps it."""
    rebuild, arguments = reduce_tensor(bytes_n)
    named = inspect.signature(rebuild).bind(*arguments).arguments
    return {
        "device": str(torch.cuda.get_device_properties(bytes_n.device).uuid),
        "n_bytes": len(bytes_n),
        "arguments": {name: named[name] for name in HANDLE_ARGUMENTS},
    }


def map_memory(handle: Mapping[str, Any]) -> Tensor:
    """Map memory of another process, uint8 [n].

    Raises ModelError if its accelerator is not visible here.
    """
    uuids = [
        str(torch.cuda.get_device_properties(index).uuid)
        for index in range(torch.cuda.device_count())
    ]
    if handle["device"] not in uuids:
        raise ModelError(
            f"the learner's accelerator {handle['device']} isn't visible to vLLM's worker, which "
            f"sees {', '.join(uuids) or 'none'}"
        )
    return rebuild_cuda_tensor(
        Tensor,
        tensor_size=(handle["n_bytes"],),
        tensor_stride=(1,),
        tensor_offset=0,
        storage_cls=torch.storage.TypedStorage,
        dtype=torch.uint8,
        storage_device=uuids.index(handle["device"]),
        requires_grad=False,
        **handle["arguments"],
    )


@dataclass
class DeviceCarrier(WeightCarrier):
    """A carrier that copies each push into one buffer on an accelerator."""

    bytes_n: Tensor
    """The buffer, uint8, with room for all weights."""
    dtype: torch.dtype
    """dtype to which floating-point weights are converted."""
    _end: int = field(default=0, init=False)

    def offer(self) -> dict[str, Any]:
        """Return what a worker needs to map the buffer, and to compare a sample of it."""
        sample_n = self.bytes_n[:SAMPLE_BYTES]
        sample_n.copy_(torch.arange(len(sample_n)) % 251)
        entry = make_entry(sample_n.shape, torch.uint8, 0, checksum(sample_n))
        return {"handle": export_memory(self.bytes_n), "entry": entry}

    def store(self, tensor: Tensor) -> dict[str, Any]:
        dtype = self.dtype if tensor.is_floating_point() else tensor.dtype
        offset = align_offset(self._end)
        self._end = offset + tensor.numel() * dtype.itemsize
        target_n = self.bytes_n[offset : self._end]
        digest = copy_with_checksum(target_n, tensor.detach(), dtype)
        return make_entry(tensor.shape, dtype, offset, digest)

    def locate(self) -> None:
        if self.bytes_n.is_cuda:
            # Workers read on other streams.
            torch.cuda.synchronize(self.bytes_n.device)

    def clear(self) -> None:
        self._end = 0


def map_offered(offer: Mapping[str, Any]) -> Tensor:
    """Map the buffer that a `DeviceCarrier` offers, uint8 [n].

    Raises ModelError if it can't be mapped here, or has other bytes than its sender sees.
    """
    mapped_n = map_memory(offer["handle"])
    PushReader.open_checked({"path": None, "entries": {"sample": offer["entry"]}}, mapped_n)
    return mapped_n
