"""Runs a command under a wall budget and lets nothing of it survive: `budget.py --minutes 15 --name
"make test" -- make ...`.

`timeout` reaches one process group; tests start engines and sandboxes that leave it (setsid). On
Linux this process makes itself the reaper of all its descendants, so whatever is orphaned stays
findable and is killed at the end, also when the command itself ended well. Exit status: the
command's; 124 when the budget was overrun; 128 + n on signal n.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

OVERRUN = 124
PR_SET_CHILD_SUBREAPER = 36
KILL_S = 10.0  # how long the kernel may take to end a killed process


class Stopped(Exception):
    """A signal asked this process to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--name", required=True, help="what the message calls the command")
    parser.add_argument(
        "--grace-s", type=float, default=5.0, help="between SIGINT, SIGTERM and SIGKILL"
    )
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        parser.error("no command given")
    _become_reaper()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, _stop)
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    status = _wait(child, options.minutes, options.name)
    left = _clean_up(child, options.grace_s)
    if left and status == 0:
        print(f"{options.name}: killed what it left running: {', '.join(left)}", file=sys.stderr)
    return status


def _wait(child: subprocess.Popen[bytes], minutes: float, name: str) -> int:
    try:
        status = child.wait(minutes * 60)
    except subprocess.TimeoutExpired:
        print(
            f"\n{name}: over its budget of {minutes:g} minutes, stopped: FAILED",
            file=sys.stderr,
            flush=True,
        )
        return OVERRUN
    except Stopped as stopped:
        return 128 + stopped.number
    return status if status >= 0 else 128 - status


def _stop(number: int, frame: FrameType | None) -> None:
    raise Stopped(number)


def _become_reaper() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _clean_up(child: subprocess.Popen[bytes], grace_s: float) -> list[str]:
    """Ends every descendant, less politely each time. Returns the commands that were still
    running."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # nothing may interrupt this
    names = [_command_line(pid) for pid in _running(child)]
    # on SIGINT pytest still says where it was
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + (KILL_S if number == signal.SIGKILL else grace_s)
        _signal_all(child, number)
        while _running(child) and time.monotonic() < deadline:
            time.sleep(0.05)
            if number == signal.SIGKILL:
                _signal_all(child, number)  # what was forked meanwhile
    _reap(child)  # what died last: nobody may take it for alive
    return names


def _signal_all(child: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, number)
    for pid in _running(child):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _running(child: subprocess.Popen[bytes]) -> list[int]:
    """Living descendants of this process, found through /proc; elsewhere only the command itself.
    Reaps the dead."""
    child.poll()
    if sys.platform != "linux":
        return [child.pid] if child.returncode is None else []
    _reap(child)
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            pid = int(entry.name)
            state, parent = entry.joinpath("stat").read_text().rpartition(")")[2].split()[:2]
            if state not in "ZX":
                children.setdefault(int(parent), []).append(pid)
    found = list(children.get(os.getpid(), []))
    for pid in found:  # grows while walking down
        found.extend(children.get(pid, []))
    return found


def _reap(child: subprocess.Popen[bytes]) -> None:
    """Collects adopted zombies; the command's own status belongs to Popen, so it is polled before
    this."""
    if child.returncode is None:
        return
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _command_line(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return str(pid)
    return f"{pid} {b' '.join(words[:4]).decode(errors='replace').strip()}"


if __name__ == "__main__":
    sys.exit(main())
