import os
import pty
import sys

import pytest

from ratchet.observe.console import make_robust_console


def hang_up() -> int:
    """A descriptor of a terminal that was closed."""
    ours, theirs = pty.openpty()
    os.close(ours)
    return theirs


def break_off() -> int:
    """A descriptor of a pipe that nothing reads."""
    ours, theirs = os.pipe()
    os.close(ours)
    return theirs


@pytest.mark.fault("P8")
@pytest.mark.parametrize("broken", [hang_up, break_off])
def test_a_console_outlives_what_it_writes_to(broken, monkeypatch):
    with os.fdopen(broken(), "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        console = make_robust_console()
        for _ in range(3):
            console.print("a step")
        assert os.stat(stream.fileno()).st_rdev == os.stat(os.devnull).st_rdev


def test_a_console_writes_where_standard_output_goes(capsys):
    console = make_robust_console()
    console.print("a step")
    assert capsys.readouterr().out == "a step\n"
    assert not console.is_terminal
