"""The seccomp filter: system calls that are not allowed here fail with EPERM.

The filter is classic BPF, written by hand without libseccomp. Calls are allowed by name, because
new calls of a new kernel must not be open by default. Numbers are x86-64's; on another machine
`is_available` returns False and the sandbox refuses to start.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import struct
from signal import SIGKILL

from .syscalls import MACHINE, SECCOMP, syscall

LOAD, JUMP_EQUAL, JUMP_SET, JUMP_GE, RETURN, BIT_AND = 0x20, 0x15, 0x45, 0x35, 0x06, 0x54
KILL_PROCESS, ALLOW, FAIL = 0x80000000, 0x7FFF0000, 0x00050000
ARCH_X86_64, X32_BIT = 0xC000003E, 0x40000000
OWN_PID = 0x7E57AB1E  # placeholder that `build_filter` replaces
NAMESPACE_FLAGS, CLONE_THREAD = 0x7E020080, 0x10000
# O_WRONLY, O_RDWR, O_CREAT, O_TRUNC, O_APPEND, O_TMPFILE
WRITING_FLAGS = 0o1 | 0o2 | 0o100 | 0o1000 | 0o2000 | 0o20000000
# (opcode, instructions to skip if the test holds, to skip if it fails, operand)
Instruction = tuple[int, int, int, int]


def parse_table(text: str) -> dict[str, int]:
    return {name: int(number) for name, number in (word.split("=") for word in text.split())}


ALWAYS_ALLOWED = parse_table("""
    read=0 write=1 close=3 stat=4 fstat=5 lstat=6 poll=7 lseek=8 mmap=9 mprotect=10 munmap=11 brk=12 rt_sigaction=13
    rt_sigprocmask=14 rt_sigreturn=15 pread64=17 pwrite64=18 readv=19 writev=20 access=21 pipe=22 select=23 sched_yield=24
    mremap=25 msync=26 mincore=27 madvise=28 dup=32 dup2=33 pause=34 nanosleep=35 getitimer=36 alarm=37 setitimer=38
    getpid=39 sendfile=40 exit=60 uname=63 fsync=74 fdatasync=75 getdents=78 getcwd=79 chdir=80 fchdir=81
    readlink=89 umask=95 gettimeofday=96 getrlimit=97 getrusage=98 sysinfo=99 times=100 getuid=102 getgid=104 geteuid=107
    getegid=108 getppid=110 getpgrp=111 getgroups=115 getresuid=118 getresgid=120 getpgid=121 getsid=124 rt_sigpending=127
    rt_sigtimedwait=128 rt_sigsuspend=130 sigaltstack=131 statfs=137 fstatfs=138 getpriority=140 sched_getparam=143
    sched_getscheduler=145 sched_get_priority_max=146 sched_get_priority_min=147 arch_prctl=158 gettid=186 time=201
    futex=202 sched_getaffinity=204 epoll_create=213 getdents64=217 restart_syscall=219 fadvise64=221 clock_gettime=228
    clock_getres=229 clock_nanosleep=230 exit_group=231 epoll_wait=232 epoll_ctl=233 newfstatat=262 readlinkat=267
    faccessat=269 pselect6=270 ppoll=271 set_robust_list=273 epoll_pwait=281 timerfd_create=283 eventfd=284
    timerfd_settime=286 timerfd_gettime=287 signalfd4=289 eventfd2=290 epoll_create1=291 dup3=292 pipe2=293 preadv=295
    pwritev=296 getcpu=309 getrandom=318 membarrier=324 copy_file_range=326 statx=332 rseq=334 close_range=436
    faccessat2=439 epoll_pwait2=441
    sendto=44 recvfrom=45 shutdown=48 getsockname=51 getpeername=52 getsockopt=55
