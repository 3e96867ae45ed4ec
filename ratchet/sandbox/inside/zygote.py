"""Run the fork server of a sandbox.

It handles one request at a time: it forks a process, and ends all processes of the request before
it answers.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import socket
import time
from typing import Any, NoReturn

from . import rootfs
from .child import STOP_SIGNALS, GrantedIsolation, Request, become_program
from .run_queue import RunQueueClock, open_proc

WATCH_S = 0.02
# The wall limit lasts at most this many times as long on an overloaded machine. A program that has
# not ended by then is not judged.
MAX_STRETCH = 10
MEASURED_S = 0.1  # waiting times of shorter programs matter to no limit
PAGE_KIB = os.sysconf("SC_PAGE_SIZE") // 1024
SI_USER = 0  # the code of a signal sent by kill(2); a sender can't forge it


def serve(control: int, trainer: int, granted: GrantedIsolation, proc: int | None) -> NoReturn:
    """Serve requests until the trainer ends.

    Args:
        control: Socket of requests. It is at its end when the trainer has ended, unless a process
            that the trainer forked holds a copy of the other end.
        trainer: A pidfd of the trainer, which reports its end in any case.
        proc: Descriptor of a private /proc, to measure memory and set process ids; None if there
            is none.
    """
    channel = socket.socket(fileno=control)
    # Blocked signals stay pending although they are ignored, so `take_outside_signal` can read
    # them.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    gc.collect()
    # Without this, the first garbage collection of each child copies the pages of all modules.
    gc.freeze()
    gc.disable()
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    poll.register(trainer, select.POLLIN)
    last_pid = open_last_pid(proc)
    scheduler_proc = open_proc(proc)
    while True:
        gc.collect()  # here, so that what a program meets does not depend on what ran before it
        if any(file == trainer for file, _ in poll.poll()):
            os._exit(0)
        message, files, _, _ = socket.recv_fds(channel, 1 << 16, 4)
        if not message:
            os._exit(0)
        request = json.loads(message)
        if "stop" not in request:  # a late stop, for a run that has ended, is ignored
            if last_pid is not None:
                os.pwrite(last_pid, b"1", 0)
            channel.send(
                json.dumps(
                    execute(
                        channel, trainer, Request(**request), granted, files, proc, scheduler_proc
                    )
                ).encode()
            )


def execute(
    channel: socket.socket,
    trainer: int,
    request: Request,
    granted: GrantedIsolation,
    files: list[int],
    proc: int | None,
    scheduler_proc: int | None,
) -> dict[str, Any]:
    """Run one request in a forked process, and return the report of how it ended.

    Args:
        scheduler_proc: Descriptor of a /proc with the statistics of the scheduler; it may be the
            machine's.
    """
    is_in_namespaces = granted.level >= 3  # in namespaces, with a private root directory
    if request.can_fork and proc is None:
        close_files(files)
        return {
            "setup": "commands and processes need namespaces and a /proc of their own; this is "
            f"level {granted.level}"
        }
    if is_in_namespaces:
        rootfs.mount_scratch(request.disk_mib, granted.program_uid, executable=request.executable)
    take_outside_signal()  # clear the signals of the time before this request
    status_read_end, status = os.pipe2(os.O_CLOEXEC)
    zygote, clock = os.getpid(), RunQueueClock(scheduler_proc, time.monotonic())
    child = os.fork()
    if child == 0:
        become_program(request, granted, zygote, [*files, status])
    close_files([*files, status])
    child_pidfd = os.pidfd_open(child)
    stopped = wait_for_child(
        channel, trainer, child_pidfd, request, proc if request.can_fork else None, clock, child
    )
    if clock.elapsed_s > MEASURED_S:
        clock.measure([child])
    if stopped:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    _, code, usage = os.wait4(child, 0)
    seconds = clock.seconds
    if is_in_namespaces:
        kill_all_programs()
        rootfs.unmount_scratch()
    status_text = os.read(status_read_end, 600)
    close_files([child_pidfd, status_read_end])
    setup = (
        ""
        if status_text == b"ready" or stopped
        else status_text.decode("utf-8", "replace") or "died before it was confined"
    )
    return {
        "status": code,
        "stopped": stopped,
        "seconds": seconds,
        "cpu": usage.ru_utime + usage.ru_stime,
        "setup": setup,
        "signal_from_outside": request.can_fork and take_outside_signal(),
    }


def take_outside_signal() -> int:
    """Return the number of a pending signal that came from outside the namespace; 0 for none.

    All pending signals are consumed. A service manager sends such a signal to all processes, so the
    program's processes got it too. The id of a sender outside is 0. Signals of programs inside are
    not counted.
    """
    number = 0
    while (info := signal.sigtimedwait(STOP_SIGNALS, 0)) is not None:
        if info.si_code == SI_USER and info.si_pid == 0:
            number = info.si_signo
    return number


def open_last_pid(proc: int | None) -> int | None:
    """Open the file that sets the next process id, so that every program gets id 2.

    Returns None if there is no private /proc, or the kernel lacks the file.
    """
    if proc is None:
        return None
    try:
        return os.open("sys/kernel/ns_last_pid", os.O_WRONLY | os.O_CLOEXEC, dir_fd=proc)
    except OSError:
        return None


def wait_for_child(
    channel: socket.socket,
    trainer: int,
    child_pidfd: int,
    request: Request,
    proc: int | None,
    clock: RunQueueClock,
    child: int,
) -> str:
    """Wait for the child. Return the reason to stop it, or "" if it has ended.

    The reason "starved" means that the machine was too busy to judge the program.

    Args:
        proc: Descriptor of a private /proc, whose processes are watched; None if there is only the
            child.
    """
    poll = select.poll()
    for file in (child_pidfd, channel.fileno(), trainer):
        poll.register(file, select.POLLIN)
    while True:
        remaining_s = request.wall_s - clock.seconds
        if remaining_s <= 0 and proc is None:
            clock.measure([child])
            remaining_s = request.wall_s - clock.seconds
        if remaining_s <= 0:
            return "wall"
        if clock.elapsed_s > MAX_STRETCH * request.wall_s:
            return "starved"
        wait_s = max(remaining_s, WATCH_S) if proc is None else min(remaining_s, WATCH_S)
        ready_files = {file for file, _ in poll.poll(wait_s * 1000 + 1)}
        if child_pidfd in ready_files:
            return ""
        if trainer in ready_files:
            exit_with_trainer()
        if channel.fileno() in ready_files:
            message = channel.recv(1 << 16)
            if not message:
                exit_with_trainer()
            return json.loads(message)["stop"]
        if proc is not None:
            pids = [name for name in os.listdir(proc) if name.isdecimal() and name != "1"]
            clock.measure(pids)
            if measure_resident_kib(proc, pids) > request.memory_mib * 1024:
                return "memory"


def exit_with_trainer() -> NoReturn:
    """Exit because the trainer ended.

    The end of the process namespace, or the death signal of the children, ends the children.
    """
    os._exit(0)


def kill_all_programs() -> None:
    """Kill all processes that the program started.

    This process is process 1 of a namespace, so -1 means that namespace's processes and no others.
    """
    assert os.getpid() == 1
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)


def measure_resident_kib(proc: int, pids: list[str]) -> int:
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):  # the process has ended, perhaps since the opening
            file = os.open(f"{pid}/statm", os.O_RDONLY, dir_fd=proc)
            try:
                total += int(os.read(file, 200).split()[1])
            finally:
                os.close(file)
    return total * PAGE_KIB


def close_files(files: list[int]) -> None:
    for file in files:
        os.close(file)


def ignore_stop_signals() -> None:
    """Ignore SIGINT, SIGTERM and SIGHUP, which the trainer handles."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
