"""A supervised run starts again after a crash, within bounds, and after nothing else."""

import os
import signal
import sys
import threading
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ratchet.cli.main import app
from ratchet.executors import signals
from ratchet.executors.env_vars import SUPERVISOR_PIPE, find_supervisor_pipe
from ratchet.executors.signals import SecondSignal, handle_stop_signals, stop_with_supervisor
from ratchet.training import supervise
from ratchet.training.supervise import Supervisor


class ScriptedSupervisor(Supervisor):
    """A supervisor whose starts end with given statuses, after saving given steps."""

    def __init__(self, place: Path, ends: list[tuple[int, int]], max_restarts: int = 2) -> None:
        self.said: list[str] = []
        self.has_reader = True
        self.started: list[str] = []
        self._ends = ends
        self._step = 0
        super().__init__(place, ["start"], ["resume"], max_restarts=max_restarts, say=self._write)

    def _write(self, line):
        if not self.has_reader:
            raise BrokenPipeError
        self.said.append(line)

    def _run_once(self, arguments):
        self.started += arguments
        (self._directory.path / "config.yaml").touch()
        status, self._step = self._ends.pop(0)
        if not self._ends:  # the last start trains to the end
            self._directory.summary.touch()
        return status

    def _find_saved_step(self):
        return self._step


@pytest.fixture(autouse=True)
def no_wait(monkeypatch):
    monkeypatch.setattr(supervise, "FIRST_WAIT_S", 0.0)


def test_a_crash_starts_the_run_again(tmp_path):
    supervisor = ScriptedSupervisor(tmp_path, [(-9, 0), (1, 2), (0, 5)])
    assert supervisor.run() == 0
    assert supervisor.started == ["start", "resume", "resume"]
    first, second = supervisor.said
    assert "SIGKILL" in first
    assert "exit status 1" in second
    assert "step 2" in second
    assert "restart 1 of at most 2" in second  # a new checkpoint begins the count anew


def test_status_0_of_an_unfinished_run_is_a_crash(tmp_path):
    supervisor = ScriptedSupervisor(tmp_path, [(0, 2), (0, 5)])
    assert supervisor.run() == 0
    assert supervisor.started == ["start", "resume"]


def test_a_run_is_restarted_when_nothing_reads_the_output(tmp_path):
    supervisor = ScriptedSupervisor(tmp_path, [(-9, 2), (0, 5)])
    supervisor.has_reader = False
    assert supervisor.run() == 0
    assert supervisor.started == ["start", "resume"]


@pytest.mark.parametrize("status", [0, 2, 74, 75, 77, 130, 143])
def test_other_ends_are_final(tmp_path, status):
    supervisor = ScriptedSupervisor(tmp_path, [(status, 0)])
    assert (supervisor.run(), supervisor.said) == (status, [])


def test_crashes_without_a_new_checkpoint_are_bounded(tmp_path):
    supervisor = ScriptedSupervisor(tmp_path, [(-11, 4), (1, 4), (-11, 4)])
    assert supervisor.run() == 128 + 11
    assert len(supervisor.started) == 3
    assert supervisor.said[-1].endswith("restarts without a new checkpoint: 2, so this is its end")


def test_a_run_that_saves_may_crash_any_number_of_times(tmp_path):
    ends = [(1, step) for step in range(1, 9)]
    assert ScriptedSupervisor(tmp_path, [*ends, (0, 9)], max_restarts=1).run() == 0


@pytest.mark.parametrize(
    ("words", "start", "resume"),
    [
        (
            ["--supervise", "1", "--supervise=2", "--supervise", "3", "--", "quickstart", "seed=3"],
            ["--run-dir", "runs/quickstart", "--", "quickstart", "seed=3"],
            ["--resume", "runs/quickstart"],
        ),
        (
            ["--resume", "runs/a", "--supervise", "1", "steps=4", "--changed-data", "seed=3"],
            ["--resume", "runs/a", "steps=4", "--changed-data", "seed=3"],
            ["--resume", "runs/a", "--changed-data", "steps=4", "seed=3"],
        ),
    ],
)
def test_starts_get_the_arguments_of_the_command(tmp_path, monkeypatch, words, start, resume):
    starts = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["ratchet", "train", *words])
    monkeypatch.setattr(Supervisor, "run", lambda self: starts.append(self) or 0)
    done = CliRunner().invoke(app, ["train", *words])
    assert done.exit_code == 0, done.output
    (supervisor,) = starts
    assert supervisor._start == ["train", *start]
    assert supervisor._resume == ["train", *resume]


