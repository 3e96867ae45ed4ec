"""Find and remove the shared memory of a killed process group.

Libraries remove their segments only if the process ends normally.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import psutil

SHARED_MEMORY = Path("/dev/shm")


def list_shared_memory(group: int) -> list[Path]:
    """Return the shared-memory files and directories that only this process group uses.

    These are files that only the group's processes have mapped, and paths named after it
    (`ratchet-<what>-<group>-<any>`). Call this before killing the group.
    """
    if not SHARED_MEMORY.is_dir():
        return []
    group_paths: set[str] = set()
    other_paths: set[str] = set()
    for process in psutil.pids():
        with contextlib.suppress(OSError):  # the process has ended, or belongs to another user
            mapped_paths = set(_list_mapped_paths(process))
            (group_paths if os.getpgid(process) == group else other_paths).update(mapped_paths)
    paths = map(Path, sorted(group_paths - other_paths))
    return [*paths, *SHARED_MEMORY.glob(f"ratchet-*-{group}-*")]


def _list_mapped_paths(process: int) -> Iterator[str]:
    with open(f"/proc/{process}/maps") as maps:
        for line in maps:
            _, separator, path = line.partition(f" {SHARED_MEMORY}/")
            if separator and not path.endswith(" (deleted)\n"):
                yield f"{SHARED_MEMORY}/{path.rstrip()}"


def remove_paths(paths: list[Path]) -> None:
    """Remove files and directories; missing ones are skipped."""
    for path in paths:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
