"""Failpoints: silent until armed, and then exactly where and when the spec says."""

from __future__ import annotations

import errno
import subprocess
import sys
from collections.abc import Iterator

import pytest

from ratchet.utils import failpoints


@pytest.fixture(autouse=True)
def _disarmed() -> Iterator[None]:
    yield
    failpoints.disarm()


def test_an_unarmed_point_does_nothing() -> None:
    failpoints.point("x")


def test_the_nth_passage_breaks_and_no_other() -> None:
    failpoints.arm("x:3:raise")
    failpoints.point("x")
    failpoints.point("y")
    failpoints.point("x")
    with pytest.raises(failpoints.InjectedFault, match="'x'"):
        failpoints.point("x")
    failpoints.point("x")


def test_several_points_and_the_first_passage_by_default() -> None:
    failpoints.arm("x:raise, y:2:enospc")
    failpoints.point("y")
    with pytest.raises(OSError) as raised:
        failpoints.point("y")
    assert raised.value.errno == errno.ENOSPC
    with pytest.raises(failpoints.InjectedFault):
        failpoints.point("x")


def test_arming_again_replaces() -> None:
    failpoints.arm("x:raise")
    failpoints.arm("y:raise")
    failpoints.point("x")
    failpoints.arm("")
    failpoints.point("y")


def test_kill_is_sigkill() -> None:
    code = "from ratchet.utils import failpoints as f; f.arm('x:kill'); f.point('x'); print('survived')"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=False, stdin=subprocess.DEVNULL
    )
    assert (done.returncode, done.stdout) == (-9, b"")


def test_interrupt_is_ctrl_c() -> None:
    failpoints.arm("x:interrupt")
    with pytest.raises(KeyboardInterrupt):
        failpoints.point("x")


@pytest.mark.parametrize(
    "spec", ["x", "x:explode", "x:0:kill", "x:-1:kill", "x:one:kill", "x:1:2:kill", ":kill", "x:1"]
)
def test_a_malformed_spec_is_refused(spec: str) -> None:
    with pytest.raises(ValueError, match="kill, interrupt, terminate, hang_up, raise, enospc"):
        failpoints.arm(spec)


def test_record_lists_passages_and_restores() -> None:
    failpoints.arm("x:raise")
    with failpoints.record() as passed:
        failpoints.point("x")
        failpoints.point("y")
        failpoints.point("x")
    assert passed == ["x", "y", "x"]
    with pytest.raises(failpoints.InjectedFault):
        failpoints.point("x")
