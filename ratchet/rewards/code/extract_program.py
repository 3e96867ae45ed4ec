"""Extract programs from answers, and compare their outputs with the expected ones."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Literal

from ratchet.sandbox.base import Result
from ratchet.sandbox.compare_output import output_matches

Blocks = Literal["last", "first", "all"]
# Marks of fenced blocks, and values of a row's column `language`, in lower case.
LANGUAGE_MARKS = {
    "python": ("python", "python3", "py", "py3"),
    "cpp": ("cpp", "c++", "cc", "cxx"),
    "go": ("go", "golang"),
}
FENCES = ("```", "~~~")
NUMBER = re.compile(rb"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d{1,3})?")
MAX_NUMBER_BYTES = 64


def extract_program(
    text: str, blocks: Blocks, *, require_block: bool, language: str = "python"
) -> str | None:
    """Return the program in an answer; None if it lacks a required block.

    Programs are the fenced blocks marked as `language` or, if there are none, the unmarked blocks.
    The last one, the first one or all joined are returned, as `blocks` says. Without such a block
    the whole text is the program. A block that is never closed ends with the text.
    """
    marks = LANGUAGE_MARKS[language]
    marked_blocks = find_fenced_blocks(text)
    programs = [code for mark, code in marked_blocks if mark in marks] or [
        code for mark, code in marked_blocks if not mark
    ]
    if not programs:
        return None if require_block else text
    return "\n\n".join(programs) if blocks == "all" else programs[0 if blocks == "first" else -1]


def find_language(text: str, blocks: Blocks, allowed: Sequence[str] = tuple(LANGUAGE_MARKS)) -> str:
    """Return the language of the answer's last block, or of its first if `blocks` says so.

    Blocks of other languages than the allowed ones do not count. Without a marked block it is
    Python, or else the first of those.
    """
    marks = [mark for mark, _ in find_fenced_blocks(text)]
    languages = [language for mark in marks if (language := read_language(mark)) in allowed]
    default = "python" if "python" in allowed else allowed[0]
    return str(languages[0 if blocks == "first" else -1]) if languages else default


def read_language(name: str) -> str | None:
    """Return the language with this name or mark; None if it is not known."""
    name = name.strip().lower()
    return next((key for key, marks in LANGUAGE_MARKS.items() if name in marks), None)


def find_fenced_blocks(text: str) -> list[tuple[str, str]]:
    """Return (language in lower case, content) of each fenced block."""
    fences: list[tuple[str, list[str]]] = []
    fence = ""
    for line in text.splitlines(keepends=True):
        stripped = line.strip()
        if fence:
            if stripped.startswith(fence) and not stripped.strip(fence[0]):
                fence = ""
            else:
                fences[-1][1].append(line)
        elif stripped.startswith(FENCES):
            fence = stripped[: len(stripped) - len(stripped.lstrip(stripped[0]))]
            words = stripped[len(fence) :].split()
            fences.append((words[0].lower() if words else "", []))
    return [(language, "".join(lines)) for language, lines in fences]


def has_expected_output(
    result: Result, expected: str, compare: Literal["tokens", "lines"], tolerance: float | None
) -> bool:
    """True if the program ended by itself with exit code 0 and printed the expected output.

    Bytes are compared, so that look-alike characters never match.

    Args:
        compare: "tokens" compares words separated by white space; "lines" compares lines, without
            the spaces at their ends and the empty lines at the end.
        tolerance: Largest difference between equal numbers among the tokens: absolute if the
            expected number is within ±1, else relative to it. None: tokens must be identical.
    """
    if compare == "lines":
        return output_matches(result, expected)
    printed_tokens = result.stdout.split()
    expected_tokens = expected.encode("utf-8", "surrogatepass").split()
    if not result.ok or len(printed_tokens) != len(expected_tokens):
        return False
    return all(
        printed_token == expected_token or _is_close(printed_token, expected_token, tolerance)
        for printed_token, expected_token in zip(printed_tokens, expected_tokens, strict=True)
    )


def _is_close(printed: bytes, expected: bytes, tolerance: float | None) -> bool:
    if tolerance is None or len(printed) > MAX_NUMBER_BYTES or len(expected) > MAX_NUMBER_BYTES:
        return False
    if not NUMBER.fullmatch(printed) or not NUMBER.fullmatch(expected):
        return False
    value, target = float(printed), float(expected)
    # A number beyond the range of floats, such as 1e400, is infinite, and close to no number.
    return math.isfinite(target) and abs(value - target) <= tolerance * max(1.0, abs(target))
