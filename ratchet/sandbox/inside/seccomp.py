"""The seccomp filter: system calls that are not allowed here fail with EPERM.

The filter is classic BPF, written by hand without libseccomp. Calls are allowed by name, because
new calls of a new kernel must not be open by default. On a machine whose numbers `syscall_numbers`
lacks, `is_available` returns False and the sandbox refuses to start.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import resource
import struct
from collections.abc import Mapping
from signal import SIGKILL

from .syscall_numbers import NUMBERS_BY_MACHINE
from .syscalls import MACHINE, SECCOMP, syscall

LOAD = 0x20
JUMP_EQUAL = 0x15
JUMP_SET = 0x45
JUMP_GE = 0x35
RETURN = 0x06
BIT_AND = 0x54
KILL_PROCESS = 0x80000000
ALLOW = 0x7FFF0000
FAIL = 0x00050000
# The kernel's names of the machines, AUDIT_ARCH_*
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
X32_BIT = 0x40000000  # set in the numbers of x86-64's calls with 32-bit pointers
OWN_PID = 0x7E57AB1E  # placeholder that `build_filter` replaces
NAMESPACE_FLAGS, CLONE_THREAD = 0x7E020080, 0x10000
# O_WRONLY, O_RDWR, O_CREAT, O_TRUNC, O_APPEND, O_TMPFILE
WRITING_FLAGS = 0o1 | 0o2 | 0o100 | 0o1000 | 0o2000 | 0o20000000
# (opcode, instructions to skip if the test holds, to skip if it fails, operand)
Instruction = tuple[int, int, int, int]


def list_names(text: str) -> list[str]:
    """Return the names of system calls in a text, in which spaces separate them."""
    return text.split()


ALWAYS_ALLOWED = list_names("""
    read write close stat fstat lstat poll lseek mmap mprotect munmap brk rt_sigaction
    rt_sigprocmask rt_sigreturn pread64 pwrite64 readv writev access pipe select sched_yield
    mremap msync mincore madvise dup dup2 pause nanosleep getitimer alarm setitimer getpid
    sendfile exit uname fsync fdatasync getdents getcwd chdir fchdir readlink umask gettimeofday
    getrlimit getrusage sysinfo times getuid getgid geteuid getegid getppid getpgrp getgroups
    getresuid getresgid getpgid getsid rt_sigpending rt_sigtimedwait rt_sigsuspend sigaltstack
    statfs fstatfs getpriority sched_getparam sched_getscheduler sched_get_priority_max
    sched_get_priority_min arch_prctl gettid time futex sched_getaffinity epoll_create
    getdents64 restart_syscall fadvise64 clock_gettime clock_getres clock_nanosleep exit_group
    epoll_wait epoll_ctl newfstatat readlinkat faccessat pselect6 ppoll set_robust_list
    epoll_pwait timerfd_create eventfd timerfd_settime timerfd_gettime signalfd4 eventfd2
    epoll_create1 dup3 pipe2 preadv pwritev getcpu getrandom membarrier copy_file_range statx
    rseq close_range faccessat2 epoll_pwait2 sendto recvfrom shutdown getsockname getpeername
    getsockopt
""")
OPENING = ["open", "openat"]
# Allowed if only the scratch directory of the file system is writable.
CHANGING = list_names("""
    truncate ftruncate rename mkdir rmdir creat link unlink symlink chmod fchmod mkdirat
    unlinkat renameat linkat symlinkat fchmodat utimensat fallocate renameat2
""")
# Allowed only inside a separate process namespace. `make` sets its ids to their current values when
# it starts a command; without capabilities no other values can be set.
FORKING = list_names("""
    fork vfork execve wait4 kill setpgid setsid setresuid setresgid setpriority tgkill waitid
    execveat
