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
from numpy.typing import NDArray

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
# One row may hold MAX_ROW_VALUES values in lists, or MAX_VALUES_PER_BYTE for each byte of its file
# if that is more. Equal values pack to almost nothing, and each becomes an object of Python.
MAX_ROW_VALUES = 1 << 20
MAX_VALUES_PER_BYTE = 8
BYTES_PER_VALUE = 64  # a text in a list that other items may share counts by its length
VIEWS = (pa.StringViewArray, pa.BinaryViewArray)
TEXTS = (
    pa.StringArray,
    pa.LargeStringArray,
    pa.BinaryArray,
    pa.LargeBinaryArray,
    pa.FixedSizeBinaryArray,
)


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
                self._check_columns(self._schema)
        # UnicodeDecodeError: a column whose name is no UTF-8.
        except (pa.ArrowException, UnicodeDecodeError) as error:
            raise DataError(
                f"{path}: not a valid {self.format_name} file: {error}: write it again"
            ) from error
        if not sum(self.block_sizes):
            raise DataError(f"{path}: the file holds no rows")
        # Files of an object store are not held to limits that depend on the size.
        self._file_bytes = None if is_address(path) else Path(path).stat().st_size
        self._check_row_count()
        # For each block, the index of the row after its last row.
        self.block_ends = list(accumulate(self.block_sizes))
        self._cached_block = lru_cache(WINDOW)(self._load_block)

    def _check_columns(self, schema: Any) -> None:
        """Raise DataError for two columns of one name, or a column of a type that is not read.

        A row would keep only one of two values of the same name.
        """
        names = Counter(schema.names)
        repeated = next((name for name, count in names.items() if count > 1), None)
        if repeated is not None:
            raise DataError(f"{self.path}: two columns are called '{repeated:.80}': rename one")
        for field in schema:
            if not _is_readable(field.type):
                raise DataError(
                    f"{self.path}: column '{field.name:.80}' has the type {field.type!s:.80}, "
                    "which is not read: write it as lists and structs"
                )

    def _check_row_count(self) -> None:
        """Raise DataError if a small file declares so many rows that they must be repetitions."""
        n_rows, size = sum(self.block_sizes), self._file_bytes
        if size is not None and n_rows > max(MIN_BOMB_ROWS, MAX_ROWS_PER_BYTE * size):
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

    def _load_block(self, block: int) -> Any:
        """Return a block's rows.

        Raises DataError if a row of a small file holds so many values that they are repetitions.
        """
        rows, size = self._read_block(block), self._file_bytes
        if size is None:
            return rows
        batches = rows.to_batches() if isinstance(rows, pa.Table) else [rows]
        counts = np.concatenate([_count_list_values(batch) for batch in batches])
        longest = int(counts.argmax())
        if counts[longest] > max(MAX_ROW_VALUES, MAX_VALUES_PER_BYTE * size):
            start = self.block_ends[block] - len(rows)
            raise DataError(
                f"{self.where(start + longest)}: its lists unpack to {counts[longest]:,.0f} "
                f"values, in a file of {size:,} bytes, so they are repetitions: write shorter lists"
            )
        return rows

    def _open(self, source: Any) -> Sequence[int]:
        """Open the file, and return the number of rows of each block."""
        raise NotImplementedError

    def _read_block(self, block: int) -> Any:
        """Return a block's rows, a table or a record batch."""
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
        for i, column in enumerate(columns):
            is_text = column.physical_type == "BYTE_ARRAY"
            # `length` is the size of each value of a FIXED_LEN_BYTE_ARRAY, else 0.
            width = 0 if is_text else max(8, self._file.schema.column(i).length)
            size += max(column.total_uncompressed_size, width * column.num_values)
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


