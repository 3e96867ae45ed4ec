"""Read untrusted files and JSON within bounds: a recipe, a row or a model directory may hold
anything.

Every function raises OSError or ValueError; its caller turns these into an error that names the
file. This module imports the standard library only.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

MAX_JSON_BYTES = 256 << 20  # the largest published tokenizer.json has 33 MiB
MAX_TEXT_BYTES = 4 << 20  # a chat template; the longest published one has 20 KiB
# JSON may hold MAX_CONTAINERS objects and arrays, and one more for every CHARS_PER_CONTAINER
# characters. The bound is needed because a small object or array takes 3 to 8 characters of text,
# and 20 to 30 times as many bytes of memory.
MAX_CONTAINERS = 1 << 20
CHARS_PER_CONTAINER = 16
# Levels of objects and arrays. Code that walks a value recursively breaks on a few hundred.
MAX_DEPTH = 100
# An unterminated string matches too. Otherwise the search would begin again at each quotation mark
# in it, which takes quadratic time.
_STRING = re.compile(r'"(?:[^"\\]++|\\.?)*+"?', re.DOTALL)
# Files of a model beside its weights.
MODEL_SUFFIXES = (".json", ".model", ".txt", ".jinja")
FILE_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def open_file(path: str | Path) -> BinaryIO:
    """Open a plain file for reading; links are followed.

    A pipe or a device, which may never end, is refused unread. Raises OSError; if the path is no
    plain file, its `strerror` says what it is instead.
    """
    try:
        _require_plain(path, os.stat(path).st_mode)
    except ValueError as error:  # for example a null character
        raise OSError(errno.EINVAL, f"it can't name a file ({error})", str(path)) from None
    # A pipe may have replaced the file since: without O_NONBLOCK, `open` would wait for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _require_plain(path, os.fstat(descriptor).st_mode)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def require_file(path: str | Path) -> None:
    """Raise the OSError of `open_file` if the path is not a readable plain file."""
    open_file(path).close()


def _require_plain(path: str | Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = next((name for is_kind, name in FILE_KINDS if is_kind(mode)), "no file")
        number = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
        raise OSError(number, f"it is {kind}, and must be a plain file", str(path))


def explain_broken_link(directory: str | Path) -> str | None:
    """Return an error about a link of a model directory that names no file; None without one.

    Most files of a model are optional, so a reader would take such a link for an absent file.
    """
    try:
        names = sorted(os.listdir(directory))
    except OSError:  # a directory that can't be listed
        return None
    for name in names:
        path = os.path.join(directory, name)
        if name.startswith("."):  # an editor's lock
            continue
        if name.endswith(MODEL_SUFFIXES) and os.path.islink(path) and not os.path.exists(path):
            return (
                f"{path} is a link to a file that doesn't exist: copy the model with the files "
                "that its links name (cp -rL), or remove the link"
            )
    return None


def read_last_lines(path: str | Path, n_lines: int, *, max_bytes: int) -> list[str]:
    """Return up to `n_lines` last lines of a text file, from its last `max_bytes` bytes only.

    A line that begins before these bytes is left out, unless there is no other. Return [] if the
    file can't be read.
    """
    try:
        with open_file(path) as file:
            start = max(0, file.seek(0, os.SEEK_END) - max_bytes)
            file.seek(start)
            lines = file.read(max_bytes).decode("utf-8", "replace").splitlines()
    except OSError:
        return []
    return (lines[1:] or lines if start else lines)[-n_lines:]


def read_bytes(path: str | Path, limit: int = MAX_JSON_BYTES) -> bytes:
    """Read a whole plain file. Raises OSError, also for more than `limit` bytes."""
    with open_file(path) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise OSError(errno.EFBIG, f"it holds more than {format_size(limit)}", str(path))
    return content


def read_text(path: str | Path, limit: int = MAX_TEXT_BYTES) -> str:
    """Read a whole plain file of UTF-8 with "\\n" line ends.

    Raises OSError, and ValueError that names the first byte that is not UTF-8.
    """
    return decode_utf8(read_bytes(path, limit)).replace("\r\n", "\n")


def decode_utf8(content: bytes) -> str:
    """Decode UTF-8, with or without a byte order mark.

    Raises ValueError that names line and offset of the first wrong byte.
    """
    try:
        return content.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        byte = error.object[error.start]
        raise ValueError(
            f"is not UTF-8 text: byte 0x{byte:02x} at offset {error.start}, in line {line}"
        ) from None


def format_size(size: int) -> str:
    """Return a number of bytes as "256 KiB", "64 MiB" or "1 GiB"."""
    for shift, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size >= 1 << shift:
            return f"{size / (1 << shift):g} {unit}"
    return f"{size} bytes"


# --- JSON


def read_json(path: str | Path, limit: int = MAX_JSON_BYTES) -> Any:
    """Read a file of JSON within a bound of bytes and of depth. Raises OSError or ValueError."""
    return parse_json(decode_utf8(read_bytes(path, limit)))


def parse_json(
    text: str | bytes,
    *,
    object_pairs_hook: Callable[[list[tuple[str, Any]]], Any] | None = None,
    parse_constant: Callable[[str], Any] | None = None,
) -> Any:
    """Parse JSON. Raises ValueError; for malformed JSON its subclass JSONDecodeError.

    It also refuses more than MAX_DEPTH levels, objects and arrays that take far more memory than
    their text, and an integer with more digits than Python reads (4,300).
    """
    if isinstance(text, bytes):
        text = decode_utf8(text)
    _check_container_count(text)
    try:
        value = json.loads(text, object_pairs_hook=object_pairs_hook, parse_constant=parse_constant)
    except RecursionError:
        _raise_too_deep()
    # Counting brackets is quick, and rules out deep nesting in most texts.
    if text.count("[") + text.count("{") > MAX_DEPTH and is_deeper(value, MAX_DEPTH):
        _raise_too_deep()
    return value


def _check_container_count(text: str) -> None:
    """Raise ValueError if the text holds more objects and arrays than real data of its length."""
    limit = MAX_CONTAINERS + len(text) // CHARS_PER_CONTAINER
    if text.count("[") + text.count("{") <= limit:
        return
    without_strings = _STRING.sub("", text)  # strings may hold formulas, full of brackets
    if without_strings.count("[") + without_strings.count("{") > limit:
        raise ValueError(
            f"it holds more than {limit:,} objects and arrays in {len(text):,} characters; they "
            "would take far more memory than the text"
        )


def _raise_too_deep() -> NoReturn:
    raise ValueError(f"nested more than {MAX_DEPTH} deep")


def is_deeper(value: object, depth: int) -> bool:
    """Return True if dicts and lists are nested more than `depth` deep.

    The value is walked level by level, without recursion.
    """
    level: list[Any] = [value]
    for _ in range(depth + 1):
        level = [item for item in level if isinstance(item, dict | list)]
        if not level:
            return False
        level = [
            inner for item in level for inner in (item.values() if isinstance(item, dict) else item)
        ]
    return True
