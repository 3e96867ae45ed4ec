"""Becomes an unprivileged user, then runs a program: python as_nobody.py PROGRAM ARGUMENTS...

Root's Python often lies where only root can look (/root/.pyenv). In a mount namespace of our own, the way to it is opened.
"""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

from ratchet.sandbox.inside import kernel

NOBODY = 65534


def open_the_way(prefix: str) -> None:
    """Where a directory above `prefix` is closed to others, an empty one takes its place, with `prefix` in it."""
    closed = [folder for folder in reversed(Path(prefix).parents) if not folder.stat().st_mode & stat.S_IXOTH]
    if not closed:
        return
    kernel.unshare(kernel.NEWNS)
    kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    held = os.open(prefix, os.O_PATH)
    kernel.mount("way", str(closed[0]), "tmpfs", 0, "size=1m,mode=755")
    os.makedirs(prefix)
    kernel.mount(f"/proc/self/fd/{held}", prefix, None, kernel.MS_BIND | kernel.MS_REC)
    os.close(held)


if __name__ == "__main__":
    open_the_way(sys.base_prefix)
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    os.chdir("/")
    os.execve(sys.executable, [sys.executable, *sys.argv[1:]], {"PYTHONPATH": os.environ.get("PYTHONPATH", "")})
