"""Compute the floor of a benchmark: the time of its FLOPs at this machine's rate.

The FLOPs are counted from the model's shape. The rate is that of matrix products, measured while
the benchmark runs. A token that several rows share (a group's prompt) counts once, so a program
that computes it again takes longer than the floor.

    python benchmarks/arithmetic.py [--threads 2] [--device cpu]

Prints GFLOP/s, and on an accelerator also the memory bandwidth in GB/s.
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
    """The size of a computation.

    tokens: number of tokens that pass the layers.
    pairs: number of pairs of a token and a token that it attends to.
    predicted: number of rows of logits.
    """

    tokens: int = 0
    pairs: int = 0
    predicted: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(
            self.tokens + other.tokens, self.pairs + other.pairs, self.predicted + other.predicted
        )

    def forward_gflop(self, shape: DecoderConfig) -> float:
        """Return the GFLOP of a forward pass; a backward pass takes twice as many."""
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
        """Return the GB that decoding reads from memory: weights, and the KV cache of each pair.

        reads: number of times that all weights are read (one per batch of decoded tokens).
        bytes_each: bytes of one number.
        """
        matrices = Work(tokens=1, predicted=1).forward_gflop(shape) * 1e9 / 2
        pair = 2 * shape.n_layers * shape.n_kv_heads * shape.head_dim
        return (reads * matrices + self.pairs * pair) * bytes_each / 1e9


def tree(prompt: int, answers: Iterable[int]) -> Work:
    """Return the work of one prompt, computed once, and its answers.

    prompt, answers: numbers of tokens. The last token of an answer is not fed to the model, because
    no token follows it.
    """
    fed = [answer - 1 for answer in answers]
    return Work(
        tokens=prompt + sum(fed),
        pairs=_triangle(prompt) + sum(n * prompt + _triangle(n) for n in fed),
        predicted=sum(n + 1 for n in fed),
    )


def forest(trees: Iterable[tuple[int, Sequence[int]]]) -> Work:
    """Return the work of several trees, each given as (prompt, answers)."""
    return sum((tree(prompt, answers) for prompt, answers in trees), Work())


def _triangle(n: int) -> int:
    return n * (n + 1) // 2


def measure_gemm_rate(
    threads: int, device: str = "cpu", side: int | None = None, *, bfloat16: bool = False
) -> float:
    """Return the GFLOP/s of a large matrix product.

    Args:
        threads: The number of CPU threads.
        device: The device. On an accelerator the product is in bfloat16.
        side: The side of the square matrices; None: large enough for the device's full rate.
        bfloat16: True to compute in bfloat16 on a CPU too.
    """
    import torch

    from ratchet.observe import matmul_rate

    torch.set_num_threads(threads)
    dtype = torch.bfloat16 if bfloat16 or device != "cpu" else torch.float32
    return (
        matmul_rate.measure_gemm_rate(
            matmul_rate.Gemm(side, side, side)
            if side
            else matmul_rate.Gemm.square(torch.device(device).type),
            device=torch.device(device),
            dtype=dtype,
        )
        / 1e9
    )


def measure_copy_rate(device: str, mib: int, seconds: float = 0.5) -> float:
    """Return the GB/s, read and written, of the best copy within an accelerator's memory.

    mib: size of what is copied.
    seconds: how long copies are repeated.
    """
    import torch

    source = torch.ones(mib * 2**18, device=device)
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
    parser.add_argument("--side", type=int, help="side of the matrices; default: by device")
    parser.add_argument("--copy-mib", type=int, default=1024)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    # the checkout needn't be installed
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    gflops = measure_gemm_rate(options.threads, options.device, options.side)
    rates = {"gflops": round(gflops, 1)}
    if options.device == "cpu":
        from ratchet.kernels.build import has_bfloat16_instructions

        if has_bfloat16_instructions():
            rate = measure_gemm_rate(options.threads, side=options.side, bfloat16=True)
            rates["bfloat16_gflops"] = round(rate, 1)
    else:
        rates["gbytes_per_s"] = round(measure_copy_rate(options.device, options.copy_mib), 1)
    print(json.dumps(rates))
