"""Find the cores and accelerators of this machine."""

from __future__ import annotations

import os
import re
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ratchet.errors import ConfigError
from ratchet.executors.placement import Accelerator, ClusterNode

NVIDIA_SMI_S = 30.0  # time limit of nvidia-smi, in seconds


def find_node(threads: int, device: str, devices: Sequence[int] | None = None) -> ClusterNode:
    """Return this machine as a node.

    Args:
        threads: number of cores that the run may use.
        device: the run's device; "cpu": the node has no accelerators.
        devices: indices of the accelerators that the run may use; None: all.

    Raises ConfigError if one of `devices` does not exist.
    """
    accelerators = () if device == "cpu" else find_accelerators()
    if devices is not None:
        missing = sorted(set(devices) - {accelerator.index for accelerator in accelerators})
        if missing:
            indices = ", ".join(str(accelerator.index) for accelerator in accelerators) or "none"
            raise ConfigError(
                f"cluster.devices lists {missing}, but this process sees {indices} "
                f"(device={device})"
            )
        accelerators = tuple(a for a in accelerators if a.index in devices)
    return ClusterNode(socket.gethostname(), threads, accelerators)


def find_accelerators() -> tuple[Accelerator, ...]:
    """Return this machine's accelerators without starting CUDA in this process.

    With `CUDA_VISIBLE_DEVICES`, an accelerator's index is its position in that list.
    """
    import torch

    count = torch.cuda.device_count()
    topology = parse_topology(_read_topology()) if count else {}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(i) for i in range(count)] if visible is None else visible.split(",")[:count]
    accelerators = []
    for index, name in enumerate(map(str.strip, names)):
        # The topology counts all accelerators of the machine. The place of a UUID is unknown.
        place = topology.get(int(name)) if name.isdecimal() else None
        accelerators.append(replace(place or Accelerator(index), index=index, cuda_name=name))
    return tuple(accelerators)


def _read_topology() -> str:
    try:
        result = subprocess.run(
            ["nvidia-smi", "topo", "-m"],
            capture_output=True,
            text=True,
            timeout=NVIDIA_SMI_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):  # no NVIDIA accelerators, or no nvidia-smi
        return ""
    return result.stdout


def parse_topology(topology: str) -> Mapping[int, Accelerator]:
    """Parse `nvidia-smi topo -m` into accelerators by index.

    An accelerator's island is the lowest index among itself and the accelerators that it reaches by
    NVLink (an entry such as NV4); None if it reaches none.
    """
    # Remove terminal colours.
    lines = [re.sub(r"\x1b\[[\d;]*m", "", line).split("\t") for line in topology.splitlines()]
    if not lines:
        return {}
    header = [cell.strip() for cell in lines[0]]
    numa_column = header.index("NUMA Affinity") if "NUMA Affinity" in header else None
    accelerators: dict[int, Accelerator] = {}
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
        accelerators[index] = Accelerator(
            index,
            int(numa) if numa.isdecimal() else None,
            min([index, *linked]) if linked else None,
        )
    return accelerators