""")
OPENING = parse_table("open=2 openat=257")
# Allowed if only the scratch directory of the file system is writable.
CHANGING = OPENING | parse_table("""
    truncate=76 ftruncate=77 rename=82 mkdir=83 rmdir=84 creat=85 link=86 unlink=87 symlink=88 chmod=90 fchmod=91
    mkdirat=258 unlinkat=263 renameat=264 linkat=265 symlinkat=266 fchmodat=268 utimensat=280 fallocate=285
    renameat2=316
""")
# Allowed only inside a separate process namespace. make sets its ids to their current values when it starts
# a command; without capabilities no other values can be set.
FORKING = parse_table("""
    fork=57 vfork=58 execve=59 wait4=61 kill=62 setpgid=109 setsid=112 setresuid=117 setresgid=119 setpriority=141
    tgkill=234 waitid=247 execveat=322
""")
# `ls -l` and `cp` read these attributes of every file. No file has any here. The calls fail with
# ENOTSUP, the one error for which these commands print no message.
ATTRIBUTES = parse_table(
    "getxattr=191 lgetxattr=192 fgetxattr=193 listxattr=194 llistxattr=195 flistxattr=196"
)
CLONE, CLONE3, KILL_CALL, TGKILL, FCNTL, IOCTL, PRLIMIT, PRCTL, SOCKETPAIR = (
    56,
    435,
    62,
    234,
    72,
    16,
    302,
    157,
    53,
)
FLOCK = 73
FCNTL_COMMANDS = (0, 1, 2, 3, 4, 1030)  # descriptors and flags; no owners, leases, pipe sizes
# F_GETLK, F_SETLK, F_SETLKW, and their variants for open file descriptions
QUERY_LOCKS, SET_LOCKS = (5, 36), (6, 7, 37, 38)
# TCGETS, window size, FIONREAD, FIONBIO, close-on-exec
IOCTL_COMMANDS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
PRCTL_COMMANDS = (15, 16)  # the name of a thread; not the death signal


def is_available() -> bool:
    return MACHINE == "x86_64"


def return_action(action: int) -> Instruction:
    return (RETURN, 0, 0, action)


def return_error(number: int = errno.EPERM) -> Instruction:
    return return_action(FAIL | number)


def load_argument(index: int) -> Instruction:
    """Return the instruction that loads the low half of an argument.

    The kernel also reads checked arguments as 32-bit.
    """
    return (LOAD, 0, 0, 16 + 8 * index)


def if_call(call: int, body: list[Instruction]) -> list[Instruction]:
    """Return the filter that runs `body` if the system call is `call`.

    `body` must return. It may overwrite the loaded call number, because it returns before another
    instruction reads that number.
    """
    return [(JUMP_EQUAL, 0, len(body), call), *body]


def allow_values(
    index: int, values: tuple[int, ...], error: int = errno.EPERM
) -> list[Instruction]:
    body = [load_argument(index)]
    for value in values:
        body += [(JUMP_EQUAL, 0, 1, value), return_action(ALLOW)]
    return [*body, return_error(error)]


def reject_bits(index: int, bits: int, error: int) -> list[Instruction]:
    return [load_argument(index), (JUMP_SET, 0, 1, bits), return_error(error), return_action(ALLOW)]


def build_lock_filter(can_fork: bool) -> list[Instruction]:
    """Return the filter of file locks.

    All slots share the files of the library, so programs in other slots would see a lock on one. A
    single-process program has no other process to lock out: its locking calls succeed and do
    nothing. It may query the locks of others, as SQLite does before it trusts a shared index;
    programs in other slots hold none.
    """
    if can_fork:
        return if_call(FCNTL, allow_values(1, FCNTL_COMMANDS + QUERY_LOCKS + SET_LOCKS)) + if_call(
            FLOCK, [return_action(ALLOW)]
        )
    granted = return_action(FAIL | 0)  # "fails" with error 0: the call returns 0 and does nothing
    setting = [step for command in SET_LOCKS for step in ((JUMP_EQUAL, 0, 1, command), granted)]
    allowing = [
        step
        for command in FCNTL_COMMANDS + QUERY_LOCKS
        for step in ((JUMP_EQUAL, 0, 1, command), return_action(ALLOW))
    ]
    return if_call(FCNTL, [load_argument(1), *setting, *allowing, return_error()]) + if_call(
        FLOCK, [granted]
    )


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
def build_filter_template(level: int, can_fork: bool) -> bytes:
    """Return the filter with a placeholder for the process id.

    It is cached, since building it takes as long as the rest of a child's start.
    """
    code: list[Instruction] = [
        (LOAD, 0, 0, 4),
        (JUMP_EQUAL, 1, 0, ARCH_X86_64),
        return_action(KILL_PROCESS),
    ]
    code += [(LOAD, 0, 0, 0), (JUMP_GE, 0, 1, X32_BIT), return_action(KILL_PROCESS)]
    threads_only = [
        load_argument(0),
        (JUMP_SET, 0, 1, NAMESPACE_FLAGS),
        return_error(),
        (JUMP_SET, 0, 1, CLONE_THREAD),
        return_action(ALLOW),
        return_error(),
    ]
    code += if_call(
        CLONE, reject_bits(0, NAMESPACE_FLAGS, errno.EPERM) if can_fork else threads_only
    )
    for call in ATTRIBUTES.values():
        code += if_call(call, [return_error(errno.ENOTSUP)])
    # The flags of clone3 lie in memory, which a filter can't read; glibc falls back to clone.
    code += if_call(CLONE3, [return_error(errno.ENOSYS)])
    code += build_lock_filter(can_fork) + if_call(
        IOCTL, allow_values(1, IOCTL_COMMANDS, errno.ENOTTY)
    )
    code += if_call(PRCTL, allow_values(0, PRCTL_COMMANDS))
    # Only AF_UNIX with SOCK_STREAM, which asyncio uses to wake itself: such a pair stays connected
    # to itself, so it leads nowhere.
    socketpair_rules = [
        load_argument(0),
        (JUMP_EQUAL, 1, 0, 1),
        return_error(),
        load_argument(1),
        (BIT_AND, 0, 0, 0xF),  # without the flags of the socket's type
        (JUMP_EQUAL, 1, 0, 1),
        return_error(),
        return_action(ALLOW),
    ]
    code += if_call(SOCKETPAIR, socketpair_rules)
    # prlimit may only read the caller's own limits: pid 0, and a null pointer (both halves) to new
    # limits.
    requires_zeros = [
        step
        for word in (16, 32, 36)
        for step in ((LOAD, 0, 0, word), (JUMP_EQUAL, 1, 0, 0), return_error())
    ]
    code += if_call(PRLIMIT, [*requires_zeros, return_action(ALLOW)])
    allowed = dict(ALWAYS_ALLOWED)
    if can_fork:
        allowed |= FORKING
    else:
        code += if_call(KILL_CALL, allow_signals_to_self(1)) + if_call(
            TGKILL, allow_signals_to_self(2)
        )
    if level >= 3:
        allowed |= CHANGING
    elif level == 2:  # Landlock checks opened files, but not changes of modes and times
        allowed |= OPENING
    else:
        code += if_call(OPENING["open"], reject_bits(1, WRITING_FLAGS, errno.EACCES)) + if_call(
            OPENING["openat"], reject_bits(2, WRITING_FLAGS, errno.EACCES)
        )
    for number in allowed.values():
        code += if_call(number, [return_action(ALLOW)])
    code.append(return_error())
    return b"".join(struct.pack("HBBI", kind, yes, no, value) for kind, yes, no, value in code)


def install(filters: bytes) -> None:
    """Install the filter for all threads, irrevocably. The caller must have set no_new_privs."""
    buffer = ctypes.create_string_buffer(filters, len(filters))
    header = struct.pack("HxxxxxxQ", len(filters) // 8, ctypes.addressof(buffer))
    syscall("seccomp", SECCOMP, 1, 1, header)
