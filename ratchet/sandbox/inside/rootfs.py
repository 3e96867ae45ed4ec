"""Enter new namespaces, and build a root directory of Python and the system's libraries only."""

from __future__ import annotations

import os
import socket

from . import syscalls
from .syscalls import MS_BIND, MS_NODEV, MS_NOEXEC, MS_NOSUID, MS_PRIVATE, MS_REC

SCRATCH_DIRECTORY = "/box"  # /tmp is a link to it
# Paths that point into the scratch directory, under the names that tasks in Harbor's format use.
LINKED_PATHS = ("/app", "/workspace", "/tests", "/solution", "/logs")
DEVICES = ("null", "zero", "random", "urandom")
# Debian's awk is a link into /etc/alternatives, which holds only links.
SYSTEM_PATHS = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/lib32", "/etc/alternatives")
# Sources are no part of the running system, and images of Python put the user's project there.
SOURCE_PATHS = ("/usr/src", "/usr/local/src")
# Where the new root is assembled: a directory that always exists and that `build` never mounts.
STAGING_DIRECTORY = "/proc"
INNER_UID = 1000
NAMESPACE_FLAGS = (
    syscalls.NEWNS | syscalls.NEWPID | syscalls.NEWNET | syscalls.NEWIPC | syscalls.NEWUTS
)


def enter() -> None:
    """Enter new namespaces. The next process that this one forks is the first one inside.

    Raises OSError if any step is refused: a partial sandbox is not accepted.
    """
    if syscalls.has_capability(syscalls.CAP_SYS_ADMIN):
        syscalls.unshare(NAMESPACE_FLAGS)
    else:
        uid, gid = os.getuid(), os.getgid()
        syscalls.unshare(NAMESPACE_FLAGS | syscalls.NEWUSER)
        for name, line in (
            ("setgroups", "deny"),
            ("uid_map", f"{INNER_UID} {uid} 1"),
            ("gid_map", f"{INNER_UID} {gid} 1"),
        ):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(line)
    syscalls.mount("none", "/", None, MS_REC | MS_PRIVATE)
    socket.sethostname("sandbox")


def build(sources: list[str], hidden: list[str]) -> int | None:
    """Build the root directory. Call it in the first process inside the namespaces.

    The directories `hidden`, which lie inside `sources`, are empty in it.

    Returns a descriptor of the new process namespace's /proc, or None if a container hides parts of
    /proc.
    """
    try:
        # Mount it before the tmpfs hides /proc: an unprivileged user may mount a /proc only while
        # another one is visible.
        proc = syscalls.open_detached_proc()
    except OSError:
        proc = None
    syscalls.mount("root", STAGING_DIRECTORY, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    for path in sources:
        if os.path.islink(path):
            os.symlink(os.readlink(path), STAGING_DIRECTORY + path)
        elif os.path.isdir(path):
            os.makedirs(STAGING_DIRECTORY + path, exist_ok=True)
            syscalls.mount(path, STAGING_DIRECTORY + path, None, MS_BIND | MS_REC)
            syscalls.make_read_only(STAGING_DIRECTORY + path, recursive=True)
    for path in hidden:
        syscalls.mount("hidden", STAGING_DIRECTORY + path, "tmpfs", MS_NOSUID | MS_NODEV, "size=4k")
        syscalls.make_read_only(STAGING_DIRECTORY + path, recursive=False)
    os.makedirs(STAGING_DIRECTORY + "/dev", exist_ok=True)
    for device in DEVICES:
        target = f"{STAGING_DIRECTORY}/dev/{device}"
        open(target, "w").close()
        syscalls.mount(f"/dev/{device}", target, None, MS_BIND)
    os.mkdir(STAGING_DIRECTORY + SCRATCH_DIRECTORY)
    if not os.path.lexists(STAGING_DIRECTORY + "/tmp"):  # unless the interpreter itself lies there
        os.symlink(SCRATCH_DIRECTORY, STAGING_DIRECTORY + "/tmp")
    for path in LINKED_PATHS:
        if not os.path.lexists(STAGING_DIRECTORY + path):
            os.symlink(SCRATCH_DIRECTORY + path, STAGING_DIRECTORY + path)
    os.chdir(STAGING_DIRECTORY)
    syscalls.pivot_root()
    syscalls.make_read_only("/", recursive=False)
    return proc


def mount_scratch(disk_mib: int, owner: int, *, executable: bool) -> None:
    """Mount an empty scratch directory, and enter it.

    Args:
        owner: Uid that owns the directory: that of the sandboxed program, because git refuses
            directories of other users. 0 stands for this process's uid.
        executable: True if programs can execute files of the directory.
    """
    owner_options = f",uid={owner},gid={owner}" if owner else ""
    options = f"size={disk_mib}m,nr_inodes=1024,mode=1777{owner_options}"
    flags = MS_NOSUID | MS_NODEV | (0 if executable else MS_NOEXEC)
    syscalls.mount("box", SCRATCH_DIRECTORY, "tmpfs", flags, options)
    os.chdir(SCRATCH_DIRECTORY)


def unmount_scratch() -> None:
    os.chdir("/")
    syscalls.unmount(SCRATCH_DIRECTORY)
