"""Make Arrow arrays from buffers, and read their buffers as NumPy arrays.

`pyarrow.array`, `to_numpy` and, before pyarrow 22, `to_pandas_dtype` would import pandas if it is
installed. Training has no use for pandas, and would pay for the import with time and memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

FLOATS = {"halffloat": "float16", "float": "float32", "double": "float64"}  # as Arrow names them


def make_array(
    values: Sequence[Any] | NDArray[Any], kind: pa.DataType, null_N: NDArray[np.bool_] | None = None
) -> pa.Array:
    """Return an array of numbers, booleans or texts.

    Args:
        values: A NumPy array, or a sequence in which None is null.
        kind: The type of the array. Numbers are converted to it as by `ndarray.astype`.
        null_N: [N], true for each null of a NumPy array; None: it has no null.

    Raises:
        UnicodeEncodeError: A text has half of a surrogate pair.
    """
    if not isinstance(values, np.ndarray):
        null_N = np.fromiter((value is None for value in values), np.bool_, len(values))
        if kind == pa.string():
            return _make_strings(values, null_N)
        values = np.array([0 if value is None else value for value in values])
    with np.errstate(over="ignore"):  # a float64 may be infinite as a float32
        numbers = np.ascontiguousarray(values, _get_dtype(kind))
    data = np.packbits(numbers, bitorder="little") if pa.types.is_boolean(kind) else numbers
    return pa.Array.from_buffers(kind, len(numbers), [_pack_nulls(null_N), pa.py_buffer(data)])


def read_array(array: pa.Array) -> NDArray[Any]:
    """Return the numbers or booleans of an array. The value at a null is undefined."""
    start, end = array.offset, array.offset + len(array)
    data = array.buffers()[1]
    if pa.types.is_boolean(array.type):
        bits_N = np.unpackbits(np.frombuffer(data, np.uint8), count=end, bitorder="little")
        return bits_N[start:].astype(np.bool_)
    return np.frombuffer(data, _get_dtype(array.type))[start:end]


def _get_dtype(kind: pa.DataType) -> np.dtype[Any]:
    """Return NumPy's type of a type of numbers or booleans."""
    return np.dtype(FLOATS.get(str(kind), str(kind)))


def _make_strings(values: Sequence[str | None], null_N: NDArray[np.bool_]) -> pa.Array:
    encoded = [b"" if text is None else text.encode() for text in values]
    offsets = np.zeros(len(encoded) + 1, np.int64)
    np.cumsum([len(text) for text in encoded], out=offsets[1:])
    buffers = [_pack_nulls(null_N), pa.py_buffer(offsets), pa.py_buffer(b"".join(encoded))]
    # The cast raises if a column has more than 2 GiB of text.
    return pa.Array.from_buffers(pa.large_string(), len(encoded), buffers).cast(pa.string())


def _pack_nulls(null_N: NDArray[np.bool_] | None) -> pa.Buffer | None:
    """Return the bitmap of the values that are not null; None if there is no null."""
    if null_N is None or not null_N.any():
        return None
    return pa.py_buffer(np.packbits(~null_N, bitorder="little"))
