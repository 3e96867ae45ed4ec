"""Checksums of weights at the speed of memory.

Bytes in host memory are hashed by XXH3 (128 bits). Bytes on an accelerator are summed there. A
checksum names its kind, so that the other end computes the same, wherever its own bytes are.

For sums, the bytes are laid out as rows of 1,024 words of 64 bits. The words of each row and of
each column are added up (modulo 2^64, without a carry that could be lost). The sums, less than a
thousandth of the data, are hashed by XXH3 together with the bytes after the last row and the
length. Sums always detect changes within one word, or in any number of words of one row or of one
column, two exchanged words, and missing or additional bytes.

Both kinds miss a random change in one of 2^64 cases or fewer. Neither is a signature, because a
deliberate change can keep the checksum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import xxhash
from torch import Tensor

WORDS = 1024
ROW = 8 * WORDS  # bytes
# Bytes that are still in a core's cache when they are read after being copied.
CHUNK = 2**17
XXH3 = "xxh3"
SUMS = "sums"


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the memory of a contiguous tensor, uint8 [n]."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def checksum(tensor: Tensor) -> str:
    """Return the checksum of a contiguous tensor's bytes."""
    return _checksum(as_bytes(tensor), SUMS if tensor.is_cuda else XXH3)


def has_checksum(tensor: Tensor, expected: str) -> bool:
    """True if a contiguous tensor's bytes have the checksum, wherever they are."""
    return prepare_checksum_check(tensor, expected)()


def prepare_checksum_check(tensor: Tensor, expected: str) -> Callable[[], bool]:
    """Return a function that is True if the tensor's bytes have the checksum.

    It is one call that releases the interpreter lock, so that threads don't wait for one another.
    """
    kind = expected.partition(":")[0]
    parts = _parts(as_bytes(tensor), kind)
    return lambda: f"{kind}:{_digest(parts)}" == expected


def copy_with_checksum(target_n: Tensor, source: Tensor, dtype: torch.dtype) -> str:
    """Copy a tensor of any layout to contiguous bytes [n] as `dtype`, and return their checksum.

    On a CPU this is done in chunks, so that the checksum reads bytes that are still in the cache.
    """
    target = target_n.view(dtype).view(source.shape)
    if target.is_cuda or not target.numel() or not target.dim():
        target.copy_(source)
        return checksum(target_n)
    digest = xxhash.xxh3_128()
    if source.dtype == dtype and source.device == target.device and source.is_contiguous():
        # numpy's slices are cheaper: with torch's a tenth of the time is spent between chunks.
        source_n = as_bytes(source).numpy()
        bytes_n = target_n.numpy()
        for start in range(0, len(bytes_n), CHUNK):
            chunk_n = bytes_n[start : start + CHUNK]
            chunk_n[:] = source_n[start : start + CHUNK]
            digest.update(chunk_n.data)
        return f"{XXH3}:{digest.hexdigest()}"
    rows = max(1, CHUNK * len(target) // len(target_n))
    for target_rows, source_rows in zip(target.split(rows), source.split(rows), strict=True):
        target_rows.copy_(source_rows)
        digest.update(_memory(as_bytes(target_rows)))
    return f"{XXH3}:{digest.hexdigest()}"


def _checksum(bytes_n: Tensor, kind: str) -> str:
    return f"{kind}:{_digest(_parts(bytes_n, kind))}"


def _parts(bytes_n: Tensor, kind: str) -> list[memoryview]:
    """Return the memory that XXH3 hashes."""
    return [_memory(part) for part in ((bytes_n,) if kind == XXH3 else _sums(bytes_n))]


def _digest(parts: Sequence[memoryview]) -> str:
    """Return XXH3 of the parts, one after another."""
    if len(parts) == 1:
        return xxhash.xxh3_128_hexdigest(parts[0])
    digest = xxhash.xxh3_128()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def _sums(bytes_n: Tensor) -> tuple[Tensor, ...]:
    """Return (length, sums of columns, sums of rows, the remaining bytes)."""
    # A block may begin in the middle of a word of its parameter.
    if bytes_n.storage_offset() % 8:
        bytes_n = bytes_n.clone()
    rows = len(bytes_n) // ROW
    words = bytes_n[: rows * ROW].view(torch.int64).view(rows, WORDS)
    return torch.tensor([len(bytes_n)]), words.sum(0), words.sum(1), bytes_n[rows * ROW :]


def _memory(tensor: Tensor) -> memoryview:
    return tensor.cpu().numpy().data
