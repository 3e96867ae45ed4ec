"""Start a run again after a crash, from its newest checkpoint."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

from ratchet.executors.env_vars import SUPERVISOR, SUPERVISOR_PIPE, inherit_environment
from ratchet.executors.signals import DELIBERATE_SIGNALS, SAME_SIGNAL_S, STOP_SIGNALS
from ratchet.processes.exit_status import describe_exit
from ratchet.runs.checkpoints import CheckpointStore
from ratchet.runs.run_dir import RunDirectory
from ratchet.utils.retry import get_retry_wait_s

FAILED = 1  # exit status of a run that broke on the way
FIRST_WAIT_S = 1.0
MAX_WAIT_S = 300.0
POLL_S = 0.1


class Supervisor:
    """The parent process of a run, which starts it again after a crash.

    A crash is a run's end by a signal that the supervisor did not pass on, with exit status 1, or
    with exit status 0 and without a summary.
    All other ends are final: the run is done, was told to stop, or has wrong input, which the next
    start would find too. SIGINT, SIGTERM and SIGHUP are passed on; the run saves and ends.

    The run ignores further signals, because service managers signal it and the supervisor at once.
    A second SIGINT or SIGTERM to the supervisor, a second or more after the first, kills the run.

    If the supervisor itself is killed, the run gets SIGTERM, saves and ends. A second SIGINT or
    SIGTERM then ends it at once.

    Args:
        place: The run's directory.
        start: Arguments of `ratchet` for the first start, and for each other one until the run has
            written its recipe. What the directory held before may be another run.
        resume: Arguments of `ratchet` for each start after that.
        max_restarts: Number of restarts in a row without a new checkpoint, after which the next
            crash is final.
        say: Called with one line for each restart. Its OSError is ignored, because the run goes on
            when nothing reads its output any more (`ratchet train ... 2>&1 | head`).
    """

    def __init__(
        self,
        place: Path,
        start: Sequence[str],
        resume: Sequence[str],
        *,
        max_restarts: int,
        say: Callable[[str], object],
    ) -> None:
        self._directory = RunDirectory(place)
        self._start = start
        self._resume = resume
        self._max_restarts = max_restarts
        self._print = say
        self._process: subprocess.Popen[bytes] | None = None
        self._signal: int | None = None  # the first signal that was passed on
        self._signalled_at = 0.0  # monotonic
        self._killed_by: int | None = None  # the signal at which the run was killed
        self._first_recipe = self._stamp_recipe()

    def run(self) -> int:
        """Train until the run's final end, and return its exit status.

        Call it in the main thread, whose signal handlers it replaces meanwhile.
        """
        previous = {number: signal.getsignal(number) for number in STOP_SIGNALS}
        for number, handler in previous.items():
            if handler is not signal.SIG_IGN:  # `nohup` ignores SIGHUP, and the run should too
                signal.signal(number, self._pass_on)
        try:
            return self._run_until_final_end()
        finally:
            for number, handler in previous.items():
                # None means that the handler was not installed from Python.
                signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _run_until_final_end(self) -> int:
        arguments, restarts = self._start, 0
        while True:
            saved_step = self._find_saved_step()
            status = self._run_once(arguments)
            # User code ended the process, by exit() of C for example.
            if status == 0 and not self._directory.summary.is_file():
                status = FAILED
            if self._signal is not None or not (status < 0 or status == FAILED):
                break
            last_step = self._find_saved_step()
            if last_step > saved_step:
                restarts = 0
            place = (
                f"after its checkpoint of step {last_step}" if last_step else "without a checkpoint"
            )
            end = f"the run in {self._directory.path} ended {place} ({describe_exit(status)[0]})"
            if restarts == self._max_restarts:
                self._say(
                    f"{end}; restarts without a new checkpoint: {restarts}, so this is its end"
                )
                break
            wait_s = get_retry_wait_s(restarts, FIRST_WAIT_S, max_s=MAX_WAIT_S)
            restarts += 1
            self._say(
                f"{end}: starting it again in {wait_s:.1f} s (restart {restarts} of at most "
                f"{self._max_restarts} without a new checkpoint)"
            )
            if self._wait(wait_s):
                status = -signal.Signals(self._signal or signal.SIGTERM)
                break
            has_begun = self._stamp_recipe() not in (None, self._first_recipe)
            arguments = self._resume if has_begun else self._start
        if self._killed_by is not None:
            return 128 + self._killed_by
        return 128 - status if status < 0 else status

    def _run_once(self, arguments: Sequence[str]) -> int:
        """Run `ratchet` with the arguments, and return its exit status as in `subprocess`."""
        # Without -P a file of the user's directory could take the place of one of Python's modules.
        command = [sys.executable, "-P", "-m", "ratchet", *arguments]
        # The kernel closes the writing end when this process ends, also at SIGKILL.
        reading_end, writing_end = os.pipe()
        variables = {
            SUPERVISOR: str(os.getpid()),
            SUPERVISOR_PIPE: f"{reading_end}:{os.fstat(reading_end).st_ino}",
        }
        try:
            self._process = subprocess.Popen(
                command,
                process_group=0,
                env=inherit_environment(**variables),
                pass_fds=(reading_end,),
            )
            if self._signal is not None:  # it came while the process was started
                self._process.send_signal(self._signal)
            return self._process.wait()
        finally:
            os.close(reading_end)
            os.close(writing_end)

    def _say(self, line: str) -> None:
        with suppress(OSError):
            self._print(line)

    def _wait(self, seconds: float) -> bool:
        """Wait; True if a signal came."""
        end = time.monotonic() + seconds
        while self._signal is None and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, POLL_S))
        return self._signal is not None

    def _find_saved_step(self) -> int:
        """Return the step of the newest complete checkpoint; 0 without one."""
        complete = CheckpointStore(self._directory.checkpoints).list_complete()
        return complete[0].step if complete else 0

    def _stamp_recipe(self) -> tuple[int, int] | None:
        """Return what changes whenever the directory's recipe is written; None if it has none."""
        try:
            status = self._directory.config.stat()
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        # A process that has ended gets no signal from these methods.
        if self._signal is None:
            self._signal = number
            self._signalled_at = time.monotonic()
            if self._process is not None:
                self._process.send_signal(number)
        elif (
            self._process is not None
            and number in DELIBERATE_SIGNALS
            and time.monotonic() - self._signalled_at >= SAME_SIGNAL_S
        ):
            self._killed_by = number
            self._process.kill()
