"""Compare products in bfloat16 with float32 on this CPU, for random models of the benchmarks' sizes.

    python benchmarks/precision.py [--sizes T S M] [--rounds 5]

For each size, one thread plays and updates 4 prompts of 16 tokens x 16 samples of 32 new tokens. It
prints the least processor time of both over the rounds, in both precisions in turn, and the
difference of the learner's and the sampler's log-probabilities (nats a token), as the parity check
of a run sees it. Processor time is that of this process alone, so other programs disturb it less.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
sys.path.append(str(Path(__file__).resolve().parent / "peers"))

import torch
from make_model import SIZES

import ratchet as rt
from ratchet.algorithms.base import AlgoState
from ratchet.config.model_shape.decoder_config import DecoderConfig
from ratchet.data.packing import pack
from ratchet.executors.freeze import has_compiled_kernels, prepare_process, use_kernels
from ratchet.generators.config import EngineConfig
from ratchet.generators.engine.engine import EmbeddedEngine
from ratchet.kernels import bfloat16
from ratchet.learners.config import LocalConfig
from ratchet.learners.local import LocalLearner
from ratchet.models.decoder import Decoder
from ratchet.models.policy import DecoderPolicy
from ratchet.testing.builders import make_group, make_trajectory

PROMPTS, SAMPLES, PROMPT_TOKENS, NEW_TOKENS, VOCAB = 4, 16, 16, 32, 64


class Step:
    """A model with what plays and trains it."""

    def __init__(self, size: str, *, rounds_products: bool) -> None:
        hidden, layers, heads, kv_heads, head_dim, feed_forward = SIZES[size]
        sizes = VOCAB, hidden, layers, heads, kv_heads, head_dim, feed_forward
        policy = DecoderPolicy(Decoder(DecoderConfig(*sizes)).init_weights(0))
        self.rounds_products = rounds_products
        self.engine = EmbeddedEngine(EngineConfig(), policy)
        self.learner = LocalLearner(
            LocalConfig(workers=1), policy, optimizer=rt.OptimizerConfig(lr=1e-4), total_steps=100
        )
        self.algorithm = rt.build(rt.GRPOConfig(group_size=SAMPLES, weighting="token_mean"))
        drawn = torch.randint(VOCAB, (PROMPTS, PROMPT_TOKENS), generator=torch.manual_seed(0))
        self.prompts = [prompt for prompt in drawn.tolist() for _ in range(SAMPLES)]

    def run(self) -> tuple[float, float, float]:
        """Return (seconds of sampling, seconds of the update, difference in nats a token)."""
        use_kernels(has_compiled_kernels(), rounds_products=self.rounds_products)
        samplings = [
            rt.Sampling(max_new_tokens=NEW_TOKENS, seed=i) for i in range(len(self.prompts))
        ]
        sampling_s, completions = measure(lambda: self.engine.generate_all(self.prompts, samplings))
        attempts = [
            make_trajectory(prompt, list(completion.tokens), reward=float(i % 2), attempt=i)
            for i, (prompt, completion) in enumerate(zip(self.prompts, completions, strict=True))
        ]
        starts = range(0, len(attempts), SAMPLES)
        groups = [make_group(f"g{start}", attempts[start : start + SAMPLES]) for start in starts]
        batch = self.algorithm.advantage(pack(groups), AlgoState())
        scored_T = asyncio.run(self.learner.score(batch, ["logprobs"]))["logprobs"]
        sampled = torch.cat([torch.tensor(list(completion.logprobs)) for completion in completions])
        difference = (scored_T[batch.predicted_T] - sampled).abs().mean().item()
        mini, terms = self.algorithm.weigh(batch, AlgoState()), self.algorithm.losses["policy"]
        update_s, _ = measure(lambda: asyncio.run(self.learner.update(mini, terms)))
        return sampling_s, update_s, difference


def measure(function: Callable[[], Any]) -> tuple[float, Any]:
    """Return the processor seconds that a call takes, and its result."""
    start = time.process_time()
    result = function()
    return time.process_time() - start, result


def main() -> None:
    parser = argparse.ArgumentParser(description="Products in bfloat16 against float32.")
    parser.add_argument("--sizes", nargs="+", default=["T", "S", "M"], choices=SIZES)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    prepare_process(1)
    print("| Size | Precision | Sampling | Update | Learner and sampler differ by |")
    print("| --- | --- | --- | --- | --- |")
    for size in options.sizes:
        steps = {
            "float32": Step(size, rounds_products=False),
            "bfloat16": Step(size, rounds_products=True),
        }
        results = {name: [step.run()] for name, step in steps.items()}
        for _ in range(options.rounds):
            for name, step in steps.items():
                results[name].append(step.run())
        for name, runs in results.items():
            sampling_s, update_s = (min(run[i] for run in runs[1:]) for i in range(2))
            difference = max(run[2] for run in runs)
            times = f"{1000 * sampling_s:.0f} ms | {1000 * update_s:.0f} ms"
            print(f"| {size} | {name} | {times} | {difference:.1e} nats |", flush=True)
    bfloat16.set_enabled(False)


if __name__ == "__main__":
    main()
