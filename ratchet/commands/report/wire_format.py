"""Pack a report's data for its page: small values as JSON, large arrays as raw bytes.

assets/wire.js reads the format.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Arrays = Mapping[str, NDArray[Any]]
ALIGNMENT = 8  # JavaScript's typed arrays must begin at a multiple of their item size
# Names of numpy's types in the packed format.
KINDS = {
    "uint8": "u1",
    "uint16": "u2",
    "int32": "i4",
    "uint32": "u4",
    "float32": "f4",
    "float64": "f8",
}


def pack(facts: Mapping[str, Any], arrays: Arrays) -> bytes:
    """Return the header's length (4 bytes, little-endian), the header as JSON, then every array.

    The header has the keys of `facts`. Its key "arrays" maps each array's name to its kind, its
    offset after the header, and its number of items.
    """
    index: dict[str, tuple[str, int, int]] = {}
    parts: list[bytes | memoryview] = []
    offset = 0
    for name, array in arrays.items():
        data = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
        padding = bytes(-data.nbytes % ALIGNMENT)
        index[name] = (KINDS[array.dtype.name], offset, len(array))
        parts += [data.data.cast("B"), padding] if data.nbytes else []
        offset += data.nbytes + len(padding)
    header = json.dumps({**facts, "arrays": index}, allow_nan=False).encode()
    header += b" " * (-(len(header) + 4) % ALIGNMENT)
    return b"".join([len(header).to_bytes(4, "little"), header, *parts])
