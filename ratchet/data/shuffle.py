"""The shuffled order of rows: a new one in every epoch, as a pure function of seed and position."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

WINDOW = 4  # number of blocks that are in memory at once and whose rows are shuffled together


class RowOrder:
    """The order in which endless epochs go through `sum(block_sizes)` rows.

    A block is a number of rows that are read together. Each epoch shuffles the blocks, then the
    rows within each window of WINDOW consecutive blocks. A single block is shuffled fully. So the
    row at any position is computed directly, and a file of row groups is read one group at a time.
    shuffle=False keeps the order of the rows. Equal `seed` and `name` give equal orders.

    numpy's RandomState draws the orders, because its streams never change between versions.
    """

    def __init__(
        self, block_sizes: Sequence[int], *, seed: int, name: str, shuffle: bool = True
    ) -> None:
        self.block_sizes = np.asarray([size for size in block_sizes if size], dtype=np.int64)
        self.block_starts = np.cumsum(self.block_sizes) - self.block_sizes
        self.n_rows = int(self.block_sizes.sum())
        self.seed = seed
        self.name = name
        self.shuffle = shuffle
        self._epoch = -1
        self._block_order = np.zeros(0, np.int64)
        self._block_ends = np.zeros(0, np.int64)
        self._window, self._window_rows = (-1, -1), np.zeros(0, np.int64)

    def row_at(self, position: int) -> int:
        """Return the row number at a position."""
        epoch, offset = divmod(position, self.n_rows)
        if not self.shuffle:
            return offset
        if epoch != self._epoch:
            self._epoch = epoch
            self._block_order = self._draw_permutation(len(self.block_sizes), "blocks", epoch)
            self._block_ends = np.cumsum(self.block_sizes[self._block_order])
        window = int(np.searchsorted(self._block_ends, offset, side="right")) // WINDOW
        if (epoch, window) != self._window:
            self._window_rows = self._shuffle_window(epoch, window)
            self._window = (epoch, window)
        window_start = int(self._block_ends[window * WINDOW - 1]) if window else 0
        return int(self._window_rows[offset - window_start])

    def _shuffle_window(self, epoch: int, window: int) -> NDArray[np.int64]:
        """Return the row numbers of a window, in the epoch's order."""
        blocks = self._block_order[window * WINDOW : (window + 1) * WINDOW]
        rows = np.concatenate(
            [
                np.arange(n) + start
                for n, start in zip(
                    self.block_sizes[blocks], self.block_starts[blocks], strict=True
                )
            ]
        )
        return rows[self._draw_permutation(len(rows), "rows", epoch, window)]

    def _draw_permutation(self, n: int, *names: object) -> NDArray[np.int64]:
        """Return a random permutation of range(n) that depends only on the seed and the names."""
        key = blake2b(
            "/".join(map(str, (self.name, self.seed, *names))).encode(), digest_size=32
        ).digest()
        return np.random.RandomState(np.frombuffer(key, dtype="<u4")).permutation(n)
