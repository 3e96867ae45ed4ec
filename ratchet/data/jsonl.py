"""Read JSON Lines as a stream: one object per line, UTF-8. Every error names the file and the line.

See `ratchet.data.tables` for other formats and for reading rows in any order.

A byte order mark, CRLF and blank lines are accepted. Repeated keys, NaN and Infinity are refused,
because they would silently change what is trained on. Lone surrogates, nulls and wrong types are
refused in required columns.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import IO, Any, NamedTuple, NoReturn

from ratchet.data.files import convert_read_errors, open_binary
from ratchet.errors import DataError
from ratchet.utils import safe_read
from ratchet.utils.terminal_text import shorten_text

TYPE_NAMES = {
    str: "a string",
    int: "an integer",
    float: "a number",
    bool: "true or false",
    list: "an array",
    dict: "an object",
}
CHUNK_BYTES = 1 << 20
# A longer line suggests a file without line ends, which would be read into memory at once.
MAX_ROW_BYTES = 64 << 20


class DataRow(NamedTuple):
    """A row of a data file and its place in the file."""

    line: int
    """Line number, from 1 on. In files without lines it is the row number."""
    values: dict[str, Any]
    unit: str = "line"
    """The word for this number in errors: "line" or "row"."""

    @property
    def where(self) -> str:
        return f"{self.unit} {self.line}"


def read_jsonl(path: str | Path, columns: Mapping[str, type] | None = None) -> Iterator[DataRow]:
    """Yield the rows of `path` in order.

    Args:
        columns: Keys that each row must have, with their types (str, int, float, bool, list or
            dict; float accepts integers). Other keys are kept unchecked.

    Raises DataError, which names the file and the line.
    """
    for line, values in read_lines(path, columns):
        if isinstance(values, DataError):
            raise values
        yield DataRow(line, values)


def read_lines(
    path: str | Path, columns: Mapping[str, type] | None = None
) -> Iterator[tuple[int, dict[str, Any] | DataError]]:
    """Yield the number of each line, and its values or its error, so that bad lines can be skipped.

    Raises DataError if the file as a whole can't be read. See `read_jsonl`.
    """
    n_rows = 0
    with open_binary(path) as file, convert_read_errors(path):
        for line, offset, raw in iter_raw_lines(file, path):
            values = _parse_line(raw, path, line, offset, columns or {})
            if values is not None:
                n_rows += 1
                yield line, values
    if not n_rows:
        raise DataError(f"{path}: the file holds no rows")


def iter_raw_lines(file: IO[bytes], path: str | Path) -> Iterator[tuple[int, int, bytes]]:
    """Yield (number, offset, bytes) of each line. Raises DataError for lines over MAX_ROW_BYTES."""
    line = offset = 0
    while raw := file.readline(MAX_ROW_BYTES + 1):
        line += 1
        if len(raw) > MAX_ROW_BYTES:
            raise DataError(
                f"{path}, line {line}: longer than {MAX_ROW_BYTES >> 20} MiB: write one row a "
                "line, or drop the row"
            )
        yield line, offset, raw
        offset += len(raw)


def _parse_line(
    raw: bytes, path: str | Path, line: int, offset: int, columns: Mapping[str, type]
) -> dict[str, Any] | DataError | None:
    """Return the values of a line, or its error; None for a blank line."""
    try:
        text = decode_line(raw, path, line, offset)
        return parse_object(text, path, line, columns) if text and not text.isspace() else None
    except DataError as error:
        return error


def fingerprint(path: str | Path) -> str:
    """Return the SHA-256 (hex) of a file's size and content, to detect changed data on resuming.

    Raises DataError if the file can't be read.
    """
    path = Path(path)
    try:
        digest = hashlib.sha256(f"{path.stat().st_size}\n".encode())
        with safe_read.open_file(path) as file:
            while chunk := file.read(CHUNK_BYTES):
                digest.update(chunk)
    except OSError as error:
        raise DataError(f"{path}: can't be read: {error.strerror}") from error
    return digest.hexdigest()


def decode_line(raw: bytes, path: str | Path, line: int, offset: int) -> str:
    """Return the text of a line without its line end. Raises DataError if it is not UTF-8."""
    byte_order_mark = codecs.BOM_UTF8 if line == 1 and raw.startswith(codecs.BOM_UTF8) else b""
    try:
        return raw[len(byte_order_mark) :].rstrip(b"\r\n").decode("utf-8")
    except UnicodeDecodeError as error:
        position = error.start + len(byte_order_mark)
        raise DataError(
            f"{path}, line {line}: not UTF-8: byte 0x{raw[position]:02x} at offset {position} of "
            f"the line, {offset + position} of the file: save it as UTF-8"
        ) from error


def parse_object(
    text: str, path: str | Path, line: int, columns: Mapping[str, type]
) -> dict[str, Any]:
    """Return the object in a line's text. Raises DataError for other JSON or wrong columns."""
    values = parse_json(text, path, line)
    if not isinstance(values, dict):
        raise DataError(
            f"{path}, line {line}: holds {describe_type(values)}, must be an object such as "
            '{"key": ...}'
        )
    check_columns(values, columns, f"{path}, line {line}")
    return values


def parse_json(text: str, path: str | Path, line: int) -> Any:
    """Parse JSON text that begins on line `line`. Raises DataError that names line and column."""
    try:
        return safe_read.parse_json(
            text, object_pairs_hook=_refuse_repeated_keys, parse_constant=_refuse_constant
        )
    except json.JSONDecodeError as error:
        place = f"line {line + error.lineno - 1} col {error.colno}"
        raise DataError(f"{path}, {place}: malformed JSON: {error.msg}") from error
    # Raised by the two hooks below, for too deep nesting, and for a number with too many digits.
    except ValueError as error:
        raise DataError(f"{path}, line {line}: malformed JSON: {error}") from error


def _refuse_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        repeated = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"key '{shorten_text(repeated, 80)}' appears twice in one object")
    return values


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def check_columns(values: Mapping[str, Any], columns: Mapping[str, type], where: str) -> None:
    """Raise DataError for a column that is missing, of another type, or holds lone surrogates."""
    for name, expected in columns.items():
        _check_column(values, name, expected, where)


def _check_column(values: Mapping[str, Any], name: str, expected: type, where: str) -> None:
    if name not in values:
        raise DataError(f"{where}: no column '{name}'; the row has {list_names(values)}")
    value = values[name]
    accepted = (int, float) if expected is float else expected
    if not isinstance(value, accepted) or (isinstance(value, bool) and expected is not bool):
        raise DataError(
            f"{where}: column '{name}' is {describe_type(value)}, must be {TYPE_NAMES[expected]}"
        )
    if isinstance(value, str) and any("\ud800" <= c <= "\udfff" for c in value):
        raise DataError(
            f"{where}: column '{name}' holds half of a surrogate pair (\\ud800 to \\udfff), which "
            "is not text"
        )


def list_names(values: Iterable[Any]) -> str:
    """Return the column names for an error message, up to the first hundred."""
    return shorten_text(", ".join(str(name) for name in islice(values, 100)), 400) or "no columns"


def is_text_or_number(value: Any) -> bool:
    """Return True for a JSON string or number: NaN, infinity, true and false are none."""
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, str | int) and not isinstance(value, bool)


def describe_type(value: Any) -> str:
    """Return the JSON type of a value for an error message, such as "an array"."""
    if isinstance(value, float) and not math.isfinite(value):
        return f"{value}, which is no JSON number"
    return "null" if value is None else TYPE_NAMES.get(type(value), f"a {type(value).__name__}")
