"""Comparing what a program printed with what it should have printed, outside of the sandbox."""

from __future__ import annotations

from ratchet.sandbox.base import Result


def passed(result: Result, expected: bytes | str) -> bool:
    """True if the program ended by itself with exit code 0 and printed `expected`, but for spaces
    at the end of lines and empty lines at the end. Bytes are compared, so look-alike characters and
    invalid UTF-8 never match."""
    wanted = expected.encode("utf-8", "surrogatepass") if isinstance(expected, str) else expected
    return result.ok and _lines(result.stdout) == _lines(wanted)


def _lines(text: bytes) -> list[bytes]:
    return [line.rstrip(b" \t\r") for line in text.rstrip(b" \t\r\n").split(b"\n")]
