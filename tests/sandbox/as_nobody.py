"""Becomes an unprivileged user, then runs a program: python as_nobody.py [--no-namespaces] PROGRAM
ARGUMENTS...

Root's Python often lies where only root can look (in its home). In a mount namespace of our own,
the way to it is opened.
"""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

from ratchet.sandbox.inside import syscalls

NOBODY = 65534


def open_the_way(prefix: str) -> None:
    """Where a directory above `prefix` is closed to others, an empty one takes its place, with
    `prefix` in it."""
    closed = [
        folder
        for folder in reversed(Path(prefix).parents)
        if not folder.stat().st_mode & stat.S_IXOTH
    ]
    if not closed:
        return
    syscalls.unshare(syscalls.NEWNS)
    syscalls.mount("none", "/", None, syscalls.MS_REC | syscalls.MS_PRIVATE)
    held = os.open(prefix, os.O_PATH)
    syscalls.mount("way", str(closed[0]), "tmpfs", 0, "size=1m,mode=755")
    os.makedirs(prefix)
    syscalls.mount(f"/proc/self/fd/{held}", prefix, None, syscalls.MS_BIND | syscalls.MS_REC)
    os.close(held)


def forbid_namespaces() -> None:
    """As many containers do. The limit is a user namespace's own, so this touches nobody else."""
    syscalls.unshare(syscalls.NEWUSER)
    settings = {
        "self/setgroups": "deny",
        "self/uid_map": f"{NOBODY} {NOBODY} 1",
        "self/gid_map": f"{NOBODY} {NOBODY} 1",
    }
    for name, text in (settings | {"sys/user/max_user_namespaces": "0"}).items():
        Path("/proc", name).write_text(text)


if __name__ == "__main__":
    words = [word for word in sys.argv[1:] if word != "--no-namespaces"]
    open_the_way(sys.base_prefix)
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    if len(words) < len(sys.argv) - 1:
        syscalls.prctl(syscalls.PR_SET_DUMPABLE, 1)  # or /proc/self belongs to root
        forbid_namespaces()
    os.chdir("/")
    os.execve(
        sys.executable, [sys.executable, *words], {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    )
