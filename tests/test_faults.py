"""Failpoints: silent until armed, and then exactly where and when the spec says."""

from __future__ import annotations

import errno
import subprocess
import sys
from collections.abc import Iterator

import pytest

from ratchet import faults


@pytest.fixture(autouse=True)
def _disarmed() -> Iterator[None]:
    yield
    faults.disarm()


def test_an_unarmed_point_does_nothing() -> None:
    faults.point("x")


def test_the_nth_passage_breaks_and_no_other() -> None:
    faults.arm("x:3:raise")
    faults.point("x")
    faults.point("y")
    faults.point("x")
    with pytest.raises(faults.InjectedFault, match="'x'"):
        faults.point("x")
    faults.point("x")


def test_several_points_and_the_first_passage_by_default() -> None:
    faults.arm("x:raise, y:2:enospc")
    faults.point("y")
    with pytest.raises(OSError) as raised:
        faults.point("y")
    assert raised.value.errno == errno.ENOSPC
    with pytest.raises(faults.InjectedFault):
        faults.point("x")


def test_arming_again_replaces() -> None:
    faults.arm("x:raise")
    faults.arm("y:raise")
    faults.point("x")
    faults.arm("")
    faults.point("y")


def test_kill_is_sigkill() -> None:
    code = "from ratchet import faults; faults.arm('x:kill'); faults.point('x'); print('survived')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, stdin=subprocess.DEVNULL)
    assert (done.returncode, done.stdout) == (-9, b"")


def test_interrupt_is_ctrl_c() -> None:
    faults.arm("x:interrupt")
    with pytest.raises(KeyboardInterrupt):
        faults.point("x")


@pytest.mark.parametrize("spec", ["x", "x:explode", "x:0:kill", "x:-1:kill", "x:one:kill", "x:1:2:kill", ":kill", "x:1"])
def test_a_malformed_spec_is_refused(spec: str) -> None:
    with pytest.raises(ValueError, match="kill, interrupt, terminate, hang_up, raise, enospc"):
        faults.arm(spec)


def test_record_lists_passages_and_restores() -> None:
    faults.arm("x:raise")
    with faults.record() as passed:
        faults.point("x")
        faults.point("y")
        faults.point("x")
    assert passed == ["x", "y", "x"]
    with pytest.raises(faults.InjectedFault):
        faults.point("x")
