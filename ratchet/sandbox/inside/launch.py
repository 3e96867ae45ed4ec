"""Find the strongest isolation that this machine grants, enter it, and start the zygote.

`main` is the entry point of a sandbox's process.

Each level is first tried in full in a throwaway process. Some machines grant a namespace but refuse
the calls that make it useful, and a sandbox must never be weaker than it reports. If entering the
level then fails after all, the launch fails.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import stat
import sys
import sysconfig
from collections.abc import Callable, Sequence
from typing import Any

from . import child, landlock, rootfs, seccomp, syscalls, zygote

# Modules that programs use often, imported before the zygote forks.
PRELOADED = """
    abc array ast atexit base64 bisect calendar cmath collections collections.abc contextlib copy
    csv dataclasses datetime
    decimal enum fractions functools hashlib heapq inspect io itertools json linecache math numbers
    operator pprint queue
    random re secrets site statistics string struct textwrap threading time traceback types typing
    unicodedata uuid
"""
MULTIARCH = (
    f"/lib/{syscalls.MACHINE}-linux-gnu",
    f"/usr/lib/{syscalls.MACHINE}-linux-gnu",
    "/lib64",
    "/usr/lib64",
    "/lib",
    "/etc/ld.so.cache",
)


def main(control: int, options: dict[str, Any]) -> None:
    """Enter the isolation and serve requests.

    Args:
        control: Descriptor of the control socket.
        options: `trainer_pid`; `trainer_directory`, its working directory; `at_most`, the highest
            level to try; `readable`, paths that programs may read besides the library.
    """
    channel = socket.socket(fileno=control)
    try:
        trainer = open_trainer(options["trainer_pid"])
        prefer_for_oom_kill()
        os.umask(0o022)  # a fixed one, not the trainer's
        zygote.ignore_stop_signals()
        readable = tuple(options["readable"])
        sources = list_bound_paths(readable)
        hidden = list_hidden_paths(options["trainer_directory"], sources, readable)
        level, refused = find_strongest_level(options["at_most"], sources, hidden)
        if level == 0:
            raise RuntimeError("; ".join(refused))
        # Cache the filter, so that forked programs need not build it.
        seccomp.build_filter_template(level, False)
        for name in PRELOADED.split():
            __import__(name)
        sys.path.extend(readable)
        sys.dont_write_bytecode = True
        granted = child.GrantedIsolation(
            level, list_library_paths(), readable, find_unused_uid(level, readable)
        )
        if level >= 3:
            rootfs.enter()
            zygote_pid = os.fork()
            if zygote_pid:
                channel.close()
                wait_for_zygote(zygote_pid, trainer)  # does not return
            syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
        proc = rootfs.build(sources, hidden) if level >= 3 else None
        channel.send(
            json.dumps(
                {"level": level, "refused": refused, "by": list_mechanisms(granted)}
            ).encode()
        )
    except Exception as error:
        channel.send(json.dumps({"error": f"{type(error).__name__}: {error}"}).encode())
        os._exit(1)
    zygote.serve(channel.detach(), trainer, granted, proc)


def open_trainer(pid: int) -> int:
    """Return a pidfd of the trainer, or exit if the trainer is already dead.

    A parent-death signal does not suffice: it is sent when the *thread* that started this process
    ends.
    """
    pidfd = os.pidfd_open(pid)
    if os.getppid() != pid:
        os._exit(0)
    return pidfd


def prefer_for_oom_kill() -> None:
    """Make the kernel kill sandboxed programs, not the trainer, when memory runs out."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")


def wait_for_zygote(zygote_pid: int, trainer: int) -> None:
    """Wait until the zygote or the trainer ends, then exit.

    The launcher stays because a process can't move itself into its new process namespace. The
    zygote is process 1 of that namespace, so the kernel kills all programs when it ends. If the
    trainer ends first, the launcher kills the zygote.
    """
    poll = select.poll()
    for pidfd in (trainer, os.pidfd_open(zygote_pid)):
        poll.register(pidfd, select.POLLIN)
    if [pidfd for pidfd, _ in poll.poll()] == [trainer]:
        os.kill(zygote_pid, signal.SIGKILL)
    os.waitpid(zygote_pid, 0)
    os._exit(0)


def list_bound_paths(readable: Sequence[str]) -> list[str]:
    """Return the paths to bind into the root, without those inside another bound path."""
    paths: list[str] = []
    for path in [*rootfs.SYSTEM_PATHS, sys.base_prefix, *readable]:
        if not any(path == outer or path.startswith(outer + "/") for outer in paths):
            paths.append(path)
    return paths


