"""What this machine offers, probed once at start and frozen into the resolved configuration."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """Cores that this process may run on (a container or `taskset` can allow fewer than the machine has)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
