"""Read Parquet and Arrow files as tables.

Row groups (record batches) are read when they are needed, and a few of them are kept.
"""

from __future__ import annotations

from bisect import bisect_right
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

from ratchet.data.files import open_binary, reading
from ratchet.data.jsonl import DataRow
from ratchet.data.shuffle import WINDOW
from ratchet.errors import DataError
from ratchet.utils.object_store import is_address
from ratchet.utils.safe_read import require_file

MIN_BOMB_ROWS = 100_000  # a file with fewer rows is no decompression bomb
# A row group may unpack to MAX_GROUP_BYTES or, if that is more, to MOST_TIMES the size of the file.
# A high ratio alone is no sign of a bomb: a long text that all rows share packs to almost nothing.
MAX_GROUP_BYTES = 1 << 30
MOST_TIMES = 200
# Maximum rows per byte of a file. Rows that differ take several bytes each, however well packed.
ROWS_A_BYTE = 1


def open_arrow(path: str | Path) -> ArrowTable:
    """Open a Parquet or Arrow file. Raises DataError if it is neither, cut off, or has no rows."""
    name = str(path).lower()
    return ParquetFile(path) if name.endswith(".parquet") else ArrowFile(path)


class ArrowTable:
    """A table whose rows are read from a file, one block at a time.

    In a row, nulls are None, lists are lists, and structs are dicts.

    Attributes:
        blocks: Number of rows of each row group or record batch.
    """

    form = ""

    def __init__(self, path: str | Path) -> None:
        self.path = path
        try:
            with reading(path):
                self.blocks: Sequence[int] = self._open(_source(path))
        except pa.ArrowException as error:
            raise DataError(
                f"{path}: no {self.form} file, or not whole: {error}: make it again"
            ) from error
        if not sum(self.blocks):
            raise DataError(f"{path}: the file holds no rows")
        self._refuse_bomb()
        self.ends = list(accumulate(self.blocks))
        self._kept = lru_cache(WINDOW)(self._block)

    def _refuse_bomb(self) -> None:
        """Raise DataError if a small file states so many rows that they must repeat each other."""
        if is_address(self.path):
            return
        rows, size = sum(self.blocks), Path(self.path).stat().st_size
        if rows > MIN_BOMB_ROWS and rows > ROWS_A_BYTE * size:
            raise DataError(
                f"{self.path}: states {rows:,} rows in {size:,} bytes, so they repeat each other: "
                "write each different row once"
            )

    def __len__(self) -> int:
        return self.ends[-1]

    def row(self, index: int) -> DataRow:
        block = bisect_right(self.ends, index)
        first = self.ends[block - 1] if block else 0
        try:
            with reading(self.path):
                (values,) = self._kept(block).slice(index - first, 1).to_pylist()
        except (pa.ArrowException, UnicodeDecodeError) as error:
            raise DataError(
                f"{self.where(index)}: can't be read: {error}: make the file again"
            ) from error
        return DataRow(index + 1, values, "row")

    def where(self, index: int) -> str:
        return f"{self.path}, row {index + 1}"

    def _open(self, source: Any) -> Sequence[int]:
        """Open the file, and return the number of rows of each block."""
        raise NotImplementedError

    def _block(self, number: int) -> Any:
        raise NotImplementedError


class ParquetFile(ArrowTable):
    form = "Parquet"

    def _open(self, source: Any) -> Sequence[int]:
        self._source, self._limit = source, max(MAX_GROUP_BYTES, MOST_TIMES * source.size())
        self._file = pyarrow.parquet.ParquetFile(source)
        return [self._file.metadata.row_group(i).num_rows for i in range(self._file.num_row_groups)]

    def _block(self, number: int) -> Any:
        self._refuse_large_group(number)
        return self._file.read_row_group(number)

    def _refuse_large_group(self, number: int) -> None:
        """Raise DataError if a row group would fill memory once unpacked."""
        group = self._file.metadata.row_group(number)
        columns = [group.column(i) for i in range(group.num_columns)]
        size, texts = 0, []
        for column in columns:
            is_text = column.physical_type == "BYTE_ARRAY"
            size += max(column.total_uncompressed_size, 0 if is_text else 8 * column.num_values)
            # With a dictionary, all rows may repeat one text that is as long as the whole column.
            if is_text and column.num_values * column.total_uncompressed_size > self._limit:
                texts.append(column.path_in_schema)
        if size <= self._limit and texts:
            packed = pyarrow.parquet.ParquetFile(self._source, read_dictionary=texts)
            table = packed.read_row_group(number, columns=texts)
            size += sum(_text_bytes(chunk) for column in table.columns for chunk in column.chunks)
        if size > self._limit:
            raise DataError(
                f"{self.path}: row group {number} unpacks to {size:,} bytes: write the file with "
                "smaller row groups "
                "(`row_group_size=1000`)"
            )


def _text_bytes(array: Any) -> int:
    """Return the bytes that an array's texts would take without its dictionaries."""
    if isinstance(array, pa.DictionaryArray):
        words = array.dictionary
        counts = np.bincount(array.indices.drop_null().to_numpy(), minlength=len(words))
        lengths = pc.call_function("binary_length", [words]).to_numpy(zero_copy_only=False)
        return int(counts @ lengths.astype(np.int64))
    return sum(map(_text_bytes, _inner_arrays(array)))


def _inner_arrays(array: Any) -> Iterator[Any]:
    if isinstance(array, pa.StructArray):
        yield from array.flatten()
    elif isinstance(array, pa.MapArray):
        yield from (array.keys, array.items)
    elif isinstance(array, pa.ListArray | pa.LargeListArray | pa.FixedSizeListArray):
        yield array.flatten()


class ArrowFile(ArrowTable):
    """An Arrow file: either with an index at its end, or a stream (as `datasets` writes).

    A local file is mapped into memory, not read.
    """

    form = "Arrow"

    def _open(self, source: Any) -> Sequence[int]:
        try:
            file = pyarrow.ipc.open_file(source)
        except pa.ArrowInvalid:
            source.seek(0)
            batches: Any = list(pyarrow.ipc.open_stream(source))
            self._batch = batches.__getitem__
            return [batch.num_rows for batch in batches]
        self._batch = file.get_batch
        return [file.get_batch(i).num_rows for i in range(file.num_record_batches)]

    def _block(self, number: int) -> Any:
        return self._batch(number)


def _source(path: str | Path) -> Any:
    """Return the opened file, mapped into memory if it is local."""
    if is_address(path):
        remote: IO[bytes] = open_binary(path)
        return pa.PythonFile(remote, mode="r")
    require_file(path)
    return pa.memory_map(str(path))
