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


def measure_gemm_rate(
    gemm: Gemm, *, device: torch.device, dtype: torch.dtype, round_s: float = ROUND_S
) -> float:
    """Return the best FLOP/s of this product with PyTorch's current threads over a few rounds.

    Each round takes between one and two times `round_s`. No random number is drawn, so that the
    run's random state stays as it is.
    """
    a = (
        torch.linspace(-1, 1, gemm.rows * gemm.inner, device=device)
        .view(gemm.rows, gemm.inner)
        .to(dtype)
    )
    b = (
        torch.linspace(-1, 1, gemm.inner * gemm.columns, device=device)
        .view(gemm.inner, gemm.columns)
        .to(dtype)
    )
    repeats = 1

    def time_round() -> float:
        start = time.perf_counter()
        for _ in range(repeats):
            torch.mm(a, b)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    time_round()  # warm-up
    while time_round() < round_s:
        repeats *= 2
    return repeats * gemm.flop / min(time_round() for _ in range(ROUNDS))
