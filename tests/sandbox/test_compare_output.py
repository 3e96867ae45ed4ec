"""The comparison: exact but for trailing blanks, and only of programs that ended well."""

from __future__ import annotations

import pytest

from ratchet.sandbox import Reason, Result, output_matches


def ended(
    stdout: bytes, code: int | None = 0, signal: int | None = None, reason: Reason = Reason.EXIT
) -> Result:
    return Result(code, signal, stdout, b"", 0.0, reason)


@pytest.mark.parametrize("stdout", [b"1 2\n3\n", b"1 2\n3", b"1 2 \n3\t\n\n", b"1 2\r\n3\r\n"])
def test_blanks_at_the_end_of_lines_and_of_the_text_do_not_matter(stdout: bytes) -> None:
    assert output_matches(ended(stdout), "1 2\n3\n")


@pytest.mark.parametrize(
    "stdout",
    [
        b"",
        b"1 2 3",
        b"1  2\n3",
        b" 1 2\n3",
        b"1 2\n\n3",
        b"\n1 2\n3",
        b"1 2\n3\n4",
        b"1 2\n3\0",
        b"1 2\n3\xff",
    ],
)
def test_everything_else_does(stdout: bytes) -> None:
    assert not output_matches(ended(stdout), b"1 2\n3\n")


@pytest.mark.parametrize(
    "end",
    [
        ended(b"1", code=1),
        ended(b"1", None, 11, Reason.SIGNAL),
        ended(b"1", None, None, Reason.WALL),
    ],
)
def test_the_right_output_of_a_program_that_ended_badly_is_not_passed(end: Result) -> None:
    assert not output_matches(end, b"1")


def test_look_alikes_are_different_bytes() -> None:
    assert not output_matches(ended("４２".encode()), "42")
    assert not output_matches(ended("é".encode()), "e\u0301")


def test_an_expected_lone_surrogate_is_compared() -> None:
    assert output_matches(ended(b"\xed\xa0\x80\n"), "\ud800")
    assert not output_matches(ended(b"?\n"), "\ud800")