def list_hidden_paths(
    trainer_directory: str, sources: Sequence[str], readable: Sequence[str]
) -> list[str]:
    """Return the directories inside bound paths that programs must find empty.

    These are directories of sources, and the trainer's working directory: a project below /usr
    holds the tests of its tasks. A directory that the system, Python or `readable` needs is not
    hidden.
    """
    system = [
        f"{root}/{name}"
        for root in ("/usr", "/usr/local", sys.base_prefix)
        for name in ("bin", "sbin", "lib", "lib64", "libexec", "include", "share")
    ]
    needed = [*system, *list_library_paths(), sys.base_prefix, *readable]
    hidden: list[str] = []
    for path in (*rootfs.SOURCE_PATHS, trainer_directory):
        if (
            os.path.isdir(path)
            and not os.path.islink(path)
            and any(path.startswith(source + "/") for source in sources)
            and not any(other == path or other.startswith(path + "/") for other in needed)
            and not any(path == outer or path.startswith(outer + "/") for outer in hidden)
        ):
            hidden.append(path)
    return hidden


def list_library_paths() -> tuple[str, ...]:
    """Return the paths that a program must be able to read.

    These are the standard library and the libraries that its extension modules are linked to.
    """
    paths = {path for name in ("stdlib", "platstdlib") if (path := sysconfig.get_path(name))}
    libdir = sysconfig.get_config_var("LIBDIR")
    return (
        *sorted(paths),
        *((libdir,) if libdir and libdir.startswith(sys.base_prefix) else ()),
        *MULTIARCH,
    )


def find_strongest_level(
    at_most: int, sources: list[str], hidden: list[str]
) -> tuple[int, list[str]]:
    """Return the strongest level up to `at_most` that is granted, and why others were refused."""
    if not seccomp.is_available():
        machines = " and ".join(seccomp.NUMBERS_BY_MACHINE)
        return 0, [f"no system call filter for {syscalls.MACHINE}; Ratchet has one for {machines}"]
    refused: list[str] = []
    if reason := try_in_child(try_filter):
        return 0, [f"seccomp: {reason}"]
    if at_most >= 3:
        reason = try_in_child(lambda: try_namespaces(sources, hidden))
        if not reason:
            return 3, refused
        refused.append(f"namespaces: {reason}")
    if at_most >= 2:
        if landlock.get_abi_version():
            return 2, refused
        refused.append("Landlock: not in this kernel, or switched off")
    return 1, refused


def try_in_child(function: Callable[[], None]) -> str:
    """Run `function` in a separate process. Return why it failed, or "" if it succeeded."""
    read_end, write_end = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        try:
            function()
            os.write(write_end, b"ok")
        except BaseException as error:
            os.write(write_end, f"{error}"[:400].encode())
        os._exit(0)
    os.close(write_end)
    answer = os.read(read_end, 500).decode()
    os.close(read_end)
    os.waitpid(pid, 0)
    return "" if answer == "ok" else answer or "killed"


def try_filter() -> None:
    syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
    seccomp.install(seccomp.build_filter(os.getpid(), 1, False))


def try_namespaces(sources: list[str], hidden: list[str]) -> None:
    def inside() -> None:
        rootfs.build(sources, hidden)
        rootfs.mount_scratch(1, 0, executable=False)

    rootfs.enter()
    if reason := try_in_child(inside):
        raise RuntimeError(reason)


def find_unused_uid(level: int, readable: Sequence[str]) -> int:
    """Return an unused uid for programs if this process is root; 0 if not, or if none can be used.

    File permissions and limits on processes don't bind uid 0.
    """
    if os.getuid() != 0 or not (
        syscalls.has_capability(syscalls.CAP_SETUID)
        and syscalls.has_capability(syscalls.CAP_SETGID)
    ):
        return 0
    if level < 3 and not all(
        is_open_to_others(path) for path in (sysconfig.get_path("stdlib"), *readable)
    ):
        return 0  # another user could not import from a Python that only root can read
    for uid in (child.SCRATCH_UID + os.getpid(), child.NARROW_UID + os.getpid() % 500):
        if not try_in_child(lambda uid=uid: os.setresuid(uid, uid, uid)):
            return uid
    return 0


def is_open_to_others(path: str) -> bool:
    parts = path.split("/")
    return all(
        os.stat("/".join(parts[:i]) or "/").st_mode & stat.S_IXOTH for i in range(1, len(parts) + 1)
    )


def list_mechanisms(granted: child.GrantedIsolation) -> list[str]:
    names = ["resource limits", "seccomp", "no capabilities"]
    if granted.level >= 2 and landlock.get_abi_version():
        names.append(f"Landlock ABI {landlock.get_abi_version()}")
    if granted.level >= 3:
        names.append("process, network, IPC and mount namespaces")
    if granted.program_uid:
        names.append(f"uid {granted.program_uid}")
    return names
