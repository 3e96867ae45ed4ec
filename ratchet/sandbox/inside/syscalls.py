"""System calls that Python's `os` does not offer, made with ctypes.

Every failure raises an OSError that names the call.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct

LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.syscall.restype = ctypes.c_long

NEWNS = 0x20000
NEWUTS = 0x4000000
NEWIPC = 0x8000000
NEWUSER = 0x10000000
NEWPID = 0x20000000
NEWNET = 0x40000000
MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MS_BIND = 4096
MS_REC = 16384
MS_PRIVATE = 1 << 18
MOUNT_ATTR_RDONLY = 1
MOUNT_ATTR_NOSUID = 2
MOUNT_ATTR_NODEV = 4
MOUNT_ATTR_NOEXEC = 8
AT_FDCWD, AT_RECURSIVE, MNT_DETACH = -100, 0x8000, 2
PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_NO_NEW_PRIVS = 38
CAP_SETGID, CAP_SETUID, CAP_SYS_ADMIN = 6, 7, 21
CAPABILITY_HEADER = struct.pack("Ii", 0x20080522, 0)

# System calls numbered 424 and above have the same number on every architecture.
FSOPEN = 430
FSCONFIG = 431
FSMOUNT = 432
MOUNT_SETATTR = 442
MACHINE = platform.machine()
# The numbers of older system calls differ: x86_64 has its own, aarch64 has the generic numbers.
PIVOT_ROOT, SECCOMP = (155, 317) if MACHINE == "x86_64" else (41, 277)


def check_result(result: int, call: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")
    return result


def syscall(call: str, number: int, *arguments: int | bytes | None) -> int:
    """Call the kernel. Integers are passed as 64 bits, bytes as a pointer to them."""
    wide = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    return check_result(LIBC.syscall(ctypes.c_long(number), *wide), call)


def unshare(flags: int) -> None:
    check_result(LIBC.unshare(flags), "unshare")


def mount(source: str, target: str, kind: str | None, flags: int, data: str = "") -> None:
    pointers = [text.encode() if text is not None else None for text in (source, target, kind)]
    check_result(LIBC.mount(*pointers, ctypes.c_ulong(flags), data.encode()), f"mount {target}")


def unmount(target: str, flags: int = 0) -> None:
    check_result(LIBC.umount2(target.encode(), flags), f"umount {target}")


def make_read_only(path: str, *, recursive: bool) -> None:
    """Make a mount read-only; `recursive` includes its submounts, which a remount leaves writable.

    The call only adds restrictions, so it works even if some of the mount's flags are locked.
    """
    attributes = struct.pack(
        "QQQQ", MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV, 0, 0, 0
    )
    flags = AT_RECURSIVE if recursive else 0
    syscall(
        f"mount_setattr {path}",
        MOUNT_SETATTR,
        AT_FDCWD,
        path.encode(),
        flags,
        attributes,
        len(attributes),
    )


def pivot_root() -> None:
    """Make the current directory, which must be a mount point, the new root.

    The old root, with everything mounted on it, is detached.
    """
    syscall("pivot_root", PIVOT_ROOT, b".", b".")
    unmount(".", MNT_DETACH)
    os.chdir("/")


def open_detached_proc() -> int:
    """Return a descriptor of a /proc of this process namespace.

    It is attached to no path, so no program can walk to it.
    """
    # 1: FSOPEN_CLOEXEC and FSMOUNT_CLOEXEC, 6: FSCONFIG_CMD_CREATE.
    context = syscall("fsopen proc", FSOPEN, b"proc", 1)
    try:
        syscall("fsconfig proc", FSCONFIG, context, 6, None, None, 0)
        mounted = syscall(
            "fsmount proc",
            FSMOUNT,
            context,
            1,
            MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC,
        )
    finally:
        os.close(context)
    try:
        return os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=mounted)
    finally:
        os.close(mounted)


def prctl(option: int, value: int) -> None:
    check_result(LIBC.prctl(option, ctypes.c_ulong(value), 0, 0, 0), "prctl")


def has_capability(capability: int) -> bool:
    data = ctypes.create_string_buffer(24)
    check_result(LIBC.capget(CAPABILITY_HEADER, data), "capget")
    return bool(struct.unpack("I", data.raw[:4])[0] >> capability & 1)


def drop_capabilities() -> None:
    check_result(LIBC.capset(CAPABILITY_HEADER, bytes(24)), "capset")
