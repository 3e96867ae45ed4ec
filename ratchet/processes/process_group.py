"""Kill a process group, and remove its shared memory.

Libraries remove their segments only if the process ends normally. Other files that a process has
mapped, such as the weights of a model in /dev/shm, belong to the user and are never removed. Every
child process imports this module, so it imports nothing that takes long.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
from typing import NoReturn

SHARED_MEMORY = "/dev/shm"
# The names that Python's multiprocessing, PyTorch, NCCL, CUDA, vLLM and Ratchet give to segments.
SEGMENT_NAME = re.compile(r"(psm_|torch_|nccl-|cuda\.shm\.|ratchet-)[^/]*|[^/]*-cpushm_[^/]*")


def kill_group(group: int) -> None:
    """Kill all processes of a group, and remove the shared memory that only they used.

    The process `group` is killed even if it has not become a group's leader yet.
    """
    paths = list_shared_memory(group)
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(group, signal.SIGKILL)
    remove_paths(paths)


def end_group() -> NoReturn:
    """Kill this process and its process group, after removing their shared memory."""
    remove_paths(list_shared_memory(os.getpgrp()))
    os.killpg(0, signal.SIGKILL)
    raise AssertionError("SIGKILL did not end this process")


def list_shared_memory(group: int) -> list[str]:
    """Return the shared-memory segments that only this process group uses.

    These are segments that only the group's processes have mapped, and paths named after it
    (`ratchet-<what>-<group>-<any>`). Call this before killing the group.
    """
    if not os.path.isdir(SHARED_MEMORY):
        return []
    group_paths: set[str] = set()
    other_paths: set[str] = set()
    for process in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # the process has ended, or belongs to another user
            segments = list_mapped_segments(process)
            (group_paths if os.getpgid(int(process)) == group else other_paths).update(segments)
    named_paths = [
        f"{SHARED_MEMORY}/{name}"
        for name in os.listdir(SHARED_MEMORY)
        if name.startswith("ratchet-") and f"-{group}-" in name.removeprefix("ratchet-")
    ]
    return [*sorted(group_paths - other_paths), *named_paths]


def list_mapped_segments(process: str = "self") -> list[str]:
    """Return the paths of the shared-memory segments that a process has mapped.

    process: the process's number, or "self" for this process. Raises OSError if it is gone.
    """
    names = set()
    with open(f"/proc/{process}/maps") as maps:
        for line in maps:
            name = line.rstrip().partition(f" {SHARED_MEMORY}/")[2]
            if SEGMENT_NAME.fullmatch(name) and not name.endswith(" (deleted)"):
                names.add(name)
    return [f"{SHARED_MEMORY}/{name}" for name in sorted(names)]


def remove_paths(paths: list[str]) -> None:
    """Remove files and directories; missing ones are skipped."""
    for path in paths:
        if os.path.isdir(path):
            import shutil

            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
