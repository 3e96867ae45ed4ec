"""Measure this machine's rate of matrix products, for comparison with the rate that a run reaches.

The measurement uses the run's number of threads.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

ROUNDS = 5
ROUND_S = 0.03  # long enough to time precisely, short enough that a user does not wait
# Side of a square product by device: products of this size reach the full rate.
SQUARE_SIDE_BY_DEVICE = {"cpu": 1024, "cuda": 8192}


@dataclass(frozen=True, slots=True)
class Gemm:
    """The shape of one matrix product: [rows, inner] x [inner, columns]."""

    rows: int
    inner: int
    columns: int

    @property
    def flop(self) -> int:
        return 2 * self.rows * self.inner * self.columns

    def __str__(self) -> str:
        return f"[{self.rows}, {self.inner}] x [{self.inner}, {self.columns}]"

    @classmethod
    def square(cls, device: str) -> Gemm:
        side = SQUARE_SIDE_BY_DEVICE[device]
        return cls(side, side, side)


class GemmTimer:
    """A timer of one matrix product with PyTorch's current threads. It holds the two matrices.

    No random number is drawn, so that the run's random state stays as it is.

    Args:
        round_s: Minimum seconds of a round; a round may take up to twice as long.
    """

    def __init__(
        self, gemm: Gemm, *, device: torch.device, dtype: torch.dtype, round_s: float = ROUND_S
    ) -> None:
        self.gemm = gemm
        self._a = (
            torch.linspace(-1, 1, gemm.rows * gemm.inner, device=device)
            .view(gemm.rows, gemm.inner)
            .to(dtype)
        )
        self._b = (
            torch.linspace(-1, 1, gemm.inner * gemm.columns, device=device)
            .view(gemm.inner, gemm.columns)
            .to(dtype)
        )
        self._repeats = 1
        self.time_round()  # warm-up
        while self.time_round() < round_s:
            self._repeats *= 2

    def time_round(self) -> float:
        """Return the seconds of a round."""
        start = time.perf_counter()
        for _ in range(self._repeats):
            torch.mm(self._a, self._b)
        if self._a.device.type == "cuda":
            torch.cuda.synchronize(self._a.device)
        return time.perf_counter() - start

    def measure(self, rounds: int = ROUNDS) -> float:
        """Return the best FLOP/s of `rounds` rounds."""
        return self._repeats * self.gemm.flop / min(self.time_round() for _ in range(rounds))


def measure_gemm_rate(
    gemm: Gemm, *, device: torch.device, dtype: torch.dtype, round_s: float = ROUND_S
) -> float:
    """Return the best FLOP/s of this product over `ROUNDS` rounds."""
    return GemmTimer(gemm, device=device, dtype=dtype, round_s=round_s).measure()
