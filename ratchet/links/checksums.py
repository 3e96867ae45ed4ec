"""A checksum at the speed of memory, the same on a CPU and on an accelerator.

The bytes are laid out as rows of 1,024 words of 64 bits. The words of each row are added up, and those of each column (modulo
2^64, without a carry that could be lost), and what comes out, less than a thousandth of the data, is hashed by BLAKE2b together
with the bytes behind the last row and the length.

It always finds: changes within one word, or in any number of words of one row, or of one column; two words that were exchanged;
bytes that are missing or too many. It finds what chance does to more of them but for one case in about 2^64. It does not
find what keeps every sum of rows and of columns, which somebody could do on purpose: it is no signature.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

WORDS = 1024
ROW = 8 * WORDS  # bytes
CHUNK = 128 * ROW  # bytes that stay in a core's cache between being written, added up by rows, and by columns
LARGE = 8 * CHUNK  # enough that torch's threads are worth their start


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor, uint8 [n]."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def checksum(tensor: Tensor) -> str:
    """Of a contiguous tensor's bytes."""
    bytes_n = as_bytes(tensor)
    sums = _Sums(bytes_n.device)
    sums.add(bytes_n)
    return sums.hexdigest()


def copy_summed(target_n: Tensor, source: Tensor, dtype: torch.dtype) -> str:
    """Copies a tensor of any layout to bytes [n] that lie one after the other, as `dtype`. Returns the checksum of the copy.

    On a CPU chunk by chunk, so that adding up finds in the cache what copying has left there.
    """
    target = target_n.view(dtype).view(source.shape)
    sums, done = _Sums(target_n.device), 0
    rows = max(1, CHUNK * len(source) // max(1, len(target_n))) if source.dim() and not target.is_cuda else None
    for own, what in zip(target.split(rows), source.split(rows), strict=True) if rows else [(target, source)]:
        own.copy_(what)
        end = done + own.numel() * dtype.itemsize
        sums.add(target_n[sums.taken : end if end == len(target_n) else sums.taken + (end - sums.taken) // ROW * ROW])
        done = end
    return sums.hexdigest()


class _Sums:
    """Of bytes that come piece by piece."""

    def __init__(self, device: torch.device) -> None:
        self.taken = 0
        self._columns = torch.zeros(WORDS, dtype=torch.int64, device=device)
        self._rows: list[Tensor] = []
        self._tail = b""

    def add(self, bytes_n: Tensor) -> None:
        """What comes last may end in the middle of a row."""
        whole = len(bytes_n) // ROW * ROW
        for start in range(0, whole, LARGE):
            chunk = bytes_n[start : min(start + LARGE, whole)]
            if chunk.storage_offset() % 8:  # a block may begin in the middle of a word of its parameter
                chunk = chunk.clone()
            words = chunk.view(torch.int64).view(-1, WORDS)
            self._rows.append(words.sum(1))
            self._columns += words.sum(0)
        if whole < len(bytes_n):
            self._tail = bytes_n[whole:].cpu().numpy().tobytes()
        self.taken += len(bytes_n)

    def hexdigest(self) -> str:
        digest = hashlib.blake2b(self.taken.to_bytes(8, "little"), digest_size=8)
        for sums in (self._columns, *self._rows):
            digest.update(sums.cpu().numpy().data)
        digest.update(self._tail)
        return digest.hexdigest()
