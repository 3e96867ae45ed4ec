"""The least that a benchmark's work can cost: its FLOPs, counted from the model's shape, at the
rate of matrix products that this machine reaches while the benchmark runs.

    python benchmarks/arithmetic.py [--threads 2] [--device cpu]      prints GFLOP/s, and on an accelerator GB/s

A token that several rows share (a group's prompt) counts once: what computes it again pays more
than the floor.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ratchet.config.model_shape.decoder_config import DecoderConfig


@dataclass(frozen=True)
class Work:
    """tokens: that pass the layers. pairs: of a token and one that it attends to. predicted: rows
    of logits."""

    tokens: int = 0
    pairs: int = 0
    predicted: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(
            self.tokens + other.tokens, self.pairs + other.pairs, self.predicted + other.predicted
        )

    def forward_gflop(self, shape: DecoderConfig) -> float:
        """A backward costs twice as much."""
        queries, keys = shape.n_heads * shape.head_dim, shape.n_kv_heads * shape.head_dim
        layer = shape.hidden_size * (2 * queries + 2 * keys + 3 * shape.intermediate_size)
        head = shape.hidden_size * shape.vocab_size
        products = (
            self.tokens * shape.n_layers * layer
            + self.pairs * shape.n_layers * 2 * queries
            + self.predicted * head
        )
        return 2 * products / 1e9

    def decoding_gbytes(self, shape: DecoderConfig, *, reads: float, bytes_each: int) -> float:
        """What decoding reads from memory: all matrices `reads` times, and the key and the value of
        each pair."""
        matrices = Work(tokens=1, predicted=1).forward_gflop(shape) * 1e9 / 2
        pair = 2 * shape.n_layers * shape.n_kv_heads * shape.head_dim
        return (reads * matrices + self.pairs * pair) * bytes_each / 1e9


def tree(prompt: int, answers: Iterable[int]) -> Work:
    """Answers of so many tokens to one prompt, which is computed once. Nothing follows an answer's
    last token: it isn't fed."""
    fed = [answer - 1 for answer in answers]
    return Work(
        tokens=prompt + sum(fed),
        pairs=_triangle(prompt) + sum(n * prompt + _triangle(n) for n in fed),
        predicted=sum(n + 1 for n in fed),
    )


def forest(trees: Iterable[tuple[int, Sequence[int]]]) -> Work:
    """Of several prompts, each with its answers."""
    return sum((tree(prompt, answers) for prompt, answers in trees), Work())


def _triangle(n: int) -> int:
    return n * (n + 1) // 2


def measure_gemm_rate(threads: int, device: str = "cpu") -> float:
    """GFLOP/s of a large matrix product: float32, or bfloat16 on an accelerator."""
    import torch

    from ratchet.observe import matmul_rate

    torch.set_num_threads(threads)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    return (
        matmul_rate.measure_gemm_rate(
            matmul_rate.Gemm.square(torch.device(device).type),
            device=torch.device(device),
            dtype=dtype,
        )
        / 1e9
    )


def copy_rate(device: str, seconds: float = 0.5) -> float:
    """GB/s that a copy within the device's memory reads and writes, the best of those that fit into
    `seconds`."""
    import torch

    source = torch.ones(2**28, device=device)
    target = torch.empty_like(source)
    best, deadline = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < deadline:
        start = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return 2 * source.nbytes / best / 1e9


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="the machine's rates")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    # the checkout needn't be installed
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    rates = {"gflops": round(measure_gemm_rate(options.threads, options.device), 1)}
    if options.device != "cpu":
        rates["gbytes_per_s"] = round(copy_rate(options.device), 1)
    print(json.dumps(rates))
