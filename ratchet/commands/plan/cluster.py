"""The plan of a stage on a cluster that is not available here: its parallel sizes and its cost.

It is computed from the model's shapes and the accelerators' data sheets. Nothing is measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ratchet.commands.plan.command import MASTER, Load, MemoryPlan
from ratchet.config.schema import StageConfig
from ratchet.errors import ConfigError
from ratchet.executors.datasheets import (
    DECODE_SHARE,
    GIB,
    SCORE_SHARE,
    UPDATE_SHARE,
    USABLE,
    ClusterSpec,
)
from ratchet.models.flops import DecoderCost

HALF = 2  # bytes of bfloat16
LARGEST_MICRO = 32768  # tokens of the largest micro-batch: larger ones are not faster
# bytes of a chunk of the learner's logits, of their softmax, and of its gradient
CHUNK = 3 * 256 * 2**20
ROOM = 0.35  # share of an accelerator's memory that is kept free for the generator's KV cache


@dataclass(frozen=True)
class Division:
    """The parallel sizes of a learner and of generators colocated with it."""

    tensor: int  # the learner's tensor-parallel size
    shards: int  # data-parallel ranks over which the learner shards its weights
    micro_batch_tokens: int
    checkpointing: bool  # activation checkpointing
    generator_tensor: int  # the generator's tensor-parallel size
    replicas: int  # of the generator

    def recipe(self) -> dict[str, object]:
        """Return the sections of a recipe that set this division."""
        learner: dict[str, object] = {
            "kind": "dtensor",
            "dp_shard": self.shards,
            "micro_batch_tokens": self.micro_batch_tokens,
        }
        if self.tensor > 1:
            learner |= {"tensor_parallel": self.tensor, "sequence_parallel": True}
        if self.checkpointing:
            learner["activation_checkpointing"] = True
        engine = {
            "kind": "vllm",
            **({"tensor_parallel": self.generator_tensor} if self.generator_tensor > 1 else {}),
        }
        generator = {"kind": "workers", "workers": self.replicas, "worker": engine}
        return {
            "learner": learner,
            "generator": generator,
            "cluster": {"kind": "ray", "colocated": True},
        }


@dataclass(frozen=True)
class ClusterPlan:
    """A division and its cost."""

    division: Division
    memory: MemoryPlan  # bytes on each accelerator
    seconds: Mapping[str, float]  # time of a step by phase
    bound: str  # the longest phase and its bottleneck, such as "sample: memory bandwidth"


def plan_cluster(
    stage: StageConfig, cost: DecoderCost, load: Load, trained: int, frozen: int, spec: ClusterSpec
) -> ClusterPlan:
    """Return the cheapest division that fits into memory, with its cost.

    Raises ConfigError if no division fits.

    Args:
        trained: Number of parameters that optimizers update.
        frozen: Number of parameters of models that only score.
    """
    limit, smallest_peak_gib = spec.accelerator.memory * USABLE, float("inf")
    for division in _divisions(cost, load, spec):
        memory = _memory(cost, load, trained, frozen, division)
        if memory.peak <= limit:
            seconds, bound = _seconds(cost, load, division, spec)
            return ClusterPlan(division, memory, seconds, bound)
        smallest_peak_gib = min(smallest_peak_gib, memory.peak / GIB)
    raise ConfigError(
        f"stage {stage.name} does not fit on {spec.count} {spec.kind}: the best division found "
        f"takes {smallest_peak_gib:.0f} GiB of the "
        f"{limit / GIB:.0f} GiB usable on each; give more accelerators, shorter sequences, or "
        "train an adapter (lora)"
    )


def _divisions(cost: DecoderCost, load: Load, spec: ClusterSpec) -> Iterator[Division]:
    """Yield divisions, the cheapest first.

    Small tensor-parallel sizes come first, then no activation checkpointing before checkpointing,
    then large micro-batches.
    """
    weight_bytes = cost.parameters * HALF
    generator_room = spec.accelerator.memory * (USABLE - ROOM)
    sizes = [
        size
        for size in (1, 2, 4, 8)
        if spec.per_node % size == 0 and cost.shape.n_kv_heads % size == 0
    ]
    # The generator uses the smallest size whose weights leave room for its KV cache.
    generator_tensor = next(
        (size for size in sizes if weight_bytes / size <= generator_room), sizes[-1]
    )
    replicas = spec.count // generator_tensor
    for tensor in sizes:
        shards = spec.count // tensor
        for checkpointing in (False, True):
            micro = LARGEST_MICRO
            while micro >= load.length:
                yield Division(tensor, shards, micro, checkpointing, generator_tensor, replicas)
                micro //= 2
            # The smallest micro-batch is one sequence of the largest length.
            yield Division(tensor, shards, load.length, checkpointing, generator_tensor, replicas)


def _memory(
    cost: DecoderCost, load: Load, trained: int, frozen: int, division: Division
) -> MemoryPlan:
    """Return the bytes that a division takes on each accelerator."""
    ranks = division.tensor * division.shards
    micro = min(division.micro_batch_tokens, load.tokens)
    layer_parameters = cost.parameters / max(1, cost.shape.n_layers) / division.tensor
    resident = {
        "process": GIB,
        "weights": cost.parameters * MASTER // ranks,
        "optimizer": trained * 2 * MASTER // ranks,
    }
    if frozen:
        resident["frozen roles"] = frozen * MASTER // ranks
    update = {
        "gradients": trained * MASTER // ranks,
        "gathered layers": int(2 * layer_parameters * (HALF + MASTER)),
        "activations": micro
        * cost.activation_bytes(HALF, checkpointing=division.checkpointing)
        // division.tensor,
        "logits": CHUNK,
    }
    # sequences that a replica generates at a time, rounded up; 0 without generation
    rows = -(-max(load.attempts, load.evaluated) // division.replicas)
    sample = (
        {"keys and values": rows * load.length * cost.kv_bytes(HALF) // division.generator_tensor}
        if rows
        else {}
    )
    sample |= (
        {"generator's weights": cost.parameters * HALF // division.generator_tensor} if rows else {}
    )
    return MemoryPlan(resident, {"update": update, "sample": sample}, by_turns=True)


def _seconds(
    cost: DecoderCost, load: Load, division: Division, spec: ClusterSpec
) -> tuple[dict[str, float], str]:
    """Return the seconds of a step by phase, and the longest phase with its bottleneck."""
    chip, flop = spec.accelerator, load.flop(cost)
    update = flop["update"] / (spec.count * chip.flop_s * UPDATE_SHARE)
    score = flop["score"] / (spec.count * chip.flop_s * SCORE_SHARE)
    if not load.attempts:
        return {"update": update, "score": score}, "update: arithmetic"
    rows = -(-load.attempts // division.replicas)
    # Decoding one token of each row reads all weights once, and the KV cache at its mean length.
    mean_length = (load.prompt + load.length) / 2
    bytes_read = cost.parameters * HALF + rows * mean_length * cost.kv_bytes(HALF)
    by_memory = bytes_read / division.generator_tensor / (chip.bandwidth * DECODE_SHARE)
    by_arithmetic = cost.forward_flop(rows, load.length / 2) / (
        division.generator_tensor * chip.flop_s * SCORE_SHARE
    )
    sample = (load.length - load.prompt) * max(by_memory, by_arithmetic)
    # The data sheet's rate of a link adds up both directions.
    sync = cost.parameters * HALF / division.generator_tensor / (chip.link / 2)
    seconds = {"sample": sample, "score": score, "update": update, "sync": sync}
    longest = max(seconds, key=lambda phase: seconds[phase])
    bottlenecks = {
        "sample": "memory bandwidth" if by_memory > by_arithmetic else "arithmetic",
        "sync": "links",
    }
    return seconds, f"{longest}: {bottlenecks.get(longest, 'arithmetic')}"
