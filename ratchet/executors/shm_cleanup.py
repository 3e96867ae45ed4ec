"""Find and remove the shared memory of a process group that is killed.

Libraries remove their segments themselves only if the process ends normally.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")


def shared_by(group: int) -> list[Path]:
    """Return the files and directories in shared memory that belong to a process group alone.

    These are files that only processes of the group have mapped, and directories named for it
    (`ratchet-<what>-<group>-<any>`). Call it before the group is killed.
    """
    if not SHARED_MEMORY.is_dir():
        return []
    by_group: set[str] = set()
    by_others: set[str] = set()
    for process in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            mapped = set(_mapped(process))
            (by_group if os.getpgid(int(process)) == group else by_others).update(mapped)
    paths = map(Path, sorted(by_group - by_others))
    return [*paths, *SHARED_MEMORY.glob(f"ratchet-*-{group}-*")]


def _mapped(process: str) -> Iterator[str]:
    with open(f"/proc/{process}/maps") as maps:
        for line in maps:
            _, separator, path = line.partition(f" {SHARED_MEMORY}/")
            if separator and not path.endswith(" (deleted)\n"):
                yield f"{SHARED_MEMORY}/{path.rstrip()}"


def remove(paths: list[Path]) -> None:
    """Remove files and directories that may be gone already."""
    for path in paths:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
