"""Checksums at the speed of memory: XXH3 (128 bits) of what lies in main memory; of what lies on an
accelerator, sums that it adds up itself. Each says which it is, so that another end compares by the
same, wherever its own bytes are.

Sums: the bytes are laid out as rows of 1,024 words of 64 bits. The words of each row are added up,
and those of each column (modulo 2^64, without a carry that could be lost), and what comes out, less
than a thousandth of the data, is hashed by XXH3 together with the bytes behind the last row and the
length. They always find: changes within one word, or in any number of words of one row, or of one
column; two words that were exchanged; bytes that are missing or too many.

Both find what chance does but for one case in 2^64 or fewer. Neither is a signature: somebody could
deceive it on purpose.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import xxhash
from torch import Tensor

WORDS = 1024
ROW = 8 * WORDS  # bytes
CHUNK = 2**17  # bytes that stay in a core's cache from being copied to being read again
XXH3, SUMS = "xxh3", "sums"


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor, uint8 [n]."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def checksum(tensor: Tensor) -> str:
    """Of a contiguous tensor's bytes."""
    return _checksum(as_bytes(tensor), SUMS if tensor.is_cuda else XXH3)


def agrees(tensor: Tensor, wanted: str) -> bool:
    """Whether a contiguous tensor's bytes, wherever they are, have that checksum."""
    return claim(tensor, wanted)()


def claim(tensor: Tensor, wanted: str) -> Callable[[], bool]:
    """What says whether they have: one call that lets go of the interpreter, so that threads with
    claims don't wait for one another."""
    kind = wanted.partition(":")[0]
    parts = _parts(as_bytes(tensor), kind)
    return lambda: f"{kind}:{_digest(parts)}" == wanted


def copy_summed(target_n: Tensor, source: Tensor, dtype: torch.dtype) -> str:
    """Copies a tensor of any layout to bytes [n] that lie one after the other, as `dtype`. Returns
    the checksum of the copy.

    On a CPU chunk by chunk, so that the checksum finds in the cache what copying has left there.
    """
    target = target_n.view(dtype).view(source.shape)
    if target.is_cuda or not target.numel() or not target.dim():
        target.copy_(source)
        return checksum(target_n)
    digest = xxhash.xxh3_128()
    if source.dtype == dtype and source.device == target.device and source.is_contiguous():
        # By numpy, whose slices cost less: a tenth of a copy's time is otherwise spent between its
        # chunks.
        what_n, to_n = as_bytes(source).numpy(), target_n.numpy()
        for start in range(0, len(to_n), CHUNK):
            chunk_n = to_n[start : start + CHUNK]
            chunk_n[:] = what_n[start : start + CHUNK]
            digest.update(chunk_n.data)
        return f"{XXH3}:{digest.hexdigest()}"
    rows = max(1, CHUNK * len(target) // len(target_n))
    for own, what in zip(target.split(rows), source.split(rows), strict=True):
        own.copy_(what)
        digest.update(_memory(as_bytes(own)))
    return f"{XXH3}:{digest.hexdigest()}"


def _checksum(bytes_n: Tensor, kind: str) -> str:
    return f"{kind}:{_digest(_parts(bytes_n, kind))}"


def _parts(bytes_n: Tensor, kind: str) -> list[memoryview]:
    """What XXH3 reads."""
    return [_memory(part) for part in ((bytes_n,) if kind == XXH3 else _sums(bytes_n))]


def _digest(parts: Sequence[memoryview]) -> str:
    if len(parts) == 1:
        return xxhash.xxh3_128_hexdigest(parts[0])
    digest = xxhash.xxh3_128()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def _sums(bytes_n: Tensor) -> tuple[Tensor, ...]:
    """(length, sums of columns, sums of rows, the rest)"""
    if bytes_n.storage_offset() % 8:  # a block may begin in the middle of a word of its parameter
        bytes_n = bytes_n.clone()
    rows = len(bytes_n) // ROW
    words = bytes_n[: rows * ROW].view(torch.int64).view(rows, WORDS)
    return torch.tensor([len(bytes_n)]), words.sum(0), words.sum(1), bytes_n[rows * ROW :]


def _memory(tensor: Tensor) -> memoryview:
    return tensor.cpu().numpy().data