def _is_readable(kind: Any) -> bool:
    """True if no value of a type can repeat an inner array, however short the file."""
    if isinstance(kind, pa.BaseExtensionType):
        return _is_readable(kind.storage_type)
    if pa.types.is_struct(kind):
        return all(_is_readable(field.type) for field in kind)
    if pa.types.is_map(kind):
        return _is_readable(kind.key_type) and _is_readable(kind.item_type)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return _is_readable(kind.value_type)
    # Views of lists, unions and run-end encoded arrays are nested too.
    return not pa.types.is_nested(kind.value_type if pa.types.is_dictionary(kind) else kind)


def _count_list_values(batch: Any) -> NDArray[np.float64]:
    """Return the number of values in each row's lists, those of inner lists included."""
    counts = np.zeros(len(batch))
    for column in batch.columns:
        for array, bounds, in_list in _iter_arrays(column, np.arange(len(batch) + 1)):
            if in_list:
                counts += np.diff(bounds) + _count_shared_bytes(array, bounds) / BYTES_PER_VALUE
    return counts


def _count_text_bytes(array: Any) -> float:
    """Return the bytes of an array's shared texts, those of inner arrays included."""
    walk = _iter_arrays(array, np.array([0, len(array)]))
    return sum(_count_shared_bytes(inner, bounds).sum() for inner, bounds, _ in walk)


def _iter_arrays(
    array: Any, bounds: NDArray[np.int64], in_list: bool = False
) -> Iterator[tuple[Any, NDArray[np.int64], bool]]:
    """Yield an array and the arrays in it, each with its bounds, and True if it is in a list.

    Args:
        array: The array.
        bounds: Row i has the array's values from `bounds[i]` up to `bounds[i + 1]`.
        in_list: True if the array is itself in a list.
    """
    yield array, bounds, in_list
    if isinstance(array, pa.ExtensionArray):
        yield from _iter_arrays(array.storage, bounds, in_list)
    elif isinstance(array, pa.StructArray):
        for i in range(array.type.num_fields):
            yield from _iter_arrays(array.field(i), bounds, in_list)
    elif isinstance(array, pa.FixedSizeListArray):
        yield from _iter_arrays(array.values, (array.offset + bounds) * array.type.list_size, True)
    elif isinstance(array, pa.ListArray | pa.LargeListArray) and len(array):
        bounds = array.offsets.to_numpy()[bounds].astype(np.int64)
        is_map = isinstance(array, pa.MapArray)
        for inner in (array.keys, array.items) if is_map else (array.values,):
            yield from _iter_arrays(inner, bounds, True)


def _count_shared_bytes(array: Any, bounds: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return each row's bytes of texts whose memory may be shared, counted at each use."""
    if isinstance(array, pa.DictionaryArray):
        lengths = np.append(_measure_texts(array.dictionary), 0)
        lengths = lengths[array.indices.cast(pa.int64()).fill_null(-1).to_numpy()]
    elif isinstance(array, VIEWS):
        lengths = _measure_texts(array)
    else:
        return np.zeros(len(bounds) - 1, np.int64)
    return np.diff(np.append(0, np.cumsum(lengths))[bounds])


def _measure_texts(array: Any) -> NDArray[np.int64]:
    """Return the number of bytes of each text in an array; zeros for values that are no texts."""
    if isinstance(array, VIEWS):
        # A view is four integers of 32 bits, the first of which is the length.
        lengths = np.frombuffer(array.buffers()[1], np.int32)[::4]
        return lengths[array.offset : array.offset + len(array)].clip(0).astype(np.int64)
    if isinstance(array, TEXTS):
        lengths = pc.call_function("binary_length", [array]).fill_null(0)
        return lengths.to_numpy(zero_copy_only=False).astype(np.int64)
    return np.zeros(len(array), np.int64)


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
        batch = self._get_batch(block)
        # Arrow checks no offsets: wrong ones would read memory outside of the file.
        batch.validate(full=True)
        return batch


def _open_source(path: str | Path) -> Any:
    """Return the opened file, mapped into memory if it is local."""
    if is_address(path):
        remote: IO[bytes] = open_binary(path)
        return pa.PythonFile(remote, mode="r")
    require_file(path)
    return pa.memory_map(str(path))
