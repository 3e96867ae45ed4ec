"""Restrict the process to the named paths by Landlock, irrevocably.

It needs Linux 5.13 or newer, and no privilege.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable

from .syscalls import syscall

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
EXECUTE = 1 << 0
WRITE_FILE = 1 << 1
READ_FILE = 1 << 2
READ_DIR = 1 << 3
TRUNCATE = 1 << 14
FILE_RIGHTS = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE
BASE_RIGHTS = (1 << 13) - 1
# (first ABI version, bit of the right): refer, truncate, ioctl on devices
NEWER_RIGHTS = ((2, 1 << 13), (3, TRUNCATE), (5, 1 << 15))


def get_abi_version() -> int:
    """Return the kernel's Landlock ABI version; 0 if there is no Landlock."""
    try:
        return syscall("landlock", CREATE_RULESET, None, 0, 1)
    except OSError:
        return 0


def get_handled_rights(version: int) -> int:
    return BASE_RIGHTS | sum(right for since, right in NEWER_RIGHTS if version >= since)


def restrict(readable: Iterable[str], writable: Iterable[str], *, executable: bool) -> None:
    """Restrict this process to the named paths. The caller must have set no_new_privs.

    Network and signals are restricted as far as the kernel supports it.
    """
    version = get_abi_version()
    handled = get_handled_rights(version)
    attributes = struct.pack("QQQ", handled, 3 if version >= 4 else 0, 3 if version >= 6 else 0)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    ruleset = syscall("landlock_create_ruleset", CREATE_RULESET, attributes, size, 0)
    read = READ_FILE | READ_DIR | (EXECUTE if executable else 0)
    for path in readable:
        allow_path(ruleset, path, read & handled)
    for path in writable:
        allow_path(ruleset, path, (handled if executable else handled & ~EXECUTE))
    syscall("landlock_restrict_self", RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)


def allow_path(ruleset: int, path: str, rights: int) -> None:
    try:
        target = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:  # a path that is missing or unreachable for this user needs no rule
        return
    if not os.path.isdir(path):
        rights &= FILE_RIGHTS
    rule = struct.pack("=Qi", rights, target)
    syscall(f"landlock_add_rule {path}", ADD_RULE, ruleset, 1, rule, 0)
    os.close(target)
