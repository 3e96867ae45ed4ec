"""What the processes of a group would leave in shared memory when they are killed: a library takes
its segments away, where it still gets to do so."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")


def shared_by(group: int) -> list[Path]:
    """Files in shared memory that processes of the group have mapped, and nobody else; and
    directories that are named for it (`ratchet-<what>-<group>-<any>`). To be asked before they are
    killed."""
    if not SHARED_MEMORY.is_dir():
        return []
    own, others = set[str](), set[str]()
    for process in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it has ended, or is somebody else's
            mapped = set(_mapped(process))
            (own if os.getpgid(int(process)) == group else others).update(mapped)
    return [*map(Path, sorted(own - others)), *SHARED_MEMORY.glob(f"ratchet-*-{group}-*")]


def _mapped(process: str) -> Iterator[str]:
    with open(f"/proc/{process}/maps") as maps:
        for line in maps:
            _, found, path = line.partition(f" {SHARED_MEMORY}/")
            if found and not path.endswith(" (deleted)\n"):
                yield f"{SHARED_MEMORY}/{path.rstrip()}"


def remove(paths: list[Path]) -> None:
    for path in paths:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
