"""Check one accelerator against the CPU, and measure pushes and memory. Prints one JSON line.

    python benchmarks/gpu/device_checks.py correctness | push | memory [--size qwen3-0.6b] [--device cuda]

correctness: tokens and log-probabilities of the engine in float32, the engine's bfloat16 against the
learner's autocast, and updates in float32, each on the device and on the CPU, of a small model.
push: seconds in which the engine takes over new weights, and in which all weights reach main memory with
checksums, as every push to another process needs.
memory: device memory after the 3rd and the last of many steps of generating and training.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch

from ratchet.algorithms.base import AlgoState
from ratchet.algorithms.config.named_policy_gradients import GRPOConfig
from ratchet.algorithms.policy_gradient import build_policy_gradient
from ratchet.config.lora import LoRAConfig
from ratchet.config.model_shape.decoder_config import DecoderConfig
from ratchet.config.model_shape.presets import get_preset
from ratchet.config.schema import OptimizerConfig
from ratchet.data.packing import pack
from ratchet.generators.config import EngineConfig
from ratchet.generators.engine.engine import EmbeddedEngine
from ratchet.kernels import bfloat16
from ratchet.learners.config import LocalConfig
from ratchet.learners.local import LocalLearner
from ratchet.models.accelerator import use_accelerator
from ratchet.models.load import init_policy
from ratchet.models.lora.decoder import Adapter
from ratchet.models.weights.checksums import copy_with_checksum
from ratchet.testing.builders import make_group, make_trajectory
from ratchet.types import Sampling

SMALL = DecoderConfig(64, 128, 4, 4, 2, 32, 256, init_std=0.1)
EXPERTS = replace(
    SMALL, family="qwen3_moe", n_experts=4, experts_per_token=2, expert_intermediate_size=64
)
PROMPTS = [[(7 * i + j) % 60 + 1 for j in range(4 + i % 9)] for i in range(24)]
SAMPLINGS = {
    "greedy": {"temperature": 0.0},
    "filters": {"top_p": 0.9, "top_k": 12, "min_p": 0.02},
    "stop ids": {"stop_ids": (1, 2, 3)},
}


def generate(shape: DecoderConfig, device: str, dtype: str, keys: dict[str, Any]) -> Any:
    """Return the policy and the completions of all prompts."""
    bfloat16.set_enabled(dtype == "bfloat16", on_cpu=False)
    policy = init_policy(shape, seed=0, device=device)
    engine = EmbeddedEngine(EngineConfig(kv_cache_gib=0.1), policy)
    samplings = [Sampling(max_new_tokens=48, seed=i, **keys) for i in range(len(PROMPTS))]
    return policy, engine.generate_all(PROMPTS, samplings)


def compare_tokens(shape: DecoderConfig, device: str, keys: dict[str, Any]) -> dict[str, float]:
    """Return the share of equal completions, and the largest difference of their logprobs."""
    pairs = list(
        zip(*(generate(shape, place, "float32", keys)[1] for place in ("cpu", device)), strict=True)
    )
    equal = [(a, b) for a, b in pairs if a.tokens.tolist() == b.tokens.tolist()]
    gaps = [float(np.abs(a.logprobs - b.logprobs).max()) for a, b in equal]
    return {"equal": len(equal) / len(pairs), "largest_gap": max(gaps, default=float("nan"))}


def compare_engine_with_learner(device: str) -> float:
    """Return the mean difference of logprobs of the bfloat16 engine and the learner's autocast."""
    policy, completions = generate(SMALL, device, "bfloat16", {})
    gaps = []
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        tokens = torch.tensor([*prompt, *completion.tokens.tolist()])
        with torch.no_grad(), torch.autocast(torch.device(device).type, torch.bfloat16):
            hidden = policy.hidden(tokens, torch.arange(len(tokens)), [len(tokens)])
        scores = policy.logits(hidden).detach().log_softmax(-1)[len(prompt) - 1 : -1].cpu()
        expected = scores.gather(1, tokens[len(prompt) :, None])[:, 0].numpy()
        gaps.append(np.abs(completion.logprobs - expected).mean())
    return float(np.mean(gaps))


def make_batch() -> Any:
    """Return a weighed GRPO batch and its loss terms."""
    algorithm = build_policy_gradient(GRPOConfig(group_size=4))
    groups = [
        make_group(
            f"group-{i}",
            [
                make_trajectory(PROMPTS[i], PROMPTS[i + 4 + k], reward=float(k % 2), attempt=k)
                for k in range(4)
            ],
        )
        for i in range(4)
    ]
    batch = algorithm.advantage(pack(groups), AlgoState())
    return algorithm.weigh(batch, AlgoState()), algorithm.losses["policy"]


