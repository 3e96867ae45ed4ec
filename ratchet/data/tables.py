"""Random access to the rows of data files, without loading them whole.

JSON Lines and CSV files get an index of byte offsets. Parquet and Arrow files are read by row group
(`ratchet.data.formats.arrow_tables`). Several files become one table. Only a JSON array is read
whole.

Rows are checked when they are read, and every error names the file and the row.
"""

from __future__ import annotations

import codecs
import csv
import io
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import accumulate
from pathlib import Path, PurePosixPath
from typing import IO, Any, Protocol

from ratchet.data.files import (
    SUFFIXES,
    FileVersion,
    convert_read_errors,
    find_files,
    make_change_error,
    open_binary,
)
from ratchet.data.jsonl import (
    MAX_ROW_BYTES,
    DataRow,
    check_columns,
    decode_line,
    describe_type,
    iter_raw_lines,
    parse_json,
    parse_object,
)
from ratchet.errors import DataError

MAX_JSON_BYTES = 1 << 30  # size limit of a JSON array, which is read whole


class Table(Protocol):
    """A sequence of rows that can be read in any order.

    Attributes:
        block_sizes: Number of rows of each block. A block's rows are consecutive and are read
            together. All rows are one block if each can be read cheaply by itself.
    """

    @property
    def block_sizes(self) -> Sequence[int]: ...
    def __len__(self) -> int: ...
    def row(self, index: int) -> DataRow:
        """Return a row. Raises DataError, which names file and row, if it can't be read."""
        ...

    def where(self, index: int) -> str:
        """Return the file and the row, for errors."""
        ...


def open_table(*locations: str | Path) -> Table:
    """Return the rows of files, in the order of the arguments.

    Args:
        locations: Paths, object store addresses, patterns or directories.

    Raises DataError if a file can't be read, holds no rows, or is malformed as a whole.
    """
    tables = [_open_file(file) for file in find_files(locations)]
    return tables[0] if len(tables) == 1 else JoinedTable(tables)


def _open_file(path: str | Path) -> Table:
    name = str(path).lower().removesuffix(".gz")
    if name.endswith((".parquet", ".arrow")):
        from ratchet.data.formats.arrow_tables import open_arrow  # slow to import

        return open_arrow(path)
    if name.endswith((".csv", ".tsv")):
        return CsvFile(path)
    if name.endswith(".json") and _begins_array(path):
        return JsonArray(path)
    ending = PurePosixPath(name).suffix
    if ending and not name.endswith(SUFFIXES):
        raise DataError(
            f"{path}: '{ending}' is no ending of a data file. Read are {', '.join(SUFFIXES)}: "
            "convert the file, or rename it if it is one of these"
        )
    return JsonLines(path)


def iter_rows(table: Table) -> Iterator[DataRow]:
    return (table.row(index) for index in range(len(table)))


def read_rows(path: str | Path, columns: Mapping[str, type] | None = None) -> Iterator[DataRow]:
    """Yield the rows of a file of any format. See `ratchet.data.jsonl.read_jsonl` for `columns`."""
    table = open_table(path)
    for index in range(len(table)):
        row = table.row(index)
        check_columns(row.values, columns or {}, table.where(index))
        yield row


class _IndexedFile:
    """A file with an index of its rows: their byte offsets (`starts`) and their line numbers."""

    unit = "line"

    def __init__(self, path: str | Path) -> None:
        import numpy as np

        self.path = path
        with ExitStack() as on_error:
            self._file = on_error.enter_context(open_binary(path))
            with convert_read_errors(path):
                # The version is read before the index, to notice a file that changes meanwhile.
                self._version = FileVersion(path, self._file)
                rows = np.fromiter(self._find_row_starts(self._file), np.dtype((np.int64, 2)))
            if not len(rows):
                raise DataError(f"{path}: the file holds no rows")
            on_error.pop_all()  # the file stays open, because the offsets are valid only in it
        self.line_numbers, self.starts = rows[:, 0], rows[:, 1]

    @property
    def block_sizes(self) -> Sequence[int]:
        return (len(self),)

    def __len__(self) -> int:
        return len(self.starts)

    def row(self, index: int) -> DataRow:
        line, offset = int(self.line_numbers[index]), int(self.starts[index])
        with convert_read_errors(self.path):
            self._file.seek(offset)
            try:
                values = self._read_values(line, offset)
            # The version is checked after an error too: a changed file is a better explanation of
            # a malformed row.
            finally:
                self._version.check()
        return DataRow(line, values)

    def where(self, index: int) -> str:
        return f"{self.path}, {self.unit} {self.line_numbers[index]}"

    def _find_row_starts(self, file: IO[bytes]) -> Iterator[tuple[int, int]]:
        """Yield (line, offset) of each row."""
        raise NotImplementedError

    def _read_values(self, line: int, offset: int) -> dict[str, Any]:
        """Return the values of the row at the file's current position, `offset`."""
        raise NotImplementedError


class JsonLines(_IndexedFile):
    """A JSON Lines file."""

    def _find_row_starts(self, file: IO[bytes]) -> Iterator[tuple[int, int]]:
        return (
            (line, offset)
            for line, offset, raw in iter_raw_lines(file, self.path)
            if not raw.isspace()
        )

    def _read_values(self, line: int, offset: int) -> dict[str, Any]:
        raw = self._file.readline(MAX_ROW_BYTES + 1)
        return parse_object(decode_line(raw, self.path, line, offset), self.path, line, {})


