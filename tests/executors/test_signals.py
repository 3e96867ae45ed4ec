"""A run's handlers stand, whatever a library does to them: by Python, in native code, by a mask."""

import ctypes
import os
import signal
import subprocess
from contextlib import suppress

import pytest

from ratchet.executors.signals import (
    STOP_SIGNALS,
    SecondSignal,
    handle_stop_signals,
    keep_handlers,
    reinstall_handlers,
    shield_programs,
)

ALL = [pytest.param(number, id=number.name) for number in STOP_SIGNALS]


@pytest.fixture(autouse=True)
def handlers():
    """The handlers of the tests' own process, and `signal.signal`, are as before afterwards."""
    before, install = [signal.getsignal(number) for number in STOP_SIGNALS], signal.signal
    yield
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before
    assert signal.signal is install


def leaves(number, frame):
    raise SystemExit(number)


def replaced_by_python(number):
    signal.signal(number, leaves)


def replaced_in_native_code(number):
    ctypes.CDLL(None).signal(int(number), ctypes.c_void_p(int(signal.SIG_IGN)))


def masked(number):
    signal.pthread_sigmask(signal.SIG_BLOCK, [number])


@pytest.mark.fault("P24")
@pytest.mark.parametrize("number", ALL)
@pytest.mark.parametrize("change", [replaced_by_python, replaced_in_native_code, masked])
def test_no_library_takes_a_signal_from_the_run(number, change):
    asked = []
    with handle_stop_signals(asked.append):
        change(number)
        reinstall_handlers()
        signal.raise_signal(number)
    assert asked == [number]


@pytest.mark.parametrize("number", ALL)
def test_a_handler_is_not_replaced_even_for_a_moment(number):
    asked = []
    with handle_stop_signals(asked.append):
        assert signal.signal(number, leaves) is signal.getsignal(number)
        signal.raise_signal(number)
    assert asked == [number]


@pytest.mark.parametrize(
    ("numbers", "at_once"),
    [
        ((signal.SIGINT, signal.SIGINT), True),
        ((signal.SIGTERM, signal.SIGINT), True),
        ((signal.SIGHUP, signal.SIGHUP), False),  # a shell and the kernel send one each
        ((signal.SIGTERM, signal.SIGHUP), False),  # as systemd sends them
        ((signal.SIGHUP, signal.SIGTERM), False),
        ((signal.SIGHUP, signal.SIGTERM, signal.SIGTERM), True),
    ],
)
def test_only_a_second_deliberate_signal_ends_at_once(numbers, at_once):
    asked = []
    with handle_stop_signals(asked.append):
        for number in numbers[:-1]:
            signal.raise_signal(number)
        if at_once:
            with pytest.raises(SecondSignal) as second:
                signal.raise_signal(numbers[-1])
            assert second.value.number == numbers[-1]
        else:
            signal.raise_signal(numbers[-1])
    assert asked == [numbers[0]]


def test_what_torchrun_sends_on_is_no_second_signal():
    """Under Slurm a rank gets the same SIGTERM from the scheduler and from torchrun."""
    asked = []
    with handle_stop_signals(asked.append, forwarded=True):
        for _ in range(3):
            signal.raise_signal(signal.SIGTERM)
    assert asked == [signal.SIGTERM]


def test_nohup_stays_in_force():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    asked = []
    try:
        with handle_stop_signals(asked.append):
            signal.signal(signal.SIGHUP, leaves)
            signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    assert asked == []


def test_other_signals_and_forked_children_are_free():
    with keep_handlers({signal.SIGTERM: signal.SIG_IGN}):
        before = signal.signal(signal.SIGUSR2, leaves)
        assert signal.signal(signal.SIGUSR2, before) is leaves
        child = os.fork()
        if not child:
            with suppress(BaseException):
                signal.signal(signal.SIGTERM, lambda number, frame: os._exit(7))
                signal.raise_signal(signal.SIGTERM)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_programs_of_libraries_outlive_a_closed_terminal():
    """What Ray or a tracker starts is in the run's process group, and gets what a terminal sends to
    that."""
    with shield_programs(), subprocess.Popen(["sleep", "60"]) as program:
        program.send_signal(signal.SIGHUP)
        program.send_signal(signal.SIGINT)
        assert program.poll() is None
        program.terminate()
    assert program.returncode == -signal.SIGTERM


def test_a_signal_while_programs_start_is_not_lost():
    asked = []
    with handle_stop_signals(asked.append):
        with shield_programs():
            os.kill(os.getpid(), signal.SIGHUP)
        reinstall_handlers()
    assert asked == [signal.SIGHUP]
