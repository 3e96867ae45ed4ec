"""A checksum at the speed of memory, the same on a CPU and on an accelerator.

The bytes are laid out as rows of 1,024 words of 64 bits. The words of each row are added up, and those of each column (modulo
2^64, without a carry that could be lost), and what comes out, less than a thousandth of the data, is hashed by BLAKE2b together
with the bytes behind the last row and the length.

It always finds: changes within one word, or in any number of words of one row, or of one column; two words that were exchanged;
bytes that are missing or too many. It finds what chance does to more of them but for one case in about 2^64. It does not
find what keeps every sum of rows and of columns, which somebody could do on purpose: it is no signature.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

WORDS = 1024
ROW = 8 * WORDS  # bytes
CHUNK = 64  # rows that stay in a core's cache until they are added up, with what they are copied of
LARGE = 128  # that do alone: with fewer a call, threads wait for the interpreter more than for memory


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor, uint8 [n]."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def checksum(tensor: Tensor) -> str:
    """Of a contiguous tensor's bytes."""
    bytes_n = as_bytes(tensor)
    if bytes_n.storage_offset() % 8:  # a block may begin in the middle of a word of its parameter
        bytes_n = bytes_n.clone()
    words = _words(bytes_n)
    chunks = [words] if words.is_cuda else words.split(LARGE)
    return _digest([_sums(chunk) for chunk in chunks], bytes_n)


def copy_summed(target_n: Tensor, source: Tensor, dtype: torch.dtype) -> str:
    """Copies a tensor of any layout to bytes [n] that lie one after the other, from a multiple of 8 on, as `dtype`. Returns the
    checksum of the copy.

    On a CPU chunk by chunk, so that adding up finds in the cache what copying has left there.
    """
    target, words = target_n.view(dtype).view(source.shape), _words(target_n)
    if target.is_cuda or not target.numel() or not target.dim():
        target.copy_(source)
        return _digest([_sums(words)], target_n)
    least = ROW // math.gcd(ROW, len(target_n) // len(target))  # of the target's rows, that fill whole rows of words
    step = least * max(1, CHUNK * ROW * len(target) // (least * len(target_n)))
    chunks = words.split(step * len(target_n) // len(target) // ROW)
    sums = []
    for own, what, chunk in itertools.zip_longest(target.split(step), source.split(step), chunks):
        own.copy_(what)
        if chunk is not None:
            sums.append(_sums(chunk))
    return _digest(sums, target_n)


def _words(bytes_n: Tensor) -> Tensor:
    """[rows, WORDS], of all rows that are whole."""
    rows = len(bytes_n) // ROW
    return bytes_n[: rows * ROW].view(torch.int64).view(rows, WORDS)


def _sums(words: Tensor) -> tuple[Tensor, Tensor]:
    """Of the rows, in the order of memory, so that the cache is filled ahead; and of the columns."""
    return words.sum(1), words.sum(0)


def _digest(sums: Sequence[tuple[Tensor, Tensor]], bytes_n: Tensor) -> str:
    """sums: of chunk by chunk."""
    digest = hashlib.blake2b(len(bytes_n).to_bytes(8, "little"), digest_size=8)
    digest.update(_memory(functools.reduce(torch.add, (columns for _, columns in sums))))
    for rows, _ in sums:
        digest.update(_memory(rows))
    digest.update(_memory(bytes_n[len(bytes_n) // ROW * ROW :]))
    return digest.hexdigest()


def _memory(tensor: Tensor) -> memoryview:
    return tensor.cpu().numpy().data
