"""Extract programs from answers, and compare their outputs with the expected ones."""

from __future__ import annotations

import re
from typing import Literal

from ratchet.sandbox.base import Result
from ratchet.sandbox.compare_output import output_matches

Blocks = Literal["last", "first", "all"]
PYTHON = ("python", "python3", "py", "py3")
FENCES = ("```", "~~~")
NUMBER = re.compile(rb"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d{1,3})?")
MAX_NUMBER_BYTES = 64


def extract_program(text: str, blocks: Blocks, *, require_block: bool) -> str | None:
    """Return the program in an answer; None if it lacks a required block.

    The program is the last or first of the fenced blocks marked as Python, else of the unmarked
    ones, or all of them joined. Without such a block it is the whole text. A block that is never
    closed ends with the text.
    """
    found = fenced(text)
    chosen = [code for mark, code in found if mark in PYTHON] or [
        code for mark, code in found if not mark
    ]
    if not chosen:
        return None if require_block else text
    return "\n\n".join(chosen) if blocks == "all" else chosen[0 if blocks == "first" else -1]


def fenced(text: str) -> list[tuple[str, str]]:
    """Return (language in lower case, content) of each fenced block."""
    fences: list[tuple[str, list[str]]] = []
    fence = ""
    for line in text.splitlines(keepends=True):
        bare = line.strip()
        if fence:
            if bare.startswith(fence) and not bare.strip(fence[0]):
                fence = ""
            else:
                fences[-1][1].append(line)
        elif bare.startswith(FENCES):
            fence = bare[: len(bare) - len(bare.lstrip(bare[0]))]
            words = bare[len(fence) :].split()
            fences.append((words[0].lower() if words else "", []))
    return [(mark, "".join(lines)) for mark, lines in fences]


def right_output(
    result: Result, expected: str, compare: Literal["tokens", "lines"], tolerance: float | None
) -> bool:
    """True if the program ended by itself with exit code 0 and printed the expected output.

    Bytes are compared, so that look-alike characters never match.

    Args:
        compare: "tokens" compares what white space separates; "lines" compares lines, without the
            spaces at their ends and the empty lines at the end.
        tolerance: numbers among the tokens that differ from the expected one by at most this,
            absolute or relative to it, are equal; None: tokens must be identical.
    """
    if compare == "lines":
        return output_matches(result, expected)
    said, wanted = result.stdout.split(), expected.encode("utf-8", "surrogatepass").split()
    if not result.ok or len(said) != len(wanted):
        return False
    return all(
        one == other or _close(one, other, tolerance)
        for one, other in zip(said, wanted, strict=True)
    )


def _close(said: bytes, wanted: bytes, tolerance: float | None) -> bool:
    if tolerance is None or len(said) > MAX_NUMBER_BYTES or len(wanted) > MAX_NUMBER_BYTES:
        return False
    if not NUMBER.fullmatch(said) or not NUMBER.fullmatch(wanted):
        return False
    return abs(float(said) - float(wanted)) <= tolerance * max(1.0, abs(float(wanted)))
