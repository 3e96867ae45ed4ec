"""Plan a stage on a cluster that is not available here: its parallel layout and its cost.

The plan is computed from the model's shapes and the accelerators' data sheets. Nothing is measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ratchet.commands.plan.command import FP32_BYTES, Load, MemoryPlan
from ratchet.config.schema import StageConfig
from ratchet.errors import ConfigError
from ratchet.models.flops import DecoderCost
from ratchet.utils.datasheets import (
    DECODE_SHARE,
    GIB,
    SCORE_SHARE,
    UPDATE_SHARE,
    USABLE_MEMORY_SHARE,
    ClusterSpec,
)

BF16_BYTES = 2  # bytes of a bfloat16 number
MAX_MICRO_BATCH_TOKENS = 32768  # larger micro-batches are not faster
# Bytes of a chunk of the learner's logits, of its softmax, and of its gradient.
LOGITS_BYTES = 3 * 256 * 2**20
KV_CACHE_SHARE = 0.35  # share of an accelerator's memory that is kept for the KV cache


@dataclass(frozen=True)
class ParallelLayout:
    """The parallel sizes of a learner and of generators colocated with it."""

    tensor: int  # the learner's tensor-parallel size
    shards: int  # data-parallel ranks over which the learner shards its weights
    micro_batch_tokens: int
    checkpointing: bool  # activation checkpointing
    generator_tensor: int  # the generator's tensor-parallel size
    replicas: int  # number of generators

    def recipe(self) -> dict[str, object]:
        """Return the sections of a recipe that set this layout."""
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
    """A parallel layout and its cost."""

    layout: ParallelLayout
    memory: MemoryPlan  # bytes on each accelerator
    seconds: Mapping[str, float]  # time of a step by phase
    bottleneck: str  # the longest phase and its limit, such as "sample: memory bandwidth"


def plan_cluster(
    stage: StageConfig, cost: DecoderCost, load: Load, trained: int, frozen: int, spec: ClusterSpec
) -> ClusterPlan:
    """Return the cheapest parallel layout that fits into memory, with its cost.

    Raises ConfigError if no layout fits.

    Args:
        cost: Cost of the model.
        load: Work of a step.
        trained: Number of parameters that optimizers update.
        frozen: Number of parameters of models that only score.
    """
    limit, smallest_peak_gib = spec.accelerator.memory * USABLE_MEMORY_SHARE, float("inf")
    for layout in _list_layouts(cost, load, spec):
        memory = _estimate_memory(cost, load, trained, frozen, layout)
        if memory.peak <= limit:
            seconds, bottleneck = _estimate_seconds(cost, load, layout, spec)
            return ClusterPlan(layout, memory, seconds, bottleneck)
        smallest_peak_gib = min(smallest_peak_gib, memory.peak / GIB)
    raise ConfigError(
        f"stage {stage.name} does not fit on {spec.count} {spec.kind}: the best parallel layout "
        f"takes {smallest_peak_gib:.0f} GiB of the "
        f"{limit / GIB:.0f} GiB usable on each; give more accelerators, shorter sequences, or "
        "train an adapter (lora)"
    )


def _list_layouts(cost: DecoderCost, load: Load, spec: ClusterSpec) -> Iterator[ParallelLayout]:
    """Yield parallel layouts, the cheapest first.

    Small tensor-parallel sizes come first. For each size, layouts without activation checkpointing
    come before those with it, and large micro-batches before small ones.
    """
    weight_bytes = cost.parameters * BF16_BYTES
    max_weight_bytes = spec.accelerator.memory * (USABLE_MEMORY_SHARE - KV_CACHE_SHARE)
    sizes = [
        size
        for size in (1, 2, 4, 8)
        if spec.per_node % size == 0 and cost.shape.n_kv_heads % size == 0
    ]
    # The generator uses the smallest size whose weights leave room for its KV cache.
    generator_tensor = next(
        (size for size in sizes if weight_bytes / size <= max_weight_bytes), sizes[-1]
    )
    replicas = spec.count // generator_tensor
    for tensor in sizes:
        shards = spec.count // tensor
        for checkpointing in (False, True):
            micro_batch_tokens = MAX_MICRO_BATCH_TOKENS
            while micro_batch_tokens >= load.length:
                yield ParallelLayout(
                    tensor, shards, micro_batch_tokens, checkpointing, generator_tensor, replicas
                )
                micro_batch_tokens //= 2
            # The smallest micro-batch is one sequence of the largest length.
            yield ParallelLayout(
                tensor, shards, load.length, checkpointing, generator_tensor, replicas
            )


def _estimate_memory(
    cost: DecoderCost, load: Load, trained: int, frozen: int, layout: ParallelLayout
) -> MemoryPlan:
    """Return the bytes that a layout takes on each accelerator."""
    ranks = layout.tensor * layout.shards
    micro_batch_tokens = min(layout.micro_batch_tokens, load.tokens)
    layer_parameters = cost.parameters / max(1, cost.shape.n_layers) / layout.tensor
    resident = {
        "process": GIB,
        "weights": cost.parameters * FP32_BYTES // ranks,
        "optimizer": trained * 2 * FP32_BYTES // ranks,
    }
    if frozen:
        resident["frozen roles"] = frozen * FP32_BYTES // ranks
    update = {
        "gradients": trained * FP32_BYTES // ranks,
        "gathered layers": int(2 * layer_parameters * (BF16_BYTES + FP32_BYTES)),
        "activations": micro_batch_tokens
        * cost.activation_bytes(BF16_BYTES, checkpointing=layout.checkpointing)
        // layout.tensor,
        "logits": LOGITS_BYTES,
    }
    # Sequences that a generator runs at a time, rounded up; 0 without generation.
    rows = -(-max(load.attempts, load.eval_attempts) // layout.replicas)
    sample = (
        {
            "keys and values": rows
            * load.length
            * cost.kv_bytes(BF16_BYTES)
            // layout.generator_tensor
        }
        if rows
        else {}
    )
    sample |= (
        {"generator's weights": cost.parameters * BF16_BYTES // layout.generator_tensor}
        if rows
        else {}
    )
    return MemoryPlan(resident, {"update": update, "sample": sample}, phases_take_turns=True)


def _estimate_seconds(
    cost: DecoderCost, load: Load, layout: ParallelLayout, spec: ClusterSpec
) -> tuple[dict[str, float], str]:
    """Return the seconds of a step by phase, and the longest phase with its bottleneck."""
    accelerator, flop = spec.accelerator, load.flop(cost)
    update = flop["update"] / (spec.count * accelerator.flop_s * UPDATE_SHARE)
    score = flop["score"] / (spec.count * accelerator.flop_s * SCORE_SHARE)
    if not load.attempts:
        return {"update": update, "score": score}, "update: arithmetic"
    rows = -(-load.attempts // layout.replicas)
    # Decoding one token of each row reads all weights once, and the KV cache at its mean length.
    mean_length = (load.prompt + load.length) / 2
    bytes_read = cost.parameters * BF16_BYTES + rows * mean_length * cost.kv_bytes(BF16_BYTES)
    bandwidth_s = bytes_read / layout.generator_tensor / (accelerator.bandwidth * DECODE_SHARE)
    arithmetic_s = cost.forward_flop(rows, load.length / 2) / (
        layout.generator_tensor * accelerator.flop_s * SCORE_SHARE
    )
    sample = (load.length - load.prompt) * max(bandwidth_s, arithmetic_s)
    # Weight sync. The data sheet's rate of a link is the sum of both directions.
    sync = cost.parameters * BF16_BYTES / layout.generator_tensor / (accelerator.link / 2)
    seconds = {"sample": sample, "score": score, "update": update, "sync": sync}
    longest = max(seconds, key=lambda phase: seconds[phase])
    bottlenecks = {
        "sample": "memory bandwidth" if bandwidth_s > arithmetic_s else "arithmetic",
        "sync": "links",
    }
    return seconds, f"{longest}: {bottlenecks.get(longest, 'arithmetic')}"
