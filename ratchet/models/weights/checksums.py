"""Compute checksums of weights at memory bandwidth.

Bytes in host memory are hashed by XXH3 (128 bits). Bytes on an accelerator are summed there. A
checksum begins with its kind, so that the receiver computes the same kind on any device.

For sums, the bytes are laid out as rows of 1,024 words of 64 bits. The words of each row and of
each column are added up modulo 2^64. The sums are about a thousandth of the data. XXH3 hashes them
together with the length and the bytes after the last row. Sums always detect two exchanged words,
missing or additional bytes, and changes that lie within one word, one row or one column.

Both kinds miss a random change with a probability of at most 2^-64. Neither is a signature: a
deliberate change can keep the checksum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import xxhash
from torch import Tensor

WORDS_PER_ROW = 1024
ROW_BYTES = 8 * WORDS_PER_ROW
# Bytes per chunk. A chunk fits into a core's cache, so its bytes are still there when they are
# hashed after the copy.
CHUNK_BYTES = 2**17
XXH3 = "xxh3"
SUMS = "sums"


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the memory of a contiguous tensor, uint8 [n]."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def checksum(tensor: Tensor) -> str:
    """Return the checksum of a contiguous tensor's bytes."""
    return _checksum(as_bytes(tensor), SUMS if tensor.is_cuda else XXH3)


def has_checksum(tensor: Tensor, expected: str) -> bool:
    """True if a contiguous tensor's bytes, on any device, have the checksum."""
    return prepare_checksum_check(tensor, expected)()


def prepare_checksum_check(tensor: Tensor, expected: str) -> Callable[[], bool]:
    """Return a function that returns True if the tensor's bytes have the checksum.

    It releases the interpreter lock while it hashes, so that threads don't wait for one another.
    """
    kind = expected.partition(":")[0]
    buffers = _list_hashed_buffers(as_bytes(tensor), kind)
    return lambda: f"{kind}:{_digest(buffers)}" == expected


def copy_with_checksum(target_n: Tensor, source: Tensor, dtype: torch.dtype) -> str:
    """Copy a tensor of any layout to contiguous bytes [n] as `dtype`, and return their checksum.

    On a CPU, chunks are copied and hashed one by one, while their bytes are still in the cache.
    """
    target = target_n.view(dtype).view(source.shape)
    if target.is_cuda or not target.numel() or not target.dim():
        target.copy_(source)
        return checksum(target_n)
    if source.is_cuda:
        # One wait for the device, not one for each chunk.
        source = source.to(dtype).cpu()
    digest = xxhash.xxh3_128()
    if source.dtype == dtype and source.device == target.device and source.is_contiguous():
        # numpy's slices are cheaper: torch's slicing would take a tenth of this function's time.
        source_n = as_bytes(source).numpy()
        bytes_n = target_n.numpy()
        for start in range(0, len(bytes_n), CHUNK_BYTES):
            chunk_n = bytes_n[start : start + CHUNK_BYTES]
            chunk_n[:] = source_n[start : start + CHUNK_BYTES]
            digest.update(chunk_n.data)
        return f"{XXH3}:{digest.hexdigest()}"
    rows = max(1, CHUNK_BYTES * len(target) // len(target_n))
    for target_rows, source_rows in zip(target.split(rows), source.split(rows), strict=True):
        target_rows.copy_(source_rows)
        digest.update(_view_memory(as_bytes(target_rows)))
    return f"{XXH3}:{digest.hexdigest()}"


def _checksum(bytes_n: Tensor, kind: str) -> str:
    return f"{kind}:{_digest(_list_hashed_buffers(bytes_n, kind))}"


def _list_hashed_buffers(bytes_n: Tensor, kind: str) -> list[memoryview]:
    """Return the buffers that XXH3 hashes for this kind of checksum."""
    return [
        _view_memory(buffer) for buffer in ((bytes_n,) if kind == XXH3 else _compute_sums(bytes_n))
    ]


def _digest(buffers: Sequence[memoryview]) -> str:
    """Return the XXH3 hash (128 bits) of the concatenated buffers."""
    if len(buffers) == 1:
        return xxhash.xxh3_128_hexdigest(buffers[0])
    digest = xxhash.xxh3_128()
    for buffer in buffers:
        digest.update(buffer)
    return digest.hexdigest()


def _compute_sums(bytes_n: Tensor) -> tuple[Tensor, ...]:
    """Return (length, sums of columns, sums of rows, the remaining bytes)."""
    # A block may begin in the middle of a word of its parameter, but a view as int64 may not.
    if bytes_n.storage_offset() % 8:
        bytes_n = bytes_n.clone()
    rows = len(bytes_n) // ROW_BYTES
    words = bytes_n[: rows * ROW_BYTES].view(torch.int64).view(rows, WORDS_PER_ROW)
    return torch.tensor([len(bytes_n)]), words.sum(0), words.sum(1), bytes_n[rows * ROW_BYTES :]


def _view_memory(tensor: Tensor) -> memoryview:
    return tensor.cpu().numpy().data
