"""The client of one fork server, a separate process. It blocks; `local.py` runs it in a thread.

Programs and inputs are sent as sealed memory files, and output comes through pipes. The control
socket carries only the request (numbers) and the report of how the process ended. All that comes
back is treated as hostile: it is bounded, and never evaluated.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import re
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from signal import SIGKILL, Signals
from typing import Any

from ratchet.errors import link_symptom
from ratchet.sandbox.base import (
    FIXED_ENVIRONMENT,
    Isolation,
    Limits,
    Reason,
    Result,
    SandboxError,
    Strength,
)
from ratchet.sandbox.inside.zygote import MAX_STRETCH

START_TIMEOUT_S = 30.0
GRACE_S = 5.0  # seconds after the longest wall limit; then the fork server counts as broken
CHUNK_BYTES = 1 << 16
# A program that was killed by SIGKILL hit the kernel's CPU limit if it used at least this share of
# the limit. The share is below 1, because the kernel counts whole ticks: on a busy virtual machine
# the exact CPU time can be a third lower than the kernel's count.
CPU_KILL_SHARE = 0.5
# Without address randomisation, `hash(None)` and everything else that depends on addresses is the
# same in every slot. The setting takes effect at the next exec. If a container refuses it (EPERM),
# addresses stay random.
BOOT_CODE = """
import ctypes, json, os, sys
NO_RANDOMIZE = 0x40000
personality = ctypes.CDLL(None).personality
before = personality(0xFFFFFFFF)
# An interpreter with capabilities loses the setting at every exec, so exec only once.
if len(sys.argv) == 4 and before >= 0 and not before & NO_RANDOMIZE:
    if personality(before | NO_RANDOMIZE) >= 0:
        os.execv(sys.executable, [*sys.orig_argv, "again"])
