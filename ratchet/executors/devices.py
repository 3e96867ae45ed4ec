"""The inventory of the machine that this process runs on."""

from __future__ import annotations

import re
import socket
import subprocess
from collections.abc import Mapping, Sequence

from ratchet.errors import ConfigError
from ratchet.executors.placement import Accelerator, Node

ASK_S = 30.0


def this_node(threads: int, device: str, devices: Sequence[int] | None = None) -> Node:
    """threads: its cores, for this run. devices: the accelerators that may be used; None: all.

    Raises ConfigError where one of them is not there.
    """
    found = () if device == "cpu" else accelerators_here()
    if devices is not None:
        missing = sorted(set(devices) - {accelerator.index for accelerator in found})
        if missing:
            there = ", ".join(str(accelerator.index) for accelerator in found) or "none"
            raise ConfigError(
                f"cluster.devices names {missing}, and this process sees {there} (device={device})"
            )
        found = tuple(accelerator for accelerator in found if accelerator.index in devices)
    return Node(socket.gethostname(), threads, found)


def accelerators_here() -> tuple[Accelerator, ...]:
    """Without starting CUDA in this process. Their indices are those of `CUDA_VISIBLE_DEVICES`,
    where it is set."""
    import torch

    count = torch.cuda.device_count()
    near = neighbours(_topology()) if count else {}
    return tuple(near.get(index, Accelerator(index)) for index in range(count))


def _topology() -> str:
    try:
        said = subprocess.run(
            ["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=ASK_S, check=True
        )
    except (OSError, subprocess.SubprocessError):  # of another maker, or without its tools
        return ""
    return said.stdout


def neighbours(topology: str) -> Mapping[int, Accelerator]:
    """What `nvidia-smi topo -m` says: by index, the NUMA node, and the first of those linked by
    NVLink (NV4, say)."""
    lines = [re.sub(r"\x1b\[[\d;]*m", "", line).split("\t") for line in topology.splitlines()]
    if not lines:
        return {}
    header = [cell.strip() for cell in lines[0]]
    numa_column = header.index("NUMA Affinity") if "NUMA Affinity" in header else None
    found: dict[int, Accelerator] = {}
    for line in lines[1:]:
        cells = [cell.strip() for cell in line]
        match = re.fullmatch(r"GPU(\d+)", cells[0])
        if match is None:
            continue
        index = int(match[1])
        linked = [
            int(name[3:])
            for name, cell in zip(header, cells, strict=False)
            if name[:3] == "GPU" and cell[:2] == "NV"
        ]
        numa = cells[numa_column] if numa_column is not None and numa_column < len(cells) else ""
        found[index] = Accelerator(
            index,
            int(numa) if numa.isdecimal() else None,
            min([index, *linked]) if linked else None,
        )
    return found
