"""Run one program: a process forked from the zygote drops its privileges and runs the program."""

from __future__ import annotations

import atexit
import gc
import json
import linecache
import os
import random
import resource
import signal
import site
import sys
import threading
import traceback
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from . import landlock, rootfs, seccomp, syscalls

STATUS, FIRST_UNUSED = 3, 4  # file descriptors
FILE_NAME = "main.py"
STREAMS = (
    ("stdin", 0, "r", "surrogateescape"),
    ("stdout", 1, "w", "surrogateescape"),
    ("stderr", 2, "w", "backslashreplace"),
)
STACK_BYTES = 64 << 20
# Signals that the zygote ignores and blocks: the trainer handles them.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
MAX_DESCRIPTORS = 64
# uids without an account; the second is for containers that map only 16 bits of ids
SCRATCH_UID, NARROW_UID = 0x20000000, 65000


@dataclass(frozen=True)
class GrantedIsolation:
    """The isolation that the launcher found on this machine."""

    level: int
    """Value of `ratchet.sandbox.base.Isolation`: 1 seccomp, 2 Landlock, 3 namespaces."""
    library: tuple[str, ...]
    """Paths of the Python library."""
    readable: tuple[str, ...]
    """Further paths that programs can read."""
    program_uid: int
    """Uid of programs; 0: the uid of this process."""


@dataclass(frozen=True)
class Request:
    """The limits of one execution."""

    wall_s: float
    cpu_s: int
    memory_mib: int
    disk_mib: int
    processes: int
    threads: int
    is_command: bool
    """True if the program is a command (a JSON list of its words), not Python source."""
    executable: bool
    """True if files of the scratch directory can be executed."""

    @property
    def can_fork(self) -> bool:
        return self.processes > 1 or self.is_command


def become_program(
    request: Request, granted: GrantedIsolation, zygote: int, files: list[int]
) -> NoReturn:
    """Turn this process into the program.

    The status file gets "ready", or the reason why the program could not be started.

    Args:
        files: Descriptors of program, stdin, stdout, stderr and status.
    """
    program, stdin, stdout, stderr, status = files
    try:
        os.setsid()
        source = os.pread(program, os.fstat(program).st_size, 0)
        # Copy all descriptors first, as a dup2 could close one that a later dup2 needs.
        for target, copied_file in enumerate(
            [os.dup(file) for file in (stdin, stdout, stderr, status)]
        ):
            os.dup2(copied_file, target, inheritable=target != STATUS)
        status = STATUS
        os.closerange(FIRST_UNUSED, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        restore_signals(request)
        confine(request, granted, zygote)
        os.write(status, b"ready")
    except BaseException as error:
        os.write(status, f"{type(error).__name__}: {error}"[:500].encode())
        os._exit(125)
    if request.is_command:
        run_command(json.loads(source))
    os.close(STATUS)
    run_source(source)


def restore_signals(request: Request) -> None:
    """Restore the handling of signals that the zygote and Python ignore.

    A command gets the default handling of all these signals. A Python program gets it only for
    signals that it may send to itself or its processes. A program of one process still ignores
    SIGTERM and SIGHUP unless it handles them: a service manager that stops the trainer sends them
    to every process, and that would look like a crash of the program. With several processes,
    `kill` and `Process.terminate` must work, and the zygote detects a signal from outside.
    """
    if request.can_fork:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if request.is_command:
        for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
    else:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def confine(request: Request, granted: GrantedIsolation, zygote: int) -> None:
    """Limit this process's resources and rights, irrevocably. `zygote` is the parent's pid."""
    is_in_namespaces = granted.level >= 3
    limit_resources(request, granted)
    if granted.program_uid:
        os.setgroups([])
        os.setresgid(granted.program_uid, granted.program_uid, granted.program_uid)
        os.setresuid(granted.program_uid, granted.program_uid, granted.program_uid)
    syscalls.drop_capabilities()
    # Changing ids clears the parent-death signal, so it is set afterwards. If the zygote has died
    # before this call, no signal will come.
    syscalls.prctl(syscalls.PR_SET_PDEATHSIG, 9)
    if os.getppid() != zygote:
        os._exit(125)
    syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)
    if granted.level >= 2 and (not is_in_namespaces or landlock.get_abi_version()):
        readable = [*granted.library, *granted.readable, "/dev/zero", "/dev/random", "/dev/urandom"]
        if request.can_fork:
            readable += [*rootfs.SYSTEM_PATHS, sys.base_prefix]
        writable = ["/dev/null", *([rootfs.SCRATCH_DIRECTORY] if is_in_namespaces else [])]
        landlock.restrict(readable, writable, executable=request.can_fork)
    seccomp.install(seccomp.build_filter(os.getpid(), granted.level, request.can_fork))