""")
# `ls -l` and `cp` read these attributes of every file. No file has any here. The calls fail with
# ENOTSUP, the one error for which these commands print no message.
ATTRIBUTES = list_names("getxattr lgetxattr fgetxattr listxattr llistxattr flistxattr")
FCNTL_COMMANDS = (0, 1, 2, 3, 4, 1030)  # descriptors and flags; no owners, leases, pipe sizes
# F_GETLK, F_SETLK, F_SETLKW, and their variants for open file descriptions
QUERY_LOCKS, SET_LOCKS = (5, 36), (6, 7, 37, 38)
# TCGETS, window size, FIONREAD, FIONBIO, close-on-exec
IOCTL_COMMANDS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
PRCTL_COMMANDS = (15, 16)  # the name of a thread; not the death signal


def is_available() -> bool:
    return MACHINE in NUMBERS_BY_MACHINE


def return_action(action: int) -> Instruction:
    return (RETURN, 0, 0, action)


def return_error(number: int = errno.EPERM) -> Instruction:
    return return_action(FAIL | number)


def load_argument(index: int) -> Instruction:
    """Return the instruction that loads the low half of an argument.

    The kernel too reads the arguments that are checked here as 32-bit numbers.
    """
    return (LOAD, 0, 0, 16 + 8 * index)


def if_call(call: int | None, body: list[Instruction]) -> list[Instruction]:
    """Return the filter that runs `body` if the system call is `call`.

    `call` is None on a machine without the call: the filter is then empty. `body` must return. It
    may overwrite the loaded call number, because it returns before another instruction reads that
    number.
    """
    return [] if call is None else [(JUMP_EQUAL, 0, len(body), call), *body]


def allow_values(
    index: int, values: tuple[int, ...], error: int = errno.EPERM
) -> list[Instruction]:
    body = [load_argument(index)]
    for value in values:
        body += [(JUMP_EQUAL, 0, 1, value), return_action(ALLOW)]
    return [*body, return_error(error)]


def reject_bits(index: int, bits: int, error: int) -> list[Instruction]:
    return [load_argument(index), (JUMP_SET, 0, 1, bits), return_error(error), return_action(ALLOW)]


def build_lock_filter(numbers: Mapping[str, int], can_fork: bool) -> list[Instruction]:
    """Return the filter of file locks.

    All slots share the files of the library, so programs in other slots would see a lock on one. A
    single-process program has no other process to lock out: its locking calls succeed and do
    nothing. It may query the locks of others, as SQLite does before it trusts a shared index;
    programs in other slots hold none.
    """
    if can_fork:
        commands = FCNTL_COMMANDS + QUERY_LOCKS + SET_LOCKS
        return if_call(numbers["fcntl"], allow_values(1, commands)) + if_call(
            numbers["flock"], [return_action(ALLOW)]
        )
    granted = return_action(FAIL | 0)  # "fails" with error 0: the call returns 0 and does nothing
    setting = [step for command in SET_LOCKS for step in ((JUMP_EQUAL, 0, 1, command), granted)]
    allowing = [
        step
        for command in FCNTL_COMMANDS + QUERY_LOCKS
        for step in ((JUMP_EQUAL, 0, 1, command), return_action(ALLOW))
    ]
    steps = [load_argument(1), *setting, *allowing, return_error()]
    return if_call(numbers["fcntl"], steps) + if_call(numbers["flock"], [granted])


def allow_unix_streams() -> list[Instruction]:
    """Return the filter that lets socketpair make AF_UNIX sockets of SOCK_STREAM only.

    asyncio wakes itself by such a pair. It stays connected to itself, so it leads nowhere.
    """
    return [
        load_argument(0),
        (JUMP_EQUAL, 1, 0, 1),
        return_error(),
        load_argument(1),
        (BIT_AND, 0, 0, 0xF),  # without the flags of the socket's type
        (JUMP_EQUAL, 1, 0, 1),
        return_error(),
        return_action(ALLOW),
    ]


def build_limit_filter() -> list[Instruction]:
    """Return the filter that lets prlimit read the caller's limits.

    Setting the stack's succeeds and does nothing, because programs with deep recursion do it.
    Setting another limit fails. The process id must be 0. A call that sets a limit must not ask for
    the previous one (a null pointer, in both halves).
    """
    return [
        load_argument(0),
        (JUMP_EQUAL, 1, 0, 0),
        return_error(),
        (LOAD, 0, 0, 32),
        (JUMP_EQUAL, 0, 3, 0),
        (LOAD, 0, 0, 36),
        (JUMP_EQUAL, 0, 1, 0),
        return_action(ALLOW),
        load_argument(1),
        (JUMP_EQUAL, 1, 0, resource.RLIMIT_STACK),
        return_error(),
        load_argument(3),
        (JUMP_EQUAL, 1, 0, 0),
        return_error(),
        (LOAD, 0, 0, 44),
        (JUMP_EQUAL, 1, 0, 0),
        return_error(),
        return_action(FAIL | 0),
    ]


def allow_signals_to_self(index: int) -> list[Instruction]:
    """Return the filter that lets a single-process program send signals only to itself.

    A program that sends itself SIGKILL is killed by the filter with SIGSYS instead. So a program
    that died of SIGKILL was killed from outside (out of memory, for example), and must not be
    judged.

    Args:
        index: The position of the argument that holds the signal.
    """
    to_itself = [load_argument(0), (JUMP_EQUAL, 1, 0, OWN_PID), return_error()]
    return [
        *to_itself,
        load_argument(index),
        (JUMP_EQUAL, 0, 1, SIGKILL),
        return_action(KILL_PROCESS),
        return_action(ALLOW),
    ]


def build_filter(pid: int, level: int, can_fork: bool) -> bytes:
    """Return the filter of a program whose process id, as the program sees it, is `pid`."""
    return build_filter_template(level, can_fork).replace(
        struct.pack("I", OWN_PID), struct.pack("I", pid)
    )


@functools.cache
def build_filter_template(level: int, can_fork: bool, machine: str = MACHINE) -> bytes:
    """Return the filter with a placeholder for the process id.

    It is cached, since building it takes as long as the rest of a child's start.
    """
    numbers = NUMBERS_BY_MACHINE[machine]
    code: list[Instruction] = [
        (LOAD, 0, 0, 4),
        (JUMP_EQUAL, 1, 0, ARCHITECTURES[machine]),
        return_action(KILL_PROCESS),
        (LOAD, 0, 0, 0),
    ]
    if machine == "x86_64":
        code += [(JUMP_GE, 0, 1, X32_BIT), return_action(KILL_PROCESS)]
    threads_only = [
        load_argument(0),
        (JUMP_SET, 0, 1, NAMESPACE_FLAGS),
        return_error(),
        (JUMP_SET, 0, 1, CLONE_THREAD),
        return_action(ALLOW),
        return_error(),
    ]
    code += if_call(
        numbers["clone"], reject_bits(0, NAMESPACE_FLAGS, errno.EPERM) if can_fork else threads_only
    )
    for name in ATTRIBUTES:
        code += if_call(numbers[name], [return_error(errno.ENOTSUP)])
    # The flags of clone3 lie in memory, which a filter can't read; glibc falls back to clone.
    code += if_call(numbers["clone3"], [return_error(errno.ENOSYS)])
    code += build_lock_filter(numbers, can_fork) + if_call(
        numbers["ioctl"], allow_values(1, IOCTL_COMMANDS, errno.ENOTTY)
    )
    code += if_call(numbers["prctl"], allow_values(0, PRCTL_COMMANDS))
    code += if_call(numbers["socketpair"], allow_unix_streams())
    code += if_call(numbers["prlimit64"], build_limit_filter())
    allowed = list(ALWAYS_ALLOWED)
    if can_fork:
        allowed += FORKING
    else:
        code += if_call(numbers["kill"], allow_signals_to_self(1))
        code += if_call(numbers["tgkill"], allow_signals_to_self(2))
    if level >= 3:
        allowed += OPENING + CHANGING
    elif level == 2:  # Landlock checks opened files, but not changes of modes and times
        allowed += OPENING
    else:
        code += if_call(numbers.get("open"), reject_bits(1, WRITING_FLAGS, errno.EACCES))
        code += if_call(numbers["openat"], reject_bits(2, WRITING_FLAGS, errno.EACCES))
    for name in allowed:
        code += if_call(numbers.get(name), [return_action(ALLOW)])
    code.append(return_error())
    return b"".join(struct.pack("HBBI", kind, yes, no, value) for kind, yes, no, value in code)


def install(filters: bytes) -> None:
    """Install the filter for all threads, irrevocably. The caller must have set no_new_privs."""
    buffer = ctypes.create_string_buffer(filters, len(filters))
    header = struct.pack("HxxxxxxQ", len(filters) // 8, ctypes.addressof(buffer))
    syscall("seccomp", SECCOMP, 1, 1, header)
