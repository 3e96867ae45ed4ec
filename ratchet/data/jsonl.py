"""JSON Lines, read as a stream: one object a line, UTF-8. Every error names the file and the line.

Accepted: a byte order mark, CRLF, blank lines. Refused, because they would train silently on something else than what the
file says: repeated keys, NaN and Infinity, lone surrogates, nulls and wrong types in a column that is asked for.
"""

from __future__ import annotations

import codecs
import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from ratchet.errors import DataError

TYPE_NAMES = {str: "a string", int: "an integer", float: "a number", bool: "true or false", list: "an array", dict: "an object"}
CHUNK_BYTES = 1 << 20


class Row(NamedTuple):
    line: int  # 1-based, as editors count
    values: dict[str, Any]


def read_jsonl(path: str | Path, columns: Mapping[str, type] | None = None) -> Iterator[Row]:
    """The rows of `path` in order. `columns` gives the keys that each row must have and their types (str, int, float, bool,
    list or dict; an integer is also a number); other keys are kept, unchecked.

    Raises DataError naming the file, and the line where there is one.
    """
    for line, values in each_line(path, columns):
        if isinstance(values, DataError):
            raise values
        yield Row(line, values)


def each_line(path: str | Path, columns: Mapping[str, type] | None = None) -> Iterator[tuple[int, dict[str, Any] | DataError]]:
    """As `read_jsonl`, for who goes on after a bad line: (its number, its values or what is wrong with it).

    Raises DataError where the file as a whole can't be read.
    """
    path = Path(path)
    offset = rows = 0
    try:
        with path.open("rb") as file:
            for line, raw in enumerate(file, start=1):
                values = _line(raw, path, line, offset, columns or {})
                offset += len(raw)
                if values is not None:
                    rows += 1
                    yield line, values
    except OSError as error:
        raise DataError(f"{path}: can't be read: {error.strerror}") from error
    if not rows:
        raise DataError(f"{path}: the file holds no rows")


def _line(raw: bytes, path: Path, line: int, offset: int, columns: Mapping[str, type]) -> dict[str, Any] | DataError | None:
    """None for a blank line."""
    try:
        text = _decode(raw, path, line, offset)
        return _parse(text, path, line, columns) if text and not text.isspace() else None
    except DataError as error:
        return error


def fingerprint(path: str | Path) -> str:
    """SHA-256 (hex) of a file's size and content, so that a resumed run can tell that its data is still the same.

    Raises DataError when the file can't be read.
    """
    path = Path(path)
    try:
        digest = hashlib.sha256(f"{path.stat().st_size}\n".encode())
        with path.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                digest.update(chunk)
    except OSError as error:
        raise DataError(f"{path}: can't be read: {error.strerror}") from error
    return digest.hexdigest()


def _decode(raw: bytes, path: Path, line: int, offset: int) -> str:
    mark = codecs.BOM_UTF8 if line == 1 and raw.startswith(codecs.BOM_UTF8) else b""
    try:
        return raw[len(mark) :].rstrip(b"\r\n").decode("utf-8")
    except UnicodeDecodeError as error:
        at = error.start + len(mark)
        raise DataError(
            f"{path}, line {line}: not UTF-8: byte 0x{raw[at]:02x} at offset {at} of the line, {offset + at} of the file"
        ) from error


def _parse(text: str, path: Path, line: int, columns: Mapping[str, type]) -> dict[str, Any]:
    try:
        values = json.loads(text, object_pairs_hook=_object, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise DataError(f"{path}, line {line} col {error.colno}: malformed JSON: {error.msg}") from error
    except RecursionError as error:
        raise DataError(f"{path}, line {line}: malformed JSON: nested too deeply") from error
    except ValueError as error:  # from the two hooks below, or an integer of thousands of digits
        raise DataError(f"{path}, line {line}: malformed JSON: {error}") from error
    if not isinstance(values, dict):
        raise DataError(f'{path}, line {line}: holds {_kind(values)}, must be an object such as {{"key": ...}}')
    for name, wanted in columns.items():
        _check(values, name, wanted, f"{path}, line {line}")
    return values


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"key '{next(k for k in keys if keys.count(k) > 1)}' appears twice in one object")
    return values


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _check(values: dict[str, Any], name: str, wanted: type, where: str) -> None:
    if name not in values:
        raise DataError(f"{where}: no column '{name}'; the row has {', '.join(values) or 'no columns'}")
    value = values[name]
    accepted = (int, float) if wanted is float else wanted
    if not isinstance(value, accepted) or (isinstance(value, bool) and wanted is not bool):
        raise DataError(f"{where}: column '{name}' is {_kind(value)}, must be {TYPE_NAMES[wanted]}")
    if isinstance(value, str) and any("\ud800" <= c <= "\udfff" for c in value):
        raise DataError(f"{where}: column '{name}' holds half of a surrogate pair (\\ud800 to \\udfff), which is no text")


def _kind(value: Any) -> str:
    return "null" if value is None else TYPE_NAMES[type(value)]