class CsvFile(_IndexedFile):
    """A CSV file (RFC 4180) with a header. Every value is text; an empty one is null.

    Attributes:
        separator: ",", or ";" or a tab if the header holds no comma outside quotes. In a .tsv
            file a tab comes first.
    """

    def _find_row_starts(self, file: IO[bytes]) -> Iterator[tuple[int, int]]:
        # A .tsv file with one column has no tab.
        is_tsv = str(self.path).lower().removesuffix(".gz").endswith(".tsv")
        marks = "\t,;" if is_tsv else ",;\t"
        self.separator = _find_separator(next(iter(_TextLines(file, self.path)), ""), marks)
        file.seek(0)
        lines = _TextLines(file, self.path)
        records = _read_records(lines, self.separator)
        header = next(records, None)
        if header is None:
            return
        self.header = header
        repeated = next((name for name, count in Counter(header).items() if count > 1), None)
        if repeated is not None:
            raise DataError(
                f"{self.path}, line 1: two columns are called '{repeated:.80}': rename one"
            )
        start = lines.line + 1, lines.offset
        for record in records:
            if record:  # not a blank line
                self._check(record, start[0])
                yield start
            start = lines.line + 1, lines.offset

    def _read_values(self, line: int, offset: int) -> dict[str, Any]:
        lines = _TextLines(self._file, self.path, line - 1, offset)
        record = next(_read_records(lines, self.separator), None)
        if record is None:  # the file has become shorter
            raise make_change_error(self.path)
        self._check(record, line)
        return {name: value or None for name, value in zip(self.header, record, strict=True)}

    def _check(self, record: Sequence[str], line: int) -> None:
        if len(record) != len(self.header):
            separators = {",": "commas", ";": "semicolons", "\t": "tabs"}[self.separator]
            raise DataError(
                f"{self.path}, line {line}: {len(record)} values, and the header names "
                f"{len(self.header)} columns: put values that hold {separators} or line ends into "
                "double quotes"
            )


class _TextLines:
    """The text lines of a file.

    Attributes:
        line: Number of the last line that was read.
        offset: Byte offset of the end of that line.
    """

    def __init__(self, file: IO[bytes], path: str | Path, line: int = 0, offset: int = 0) -> None:
        self.path = path
        self.line = line
        self.offset = offset
        self._raw_lines = iter_raw_lines(file, path)
        self._first_line = line
        self._start = offset

    def __iter__(self) -> Iterator[str]:
        for line, offset, raw in self._raw_lines:
            self.line = self._first_line + line
            self.offset = self._start + offset + len(raw)
            yield decode_line(raw, self.path, self.line, self._start + offset) + "\n"


def _find_separator(header: str, marks: str) -> str:
    """Return the first of `marks` that separates columns: programs of many countries write ";"."""
    unquoted = re.sub('"[^"]*"', "", header)
    return next((mark for mark in marks if mark in unquoted), ",")


def _read_records(lines: _TextLines, separator: str) -> Iterator[list[str]]:
    # csv's default limit, 128 KiB, is too small for some conversations.
    csv.field_size_limit(MAX_ROW_BYTES)
    reader = csv.reader(lines, delimiter=separator, strict=True)
    while True:
        try:
            record = next(reader, None)
        except csv.Error as error:
            raise DataError(f"{lines.path}, line {lines.line}: malformed CSV: {error}") from error
        if record is None:
            return
        yield record


class JsonArray:
    """A file with one array of objects."""

    def __init__(self, path: str | Path) -> None:
        self.path = path
        with open_binary(path) as file, convert_read_errors(path):
            raw = file.read(MAX_JSON_BYTES + 1)
        if len(raw) > MAX_JSON_BYTES:
            size = f"{MAX_JSON_BYTES >> 30} GiB"
            raise DataError(
                f"{path}: a JSON array of more than {size} would be read at once: write it as "
                "JSON Lines"
            )
        self.rows: list[Any] = parse_json(_decode_lines(raw, path), path, 1)
        if not self.rows:
            raise DataError(f"{path}: the file holds no rows")

    @property
    def block_sizes(self) -> Sequence[int]:
        return (len(self),)

    def __len__(self) -> int:
        return len(self.rows)

    def row(self, index: int) -> DataRow:
        values = self.rows[index]
        if not isinstance(values, dict):
            raise DataError(
                f"{self.where(index)}: holds {describe_type(values)}, must be an object such as "
                '{"key": ...}'
            )
        return DataRow(index + 1, values, "row")

    def where(self, index: int) -> str:
        return f"{self.path}, row {index + 1}"


def _decode_lines(raw: bytes, path: str | Path) -> str:
    """Decode a whole file. Raises DataError naming the line of the first invalid UTF-8 byte."""
    try:
        return raw.removeprefix(codecs.BOM_UTF8).decode("utf-8")
    except UnicodeDecodeError:
        for line, offset, content in iter_raw_lines(io.BytesIO(raw), path):
            decode_line(content, path, line, offset)
        raise


def _begins_array(path: str | Path) -> bool:
    with open_binary(path) as file, convert_read_errors(path):
        return file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"["


class JoinedTable:
    """The concatenation of several tables."""

    def __init__(self, tables: Sequence[Table]) -> None:
        self.tables = tables
        # For each table, the index of the row after its last row.
        self.table_ends = list(accumulate(len(table) for table in tables))
        self.block_sizes: Sequence[int] = [block for table in tables for block in table.block_sizes]

    def __len__(self) -> int:
        return self.table_ends[-1]

    def row(self, index: int) -> DataRow:
        table, row_in_table = self._locate(index)
        return table.row(row_in_table)

    def where(self, index: int) -> str:
        table, row_in_table = self._locate(index)
        return table.where(row_in_table)

    def _locate(self, index: int) -> tuple[Table, int]:
        table_index = bisect_right(self.table_ends, index)
        return self.tables[table_index], index - (
            self.table_ends[table_index - 1] if table_index else 0
        )
