"""Compare a program's output with the expected output, outside of the sandbox."""

from __future__ import annotations

from ratchet.sandbox.base import Result


def output_matches(result: Result, expected: bytes | str) -> bool:
    """Return True if the program exited with code 0 and printed `expected`.

    Spaces at the end of lines and empty lines at the end are ignored. Bytes are compared, so
    look-alike characters and invalid UTF-8 never match.
    """
    if isinstance(expected, str):
        expected = expected.encode("utf-8", "surrogatepass")
    return result.ok and _split_lines(result.stdout) == _split_lines(expected)


def _split_lines(text: bytes) -> list[bytes]:
    return [line.rstrip(b" \t\r") for line in text.rstrip(b" \t\r\n").split(b"\n")]
