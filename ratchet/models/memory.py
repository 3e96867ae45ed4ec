"""Measure a device's memory, to refuse a model that is too large before anything is allocated."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import torch

from ratchet.config.model_shape.decoder_config import DecoderConfig
from ratchet.errors import ModelError
from ratchet.models.flops import DecoderCost

CGROUP = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
GIB = 1 << 30


def require_memory(config: DecoderConfig, dtype: torch.dtype, device: torch.device | str) -> None:
    """Raise ModelError if the whole model's weights exceed the device's total (not free) memory."""
    needed = DecoderCost(config).parameters * dtype.itemsize
    total = memory_bytes(torch.device(device))
    if total is not None and needed > total:
        raise ModelError(
            f"the model's weights take {needed / GIB:,.1f} GiB in "
            f"{str(dtype).removeprefix('torch.')}, and {device} has "
            f"{total / GIB:,.1f} GiB of memory: choose a smaller model, or shard it over several "
            "devices (learner.kind=dtensor)"
        )


def memory_bytes(device: torch.device) -> int | None:
    """Return the total memory of a device in bytes; None if it is neither a CPU nor CUDA.

    For the CPU it is the machine's memory, or the limit of this process or its cgroup if that is
    smaller.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if device.type != "cpu":
        return None
    sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY:
        sizes.append(limit)
    sizes += [
        int(text)
        for path in CGROUP
        if path.is_file() and (text := path.read_text().strip()).isdecimal()
    ]
    return min(sizes)