sys.path.insert(0, sys.argv[1])
from inside.launch import main
del sys.path[0]
main(int(sys.argv[2]), json.loads(sys.argv[3]))
"""
OOM_KILLS = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)
PACKAGE_DIR = str(Path(__file__).resolve().parent)
# All environment variables of programs and commands. PATH is set, because bash's default ends in
# the current directory.
ENVIRONMENT = {
    **FIXED_ENVIRONMENT,
    "LC_ALL": "C.UTF-8",
    "TZ": "UTC",
    "PATH": f"/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:{sys.base_prefix}/bin",
}


class ForkServerError(SandboxError):
    """The fork server died or hung; a new server may work."""


class ForkServerSlot:
    """A slot of the pool, with one fork server.

    The server starts on first use. If it breaks, the next use starts a new server.
    """

    def __init__(self, *, at_most: Isolation, readable: Sequence[str]) -> None:
        self._options = {
            "at_most": int(at_most),
            "readable": list(readable),
            "trainer_directory": get_working_directory(),
        }
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._stderr_file = -1
        # Keeps a `stop` in another thread from using the channel while it is replaced.
        self._lock = threading.Lock()

    def start(self) -> Strength:
        """Start the fork server. Raises SandboxError if the machine grants no isolation."""
        client_end, server_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._stderr_file = os.memfd_create("errors")
        options = json.dumps({**self._options, "trainer_pid": os.getpid()})
        command = [
            os.path.realpath(sys.executable),
            "-P",  # -I would also ignore PYTHONHASHSEED; all other variables are set here
            "-s",
            "-S",
            "-B",
            "-X",
            "utf8",
            "-c",
            BOOT_CODE,
            PACKAGE_DIR,
            str(server_end.fileno()),
            options,
        ]
        try:
            self._process = subprocess.Popen(
                command,
                pass_fds=[server_end.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._stderr_file,
                env=ENVIRONMENT,
                cwd="/",
                start_new_session=True,
            )
        except OSError as error:
            client_end.close()
            self.close()
            raise SandboxError(f"could not start the sandbox's interpreter: {error}") from error
        finally:
            server_end.close()
        self._channel = client_end
        client_end.settimeout(START_TIMEOUT_S)
        try:
            answer = json.loads(client_end.recv(CHUNK_BYTES) or b"{}")
        except TimeoutError:
            answer = {"error": f"no answer within {START_TIMEOUT_S:g} s"}
        if "level" not in answer:
            reason = answer.get("error") or self._read_stderr()
            self.close()
            raise SandboxError(
                f"no sandbox on this machine: {reason}. {link_symptom('there-is-no-sandbox')}"
            )
        return Strength(Isolation(answer["level"]), tuple(answer["refused"]), tuple(answer["by"]))

    def run(
        self,
        program: str | Sequence[str],
        stdin: bytes,
        limits: Limits,
        is_cancelled: Callable[[], bool],
    ) -> Result:
        """Run a program to its end.

        Raises ForkServerError if a retry may help, else SandboxError.

        Args:
            is_cancelled: Called after the request is sent, to notice a `stop` that came before it.
        """
        if self._process is None or self._process.poll() is not None:
            self.close()
            self.start()
        is_command = not isinstance(program, str)
        text = (
            json.dumps(list(program)).encode()
            if is_command
            else program.encode("utf-8", "surrogatepass")
        )
        can_fork = is_command or limits.processes > 1
        oom_kills_before = count_oom_kills() if can_fork else 0
        files = [seal_in_memory(text), seal_in_memory(stdin)]
        outputs: list[int] = []
        try:
            for _ in range(2):
                read_end, write_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
                os.set_blocking(write_end, True)
                outputs.append(read_end)
                files.append(write_end)
            try:
                self._send_request(limits, is_command, files)
            finally:
                close_files(files)
                files = []
            if is_cancelled():
                self.stop()
            run_outputs = RunOutputs(outputs, limits)
            report = self._collect_report(run_outputs, limits)
        except (OSError, ForkServerError) as error:
            stderr_text = self._read_stderr()
            self.close()
            raise ForkServerError(
                f"the sandbox's fork server broke: {error} {stderr_text}".rstrip()
            ) from error
        finally:
            close_files(files + outputs)
        if report["setup"]:
            raise SandboxError(f"the sandbox could not confine a program: {report['setup']}")
        result = make_result(report, run_outputs, limits)
        # The program can't send SIGKILL to itself.
        if result.signal == SIGKILL and not can_fork:
            raise ForkServerError(
                "the program was killed from outside: by the kernel because memory ran out, or by "
                "another user"
            )
        # The signal may have ended any of the program's processes, even if the program continued.
        if number := report["signal_from_outside"]:
            raise ForkServerError(
                f"the program's processes got {Signals(number).name} from outside, as from a "
                "service manager that stops all processes"
            )
        if can_fork and count_oom_kills() > oom_kills_before:
            raise ForkServerError(
                "the kernel killed processes because memory ran out while the program ran"
            )
        return result

    def _send_request(self, limits: Limits, is_command: bool, files: list[int]) -> None:
        assert self._channel is not None
        request: dict[str, Any] = {
            name: getattr(limits, name)
            for name in ("wall_s", "memory_mib", "disk_mib", "processes", "threads", "executable")
        }
        request |= {"cpu_s": max(1, math.ceil(limits.cpu_s)), "is_command": is_command}
        socket.send_fds(self._channel, [json.dumps(request).encode()], files)

    def _collect_report(self, outputs: RunOutputs, limits: Limits) -> dict[str, Any]:
        """Read both outputs until the fork server reports the end, and return its report.

        The pipes then hold all remaining output, which is read too.
        """
        channel = self._channel
        assert channel is not None
        poll = select.poll()
        for file in (channel.fileno(), *outputs.open):
            poll.register(file, select.POLLIN)
        longest_s = MAX_STRETCH * limits.wall_s
        deadline = time.monotonic() + longest_s + GRACE_S
        is_stopping = False
        while True:
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                raise ForkServerError(f"no report within {longest_s + GRACE_S:g} s")
            ready = [file for file, _ in poll.poll(remaining_s * 1000)]
            for file in ready:
                if file != channel.fileno() and not outputs.read(file):
                    poll.unregister(file)
            if outputs.is_over_limit and not is_stopping:
                is_stopping = True
                self.stop("output")
            if channel.fileno() in ready:
                message = channel.recv(CHUNK_BYTES)
                if not message:
                    raise ForkServerError("it is gone")
                outputs.drain()
                return json.loads(message)

    def stop(self, reason: str = "cancel") -> None:
        """End the running program, if there is one. Any thread may call this."""
        with self._lock, contextlib.suppress(OSError):
            if self._channel is not None:
                self._channel.send(json.dumps({"stop": reason}).encode())

    def _read_stderr(self) -> str:
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(0.2)
        return (
            os.pread(self._stderr_file, 4000, 0).decode("utf-8", "replace").strip()
            if self._stderr_file >= 0
            else ""
        )

    def close(self) -> None:
        """Close the channel, which ends the fork server and its programs."""
        with self._lock:
            if self._channel is not None:
                self._channel.close()
                self._channel = None
        if self._process is not None:
            try:
                self._process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._process.pid, SIGKILL)
                self._process.wait()
            self._process = None
        if self._stderr_file >= 0:
            os.close(self._stderr_file)
            self._stderr_file = -1


class RunOutputs:
    """The outputs of one run, stdout and stderr, each up to the limit."""

    def __init__(self, files: list[int], limits: Limits) -> None:
        self.texts = [bytearray(), bytearray()]
        self.is_over_limit = False
        self.open = dict(zip(files, self.texts, strict=True))
        self._limit = limits.output_kib << 10

    def read(self, file: int) -> bool:
        """Read the available part of an output. Return False at its end or beyond the limit."""
        text = self.open[file]
        try:
            data = os.read(file, CHUNK_BYTES)
        except BlockingIOError:
            return True
        text += data
        if len(text) > self._limit:
            self.is_over_limit = True
            del text[self._limit :]
            data = b""
        if not data:
            del self.open[file]
        return bool(data)

    def drain(self) -> None:
        """Read all available output without waiting for the end of file.

        A background process may hold the pipe open for ever.
        """
        for file in list(self.open):
            has_more = True
            while has_more:
                size = len(self.open[file])
                has_more = self.read(file) and len(self.open[file]) > size


def make_result(report: dict[str, Any], outputs: RunOutputs, limits: Limits) -> Result:
    """Return the result of a run. Raises SandboxError if the run was cancelled."""
    code, stopped = report["status"], report["stopped"]
    exit_code = os.WEXITSTATUS(code) if os.WIFEXITED(code) else None
    signal_number = os.WTERMSIG(code) if os.WIFSIGNALED(code) else None
    if outputs.is_over_limit:
        reason = Reason.OUTPUT
    elif stopped == "cancel":
        raise SandboxError(
            "the program was stopped before its end: cancelled, or the sandbox closed"
        )
    elif stopped == "starved":
        raise SandboxError(
            f"the machine is too busy to judge a program: it had used {report['seconds']:.1f} s of "
            f"its {limits.wall_s:g} s after {MAX_STRETCH} times as long. Run fewer programs at "
            "once, or other work elsewhere"
        )
    elif stopped:
        reason = Reason(stopped)
    elif signal_number == SIGKILL and report["cpu"] >= max(1.0, limits.cpu_s) * CPU_KILL_SHARE:
        reason = Reason.CPU
    else:
        reason = Reason.SIGNAL if signal_number else Reason.EXIT
    if reason not in (Reason.EXIT, Reason.SIGNAL):
        exit_code = signal_number = None
    return Result(
        exit_code,
        signal_number,
        bytes(outputs.texts[0]),
        bytes(outputs.texts[1]),
        report["seconds"],
        reason,
    )


def get_working_directory() -> str:
    """Return the working directory of this process; "" if it was removed."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return ""


def seal_in_memory(data: bytes) -> int:
    """Return the descriptor of an immutable memory file that holds `data`."""
    file = os.memfd_create("sealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]
    os.lseek(file, 0, os.SEEK_SET)
    # Only Linux has seals.
    seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
    return file


def count_oom_kills() -> int:
    """Return how many processes the kernel has killed so far because memory ran out.

    It counts the processes of this process's control group, or else of the whole machine.
    """
    with contextlib.suppress(OSError):
        group = Path("/proc/self/cgroup").read_text().rpartition("0::")[2].strip()
        if match := OOM_KILLS.search(Path(f"/sys/fs/cgroup{group}/memory.events").read_text()):
            return int(match[1])
    with contextlib.suppress(OSError):
        if match := OOM_KILLS.search(Path("/proc/vmstat").read_text()):
            return int(match[1])
    return 0


def close_files(files: list[int]) -> None:
    for file in files:
        os.close(file)
