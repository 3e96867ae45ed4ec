"""What this machine can hold, so that a model that it can't is refused by arithmetic, before
anything is allocated."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import torch

from ratchet.errors import ModelError
from ratchet.models.config import DecoderConfig
from ratchet.models.flops import Cost

CGROUP = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
GIB = 1 << 30


def require_memory(config: DecoderConfig, dtype: torch.dtype, device: torch.device | str) -> None:
    """Raise ModelError where the weights of the whole model alone are more than the device's memory
    (in all, not free)."""
    needed, there = Cost(config).parameters * dtype.itemsize, memory_bytes(torch.device(device))
    if there is not None and needed > there:
        raise ModelError(
            f"the model's weights take {needed / GIB:,.1f} GiB in "
            f"{str(dtype).removeprefix('torch.')}, and {device} has "
            f"{there / GIB:,.1f} GiB of memory: choose a smaller model, or divide it "
            "(learner.kind=dtensor)"
        )


def memory_bytes(device: torch.device) -> int | None:
    """Return the memory of a device: of CUDA its own, of the CPU that of the machine within the
    limits of this process.

    None for a device that holds nothing (`meta`), or whose size is not known.
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