def make_learner(policy: Any, *, autocast: bool, **keys: Any) -> LocalLearner:
    return LocalLearner(
        LocalConfig(micro_batch_tokens=64, **keys),
        policy,
        optimizer=OptimizerConfig(lr=1e-3),
        total_steps=100,
        autocast=autocast,
    )


def compare_updates(shape: DecoderConfig, device: str, *, lora: bool, **keys: Any) -> float:
    """Return the largest relative difference of the gradient norms of three updates."""
    norms = []
    for place in ("cpu", device):
        policy = init_policy(shape, seed=0, device=place)
        if lora:
            policy.attach(Adapter(LoRAConfig(rank=4, alpha=8.0), seed=1))
        learner = make_learner(policy, autocast=False, **keys)
        norms.append([asyncio.run(learner.update(*make_batch()))["grad_norm"] for _ in range(3)])
    return max(abs(a - b) / abs(a) for a, b in zip(*norms, strict=True))


def check_correctness(arguments: argparse.Namespace) -> dict[str, Any]:
    device = arguments.device
    torch.backends.cuda.matmul.allow_tf32 = False  # the CPU's products are float32
    tokens = {name: compare_tokens(SMALL, device, keys) for name, keys in SAMPLINGS.items()}
    tokens["experts"] = compare_tokens(EXPERTS, device, {})
    updates = {
        "grpo": compare_updates(SMALL, device, lora=False),
        "lora": compare_updates(SMALL, device, lora=True),
        "experts": compare_updates(EXPERTS, device, lora=False),
        "checkpointing": compare_updates(SMALL, device, lora=False, activation_checkpointing=True),
    }
    gap = compare_engine_with_learner(device)
    # Sums in another order change a token where two are nearly equal.
    passes = (
        all(row["equal"] >= 0.9 and row["largest_gap"] < 1e-3 for row in tokens.values())
        and max(updates.values()) < 1e-2
        and gap < 0.05
    )
    return {"passes": passes, "tokens": tokens, "updates": updates, "bfloat16_gap": gap}


def make_large(arguments: argparse.Namespace) -> Any:
    vocabulary = 512 if arguments.size == "tiny" else 151_936
    shape = get_preset(arguments.size, vocab_size=vocabulary)
    return init_policy(shape, seed=0, device=arguments.device)


def time_each(work: Any, rounds: int = 5) -> float:
    """Return the median seconds of a call, with the device's work."""
    seconds = []
    for _ in range(rounds + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def measure_push(arguments: argparse.Namespace) -> dict[str, Any]:
    policy = make_large(arguments)
    engine = EmbeddedEngine(EngineConfig(kv_cache_gib=0.1), policy)
    weights = [weight for _, weight in policy.canonical_weights()]
    targets = [torch.empty(2 * weight.numel(), dtype=torch.uint8) for weight in weights]

    def copy_all() -> None:
        for target, weight in zip(targets, weights, strict=True):
            copy_with_checksum(target, weight, torch.bfloat16)

    return {
        "gib": sum(weight.nbytes for weight in weights) / 2**30,
        "in_process_s": time_each(lambda: asyncio.run(engine.commit(1))),
        "to_main_memory_s": time_each(copy_all),
    }


def measure_memory(arguments: argparse.Namespace) -> dict[str, Any]:
    policy = make_large(arguments)
    learner = make_learner(policy, autocast=True)
    engine = EmbeddedEngine(EngineConfig(kv_cache_gib=0.5), policy)
    used = []
    for step in range(arguments.steps):
        samplings = [Sampling(max_new_tokens=32, seed=step + i) for i in range(len(PROMPTS))]
        engine.generate_all(PROMPTS, samplings)
        asyncio.run(learner.update(*make_batch()))
        asyncio.run(engine.commit(step + 1))
        used.append(torch.cuda.memory_allocated() / 2**20)
    peak = torch.cuda.max_memory_allocated() / 2**20
    return {"after_3_mib": used[2], "after_all_mib": used[-1], "peak_mib": peak}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = {"correctness": check_correctness, "push": measure_push, "memory": measure_memory}
    parser.add_argument("part", choices=parts)
    parser.add_argument("--size", default="qwen3-0.6b", help="a preset, for push and memory")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=30, help="of memory; at least 3")
    arguments = parser.parse_args()
    use_accelerator(torch.device(arguments.device, 0))
    bfloat16.set_enabled(True, on_cpu=False)  # as in a run
    print(json.dumps(parts[arguments.part](arguments)))


if __name__ == "__main__":
    main()
