"""Read Parquet and Arrow files as tables.

Row groups (in Arrow: record batches) are read when needed, and a few of them are cached.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.ipc
import pyarrow.parquet

from ratchet.data.files import FileVersion, convert_read_errors, open_binary
from ratchet.data.jsonl import DataRow
from ratchet.data.shuffle import WINDOW
from ratchet.errors import DataError
from ratchet.utils.object_store import is_address
from ratchet.utils.safe_read import require_file

MIN_BOMB_ROWS = 100_000  # a file with fewer rows is not a decompression bomb
# A row group may unpack to MAX_GROUP_BYTES, or to MAX_COMPRESSION_RATIO times the file's size if
# that is more. A high ratio alone is normal: a text that all rows share packs to almost nothing.
MAX_GROUP_BYTES = 1 << 30
MAX_COMPRESSION_RATIO = 200
# Maximum rows per byte of a file. Rows that differ take several bytes each, however well packed.
MAX_ROWS_PER_BYTE = 1


def open_arrow(path: str | Path) -> ArrowTable:
    """Open a Parquet or Arrow file. Raises DataError if it is damaged, cut off, or has no rows."""
    name = str(path).lower()
    return ParquetFile(path) if name.endswith(".parquet") else ArrowFile(path)


class ArrowTable:
    """A table whose rows are read from a file, one block at a time.

    Values become Python objects: None for a null, a list for a list, a dict for a struct.

    Attributes:
        block_sizes: Number of rows of each row group or record batch.
    """

    format_name = ""
    _schema: Any  # set by `_open`

    def __init__(self, path: str | Path) -> None:
        self.path = path
        try:
            with convert_read_errors(path):
                source = _open_source(path)
                self._version = FileVersion(path, source)
                self.block_sizes: Sequence[int] = self._open(source)
                self._check_names(self._schema.names)
        except pa.ArrowException as error:
            raise DataError(
                f"{path}: not a valid {self.format_name} file: {error}: write it again"
            ) from error
        if not sum(self.block_sizes):
            raise DataError(f"{path}: the file holds no rows")
        self._check_row_count()
        # For each block, the index of the row after its last row.
        self.block_ends = list(accumulate(self.block_sizes))
        self._cached_block = lru_cache(WINDOW)(self._read_block)

    def _check_names(self, names: Sequence[str]) -> None:
        """Raise DataError if two columns have one name, because a row would keep only one value."""
        repeated = next((name for name, count in Counter(names).items() if count > 1), None)
        if repeated is not None:
            raise DataError(f"{self.path}: two columns are called '{repeated:.80}': rename one")

    def _check_row_count(self) -> None:
        """Raise DataError if a small file declares so many rows that they must be repetitions."""
        if is_address(self.path):
            return
        n_rows, size = sum(self.block_sizes), Path(self.path).stat().st_size
        if n_rows > MIN_BOMB_ROWS and n_rows > MAX_ROWS_PER_BYTE * size:
            raise DataError(
                f"{self.path}: declares {n_rows:,} rows in {size:,} bytes, so they are "
                "repetitions: write each distinct row once"
            )

    def __len__(self) -> int:
        return self.block_ends[-1]

    def row(self, index: int) -> DataRow:
        block = bisect_right(self.block_ends, index)
        block_start = self.block_ends[block - 1] if block else 0
        try:
            with convert_read_errors(self.path):
                # Reading mapped memory beyond the end of a file that was cut ends the process.
                self._version.check()
                (values,) = self._cached_block(block).slice(index - block_start, 1).to_pylist()
                self._version.check()
        # KeyError and ValueError: values that Python can't hold, such as a struct with one name
        # twice, or a date in an unknown time zone.
        except (pa.ArrowException, KeyError, ValueError) as error:
            raise DataError(
                f"{self.where(index)}: can't be read: {error}: write the file again"
            ) from error
        return DataRow(index + 1, values, "row")

    def where(self, index: int) -> str:
        return f"{self.path}, row {index + 1}"

    def _open(self, source: Any) -> Sequence[int]:
        """Open the file, and return the number of rows of each block."""
        raise NotImplementedError

    def _read_block(self, block: int) -> Any:
        raise NotImplementedError


class ParquetFile(ArrowTable):
    """A table in a Parquet file."""

    format_name = "Parquet"

    def _open(self, source: Any) -> Sequence[int]:
        self._source = source
        self._max_group_bytes = max(MAX_GROUP_BYTES, MAX_COMPRESSION_RATIO * source.size())
        self._file = pyarrow.parquet.ParquetFile(source)
        self._schema = self._file.schema_arrow
        return [self._file.metadata.row_group(i).num_rows for i in range(self._file.num_row_groups)]

    def _read_block(self, block: int) -> Any:
        self._check_group_size(block)
        return self._file.read_row_group(block)

    def _check_group_size(self, block: int) -> None:
        """Raise DataError if an unpacked row group would exceed the size limit."""
        group = self._file.metadata.row_group(block)
        columns = [group.column(i) for i in range(group.num_columns)]
        size = 0
        dictionary_columns: list[str] = []
        for column in columns:
            is_text = column.physical_type == "BYTE_ARRAY"
            size += max(column.total_uncompressed_size, 0 if is_text else 8 * column.num_values)
            # With dictionary encoding, every row may repeat one text as long as the column.
            if (
                is_text
                and column.num_values * column.total_uncompressed_size > self._max_group_bytes
            ):
                dictionary_columns.append(column.path_in_schema)
        if size <= self._max_group_bytes and dictionary_columns:
            encoded = pyarrow.parquet.ParquetFile(self._source, read_dictionary=dictionary_columns)
            table = encoded.read_row_group(block, columns=dictionary_columns)
            size += sum(
                _count_text_bytes(chunk) for column in table.columns for chunk in column.chunks
            )
        if size > self._max_group_bytes:
            raise DataError(
                f"{self.path}: row group {block} unpacks to {size:,} bytes: write the file with "
                "smaller row groups (`row_group_size=1000`)"
            )


def _count_text_bytes(array: Any) -> int:
    """Return the bytes of an array's texts, counting each use of a dictionary's entry."""
    if isinstance(array, pa.DictionaryArray):
        entries = array.dictionary
        counts = np.bincount(array.indices.drop_null().to_numpy(), minlength=len(entries))
        lengths = pc.call_function("binary_length", [entries]).to_numpy(zero_copy_only=False)
        return int(counts @ lengths.astype(np.int64))
    return sum(map(_count_text_bytes, _iter_inner_arrays(array)))


def _iter_inner_arrays(array: Any) -> Iterator[Any]:
    if isinstance(array, pa.StructArray):
        yield from array.flatten()
    elif isinstance(array, pa.MapArray):
        yield from (array.keys, array.items)
    elif isinstance(array, pa.ListArray | pa.LargeListArray | pa.FixedSizeListArray):
        yield array.flatten()


class ArrowFile(ArrowTable):
    """A table in an Arrow file: the file format with an index, or the stream format.

    The package `datasets` writes streams. A local file is memory-mapped.
    """

    format_name = "Arrow"

    def _open(self, source: Any) -> Sequence[int]:
        try:
            file = pyarrow.ipc.open_file(source)
        except pa.ArrowInvalid:
            source.seek(0)
            stream = pyarrow.ipc.open_stream(source)
            self._schema = stream.schema
            batches: Any = list(stream)
            self._get_batch = batches.__getitem__
            return [batch.num_rows for batch in batches]
        self._schema = file.schema
        self._get_batch = file.get_batch
        return [file.get_batch(i).num_rows for i in range(file.num_record_batches)]

    def _read_block(self, block: int) -> Any:
        return self._get_batch(block)


def _open_source(path: str | Path) -> Any:
    """Return the opened file, mapped into memory if it is local."""
    if is_address(path):
        remote: IO[bytes] = open_binary(path)
        return pa.PythonFile(remote, mode="r")
    require_file(path)
    return pa.memory_map(str(path))