def limit_resources(request: Request, granted: GrantedIsolation) -> None:
    memory = request.memory_mib << 20
    limits = {
        resource.RLIMIT_AS: memory,
        # The soft and hard limits are equal, so the kernel sends SIGKILL, which can't be handled.
        resource.RLIMIT_CPU: request.cpu_s,
        resource.RLIMIT_FSIZE: request.disk_mib << 20,
        resource.RLIMIT_NOFILE: MAX_DESCRIPTORS,
        resource.RLIMIT_STACK: min(STACK_BYTES, memory),
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
    }
    # Without a uid or user namespace of its own, the trainer's threads would count too.
    if granted.program_uid or granted.level >= 3:
        # In a user namespace the kernel also counts the zygote and its launcher.
        other_processes = 0 if granted.program_uid else 2
        limits[resource.RLIMIT_NPROC] = (
            request.processes if request.can_fork else request.threads
        ) + other_processes
    for resource_kind, value in limits.items():
        ceiling = resource.getrlimit(resource_kind)[1]
        value = value if ceiling == resource.RLIM_INFINITY else min(value, ceiling)
        resource.setrlimit(resource_kind, (value, value))


def run_command(words: list[str]) -> NoReturn:
    reason = "no such command"
    for directory in [""] if "/" in words[0] else os.environ["PATH"].split(":"):
        try:
            os.execv(os.path.join(directory, words[0]), words)
        except OSError as error:
            reason = error.strerror
    os.write(2, f"{words[0]}: {reason}\n".encode())
    os._exit(127)


def run_source(source: bytes, exit_function: Callable[[int], NoReturn] = os._exit) -> NoReturn:
    """Run the source as `python main.py` would, and exit with its code.

    Streams, __main__, tracebacks, threads, exit handlers and exit codes are the same as there.

    Args:
        exit_function: os._exit, bound before the program can replace it. If exiting failed, the
            process would return into the code of the fork server.
    """
    main = types.ModuleType("__main__")
    prepare_interpreter(main, source)
    code = 1
    try:
        exec(compile(source, FILE_NAME, "exec", dont_inherit=True), main.__dict__)
        code = 0
    except SystemExit as stop:
        code = get_exit_code(stop)
    except BaseException as error:
        print_error(error)
    exit_function(shut_down(code))


def prepare_interpreter(main: types.ModuleType, source: bytes) -> None:
    sys.modules["__main__"] = main
    main.__dict__["__file__"] = FILE_NAME
    main.__dict__["__builtins__"] = sys.modules["builtins"]
    sys.argv[:] = [FILE_NAME]
    # Those of the fork server name the trainer's process and a descriptor: other ones in each slot.
    sys.orig_argv[:] = [sys.executable, FILE_NAME]
    for name, file, mode, errors in STREAMS:
        buffering = 1 if file == 2 else -1
        options = {"encoding": "utf-8", "errors": errors, "closefd": False, "buffering": buffering}
        stream = open(file, mode, **options)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    site.setquit()  # define quit() and exit(), which `python -S` does not
    lines = source.decode("utf-8", "replace").splitlines(keepends=True)
    # Tracebacks read source lines from this cache.
    linecache.cache[FILE_NAME] = (len(source), None, lines, FILE_NAME)
    random.seed(0)  # each fork is reseeded by Python, but a verdict must not depend on chance
    # The collector's counts decide when cycles are collected: they begin the same in each program.
    gc.collect(0)
    gc.unfreeze()
    gc.enable()


def get_exit_code(stop: SystemExit) -> int:
    if stop.code is None:
        return 0
    if isinstance(stop.code, int):
        return stop.code & 255
    sys.stderr.write(f"{stop.code}\n")
    return 1


def print_error(error: BaseException) -> None:
    """Print the traceback of `error` without this module's frame.

    sys.__excepthook__ reads the source from disk, where it isn't; `traceback` uses linecache.
    """
    error.__traceback__ = error.__traceback__.tb_next if error.__traceback__ else None
    try:
        if sys.excepthook is sys.__excepthook__:
            traceback.print_exception(error)
        else:
            sys.excepthook(type(error), error, error.__traceback__)
    except BaseException:  # a broken hook or a closed stderr; the exit code still reports it
        return


def shut_down(code: int) -> int:
    """Join threads, run exit handlers, flush streams, and return the exit code."""
    try:
        threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None and not stream.closed:
                stream.flush()
    except BaseException:
        return code or 120  # CPython's exit code if a stream could not be flushed
    return code
