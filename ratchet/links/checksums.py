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
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

WORDS = 1024
ROW = 8 * WORDS  # bytes
CHUNK = 64 * ROW  # bytes that stay in a core's cache between being written and being added up


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor, uint8 [n]."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def checksum(tensor: Tensor) -> str:
    """Of a contiguous tensor's bytes."""
    bytes_n = as_bytes(tensor)
    sums = _sums(bytes_n)
    sums.add(bytes_n)
    return sums.hexdigest()


def checksums(tensors: Sequence[Tensor]) -> list[str]:
    """By as many threads as torch has for an operation: one core does not use up the memory's bandwidth."""
    threads = torch.get_num_threads()
    if threads == 1 or len(tensors) < 2:
        return [checksum(tensor) for tensor in tensors]
    with ThreadPoolExecutor(threads, thread_name_prefix="checksums") as pool:
        return list(pool.map(checksum, tensors))


def copy_summed(target_n: Tensor, source: Tensor, dtype: torch.dtype) -> str:
    """Copies a tensor of any layout to bytes [n] that lie one after the other, as `dtype`. Returns the checksum of the copy.

    On a CPU chunk by chunk, so that adding up finds in the cache what copying has left there.
    """
    target = target_n.view(dtype).view(source.shape)
    sums, done = _sums(target_n), 0
    rows = max(1, CHUNK * len(source) // max(1, len(target_n))) if source.dim() and not target.is_cuda else None
    for own, what in zip(target.split(rows), source.split(rows), strict=True) if rows else [(target, source)]:
        own.copy_(what)
        end = done + own.numel() * dtype.itemsize
        sums.add(target_n[sums.taken : end if end == len(target_n) else sums.taken + (end - sums.taken) // ROW * ROW])
        done = end
    return sums.hexdigest()


class _HostSums:
    """numpy's sums are quicker than torch's here, and leave the interpreter to other threads."""

    def __init__(self) -> None:
        self.taken = 0
        self._columns = np.zeros(WORDS, np.int64)
        self._rows: list[np.ndarray] = []
        self._tail = b""

    def add(self, bytes_n: Tensor) -> None:
        """What comes last may end in the middle of a row."""
        data = bytes_n.numpy()
        words = data[: len(data) // ROW * ROW].view(np.int64).reshape(-1, WORDS)
        for start in range(0, len(words), CHUNK // ROW):
            chunk = words[start : start + CHUNK // ROW]
            self._columns += np.add.reduce(chunk, 0)
            self._rows.append(np.add.reduce(chunk, 1))
        self._tail = data[words.size * 8 :].tobytes()
        self.taken += len(data)

    def hexdigest(self) -> str:
        return _digest(self.taken, self._columns, np.concatenate([np.zeros(0, np.int64), *self._rows]), self._tail)


class _DeviceSums:
    """The same by torch, on the device that has the data."""

    def __init__(self, device: torch.device) -> None:
        self.taken = 0
        self._columns = torch.zeros(WORDS, dtype=torch.int64, device=device)
        self._rows: list[Tensor] = []
        self._tail = b""

    def add(self, bytes_n: Tensor) -> None:
        whole = len(bytes_n) // ROW * ROW
        words = bytes_n[:whole].view(torch.int64).view(-1, WORDS)
        self._columns += words.sum(0)
        self._rows.append(words.sum(1))
        self._tail = bytes_n[whole:].cpu().numpy().tobytes()
        self.taken += len(bytes_n)

    def hexdigest(self) -> str:
        rows = torch.cat(self._rows).cpu().numpy() if self._rows else np.zeros(0, np.int64)
        return _digest(self.taken, self._columns.cpu().numpy(), rows, self._tail)


def _sums(like: Tensor) -> _HostSums | _DeviceSums:
    return _HostSums() if like.device.type == "cpu" else _DeviceSums(like.device)


def _digest(length: int, columns: np.ndarray, rows: np.ndarray, tail: bytes) -> str:
    digest = hashlib.blake2b(length.to_bytes(8, "little"), digest_size=8)
    for array in (columns, rows):
        digest.update(np.ascontiguousarray(array).data)
    digest.update(tail)
    return digest.hexdigest()