def test_a_run_that_was_there_before_is_not_resumed(tmp_path):
    (tmp_path / "config.yaml").write_text("seed: 1")
    os.utime(tmp_path / "config.yaml", (0, 0))

    class CrashesEarly(ScriptedSupervisor):
        def _run_once(self, arguments):
            modified_at = (tmp_path / "config.yaml").stat().st_mtime
            status = super()._run_once(arguments)
            if len(self.started) < 3:  # the run has not yet written its recipe
                os.utime(tmp_path / "config.yaml", (modified_at, modified_at))
            return status

    supervisor = CrashesEarly(tmp_path, [(-9, 0), (-9, 0), (-9, 1), (0, 2)], max_restarts=3)
    assert supervisor.run() == 0
    assert supervisor.started == ["start", "start", "start", "resume"]


def test_a_closed_pipe_stops_the_process(monkeypatch):
    reading_end, writing_end = os.pipe()
    inode = os.fstat(reading_end).st_ino
    monkeypatch.setenv(SUPERVISOR_PIPE, f"{reading_end}:{inode + 1}")
    assert find_supervisor_pipe() is None, "another file"
    monkeypatch.setenv(SUPERVISOR_PIPE, f"{reading_end}:{inode}")
    assert find_supervisor_pipe() == reading_end
    monkeypatch.setattr(signals, "SAME_SIGNAL_S", 0.0)
    monkeypatch.setattr(signals, "_supervisor_has_ended", threading.Event())
    got_signal = threading.Event()
    previous = signal.signal(signal.SIGTERM, lambda number, frame: got_signal.set())
    try:
        stop_with_supervisor(reading_end)
        assert not got_signal.is_set()
        os.close(writing_end)
        assert got_signal.wait(60)
        assert signals._supervisor_has_ended.wait(60)
    finally:
        signal.signal(signal.SIGTERM, previous)
        os.close(reading_end)
    assert find_supervisor_pipe() is None


def test_a_second_signal_ends_a_run_that_outlived_its_supervisor(monkeypatch):
    monkeypatch.setattr(signals, "_supervisor_has_ended", threading.Event())
    stops = []
    with handle_stop_signals(stops.append, forwarded=True):
        for _ in range(3):  # as the supervisor, or a service manager, sends them
            signal.raise_signal(signal.SIGTERM)
        signals._supervisor_has_ended.set()
        with pytest.raises(SecondSignal):
            signal.raise_signal(signal.SIGTERM)
    assert stops == [signal.SIGTERM]


class SignalledProcess:
    def __init__(self):
        self.signals = []

    def send_signal(self, number):
        self.signals.append(number)

    def kill(self):
        self.signals.append(signal.SIGKILL)


@pytest.mark.parametrize(
    ("same_signal_s", "received"), [(3600, [signal.SIGTERM]), (0, [signal.SIGTERM, signal.SIGKILL])]
)
def test_only_a_later_second_signal_ends_the_run(tmp_path, monkeypatch, same_signal_s, received):
    monkeypatch.setattr(supervise, "SAME_SIGNAL_S", same_signal_s)
    supervisor = ScriptedSupervisor(tmp_path, [])
    supervisor._process = process = SignalledProcess()  # pyright: ignore[reportAttributeAccessIssue]
    supervisor._pass_on(signal.SIGTERM, None)
    supervisor._pass_on(signal.SIGHUP, None)
    supervisor._pass_on(signal.SIGTERM, None)
    assert process.signals == received
