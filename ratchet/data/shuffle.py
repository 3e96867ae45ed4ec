"""The order of rows: pass after pass, each in another order, which is a pure function of (seed,
position)."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

WINDOW = 4  # blocks that are mixed with one another: as many are held in memory


class Order:
    """The row at each position, over and over, among `sum(blocks)` rows.

    Blocks, which are read together, come in a drawn order, and the rows of WINDOW consecutive ones
    in a drawn order among themselves; rows of one block alone are in any order whatever. So any
    position costs the same, nothing is counted from the start, and a file of row groups is read one
    group at a time. shuffle=False: as they lie.

    Drawn by numpy's RandomState, whose streams never change between versions.
    """

    def __init__(
        self, blocks: Sequence[int], *, seed: int, name: str, shuffle: bool = True
    ) -> None:
        self.blocks = np.asarray([block for block in blocks if block], dtype=np.int64)
        self.starts = np.cumsum(self.blocks) - self.blocks
        self.rows = int(self.blocks.sum())
        self.seed, self.name, self.shuffle = seed, name, shuffle
        self._pass, self._blocks_order, self._ends = (
            -1,
            np.zeros(0, np.int64),
            np.zeros(0, np.int64),
        )
        self._window, self._drawn = (-1, -1), np.zeros(0, np.int64)

    def at(self, position: int) -> int:
        which, offset = divmod(position, self.rows)
        if not self.shuffle:
            return offset
        if which != self._pass:
            self._pass = which
            self._blocks_order = self._permutation(len(self.blocks), "blocks", which)
            self._ends = np.cumsum(self.blocks[self._blocks_order])
        window = int(np.searchsorted(self._ends, offset, side="right")) // WINDOW
        if (which, window) != self._window:
            self._window, self._drawn = (which, window), self._rows_of(which, window)
        before = int(self._ends[window * WINDOW - 1]) if window else 0
        return int(self._drawn[offset - before])

    def _rows_of(self, which: int, window: int) -> NDArray[np.int64]:
        blocks = self._blocks_order[window * WINDOW : (window + 1) * WINDOW]
        rows = np.concatenate(
            [
                np.arange(n) + start
                for n, start in zip(self.blocks[blocks], self.starts[blocks], strict=True)
            ]
        )
        return rows[self._permutation(len(rows), "rows", which, window)]

    def _permutation(self, n: int, *names: object) -> NDArray[np.int64]:
        key = blake2b(
            "/".join(map(str, (self.name, self.seed, *names))).encode(), digest_size=32
        ).digest()
        return np.random.RandomState(np.frombuffer(key, dtype="<u4")).permutation(n)
