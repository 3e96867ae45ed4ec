"""Plan a stage on a cluster that is not available here: its parallel layout and its cost.

The plan is computed from the model's shapes and the accelerators' data sheets. Nothing is measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ratchet.commands.plan.command import BF16_BYTES, FP32_BYTES, MemoryPlan, Workload
from ratchet.config.schema import StageConfig
from ratchet.errors import ConfigError, link_symptom
from ratchet.models.flops import DecoderCost
from ratchet.utils.datasheets import (
    DECODE_SHARE,
    GIB,
    SCORE_SHARE,
    UPDATE_SHARE,
    USABLE_MEMORY_SHARE,
    ClusterSpec,
)

MAX_MICRO_BATCH_TOKENS = 32768  # larger micro-batches are not faster
# Bytes of a 256 MiB chunk of the learner's logits, of its softmax, and of its gradient.
LOGITS_BYTES = 3 * 256 * 2**20
KV_CACHE_SHARE = 0.35  # share of an accelerator's memory that is kept for the KV cache


@dataclass(frozen=True)
class ParallelLayout:
    """The parallel sizes of a learner and of generators colocated with it."""

    tensor_parallel: int  # the learner's tensor-parallel size
    dp_shard: int  # data-parallel ranks over which the learner shards its weights
    micro_batch_tokens: int
    activation_checkpointing: bool
    generator_tensor_parallel: int
    n_generators: int

    def make_sections(self) -> dict[str, object]:
        """Return the sections of a recipe that set this layout."""
        learner: dict[str, object] = {
            "kind": "dtensor",
            "dp_shard": self.dp_shard,
            "micro_batch_tokens": self.micro_batch_tokens,
        }
        if self.tensor_parallel > 1:
            learner |= {"tensor_parallel": self.tensor_parallel, "sequence_parallel": True}
        if self.activation_checkpointing:
            learner["activation_checkpointing"] = True
        engine = {
            "kind": "vllm",
            **(
                {"tensor_parallel": self.generator_tensor_parallel}
                if self.generator_tensor_parallel > 1
                else {}
            ),
        }
        generator = {"kind": "workers", "workers": self.n_generators, "worker": engine}
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
    seconds_by_phase: Mapping[str, float]  # time of one step
    bottleneck: str  # the longest phase and its limit, such as "sample: memory bandwidth"


def plan_cluster(
    stage: StageConfig,
    cost: DecoderCost,
    workload: Workload,
    n_trained: int,
    n_frozen: int,
    spec: ClusterSpec,
) -> ClusterPlan:
    """Return the cheapest parallel layout that fits into memory, with its cost.

    Raises ConfigError if no layout fits.

    Args:
        cost: Cost of the model.
        workload: Work of a step.
        n_trained: Number of parameters that optimizers update.
        n_frozen: Number of parameters of models that only score.
    """
    limit_bytes = spec.accelerator.memory * USABLE_MEMORY_SHARE
    smallest_peak_gib = float("inf")
    for layout in _list_layouts(cost, workload, spec):
        memory = _estimate_memory(cost, workload, n_trained, n_frozen, layout, limit_bytes)
        if memory.peak_bytes <= limit_bytes:
            seconds_by_phase, bottleneck = _estimate_seconds(cost, workload, layout, spec, memory)
            return ClusterPlan(layout, memory, seconds_by_phase, bottleneck)
        smallest_peak_gib = min(smallest_peak_gib, memory.peak_bytes / GIB)
    raise ConfigError(
        f"stage {stage.name} does not fit on {spec.count} {spec.kind}: the best parallel layout "
        f"takes {smallest_peak_gib:.0f} GiB of the "
        f"{limit_bytes / GIB:.0f} GiB usable on each. Give more accelerators, shorten the "
        f"sequences, or train an adapter (lora). {link_symptom('out-of-memory')}"
    )


def _list_layouts(
    cost: DecoderCost, workload: Workload, spec: ClusterSpec
) -> Iterator[ParallelLayout]:
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
    generator_tensor_parallel = next(
        (size for size in sizes if weight_bytes / size <= max_weight_bytes), sizes[-1]
    )
    n_generators = spec.count // generator_tensor_parallel
    for tensor_parallel in sizes:
        dp_shard = spec.count // tensor_parallel
        for activation_checkpointing in (False, True):
            micro_batch_tokens = MAX_MICRO_BATCH_TOKENS
            while micro_batch_tokens >= workload.max_sequence_tokens:
                yield ParallelLayout(
                    tensor_parallel,
                    dp_shard,
                    micro_batch_tokens,
                    activation_checkpointing,
                    generator_tensor_parallel,
                    n_generators,
                )
                micro_batch_tokens //= 2
            # The smallest micro-batch is one sequence of the largest length.
            yield ParallelLayout(
                tensor_parallel,
                dp_shard,
                workload.max_sequence_tokens,
                activation_checkpointing,
                generator_tensor_parallel,
                n_generators,
            )


def _estimate_memory(
    cost: DecoderCost,
    workload: Workload,
    n_trained: int,
    n_frozen: int,
    layout: ParallelLayout,
    limit_bytes: float,
) -> MemoryPlan:
    """Return the bytes that a layout takes on each accelerator.

    The KV cache takes what the usable memory `limit_bytes` leaves, if the attempts need as much.
    """
    ranks = layout.tensor_parallel * layout.dp_shard
    micro_batch_tokens = min(layout.micro_batch_tokens, workload.max_trained_tokens)
    layer_parameters = cost.parameters / max(1, cost.shape.n_layers) / layout.tensor_parallel
    resident = {
        "process": GIB,
        "weights": cost.parameters * FP32_BYTES // ranks,
        "optimizer": n_trained * 2 * FP32_BYTES // ranks,
    }
    if n_frozen:
        resident["frozen roles"] = n_frozen * FP32_BYTES // ranks
    update = {
        "gradients": n_trained * FP32_BYTES // ranks,
        "gathered layers": int(2 * layer_parameters * (BF16_BYTES + FP32_BYTES)),
        "activations": micro_batch_tokens
        * cost.activation_bytes(BF16_BYTES, checkpointing=layout.activation_checkpointing)
        // layout.tensor_parallel,
        "logits": LOGITS_BYTES,
    }
    sample: dict[str, int] = {}
    n_attempts = max(workload.max_running_attempts, workload.max_running_eval_attempts)
    if n_attempts:
        weights = cost.parameters * BF16_BYTES // layout.generator_tensor_parallel
        sequence_bytes = _get_sequence_bytes(cost, workload, layout)
        room = int(limit_bytes) - sum(resident.values()) - weights
        # Sequences of a generator, rounded up. Those without room for their keys and values wait.
        n_running = min(-(-n_attempts // layout.n_generators), max(1, room // sequence_bytes))
        sample = {"keys and values": n_running * sequence_bytes, "generator's weights": weights}
    return MemoryPlan(resident, {"update": update, "sample": sample}, phases_take_turns=True)


def _get_sequence_bytes(cost: DecoderCost, workload: Workload, layout: ParallelLayout) -> int:
    """Return the bytes of the longest sequence's keys and values on an accelerator."""
    kv_bytes = workload.max_sequence_tokens * cost.kv_bytes(BF16_BYTES)
    return max(1, kv_bytes // layout.generator_tensor_parallel)


def _estimate_seconds(
    cost: DecoderCost,
    workload: Workload,
    layout: ParallelLayout,
    spec: ClusterSpec,
    memory: MemoryPlan,
) -> tuple[dict[str, float], str]:
    """Return the seconds of a step by phase, and the longest phase with its limit."""
    accelerator, flop_by_phase = spec.accelerator, workload.count_flop(cost)
    update = flop_by_phase["update"] / (spec.count * accelerator.flop_s * UPDATE_SHARE)
    score = flop_by_phase["score"] / (spec.count * accelerator.flop_s * SCORE_SHARE)
    if not workload.max_running_attempts:
        return {"update": update, "score": score}, "update: arithmetic"
    n_attempts = math.ceil(workload.max_running_attempts / layout.n_generators)
    kv_bytes = memory.phases["sample"]["keys and values"]
    n_running = min(n_attempts, kv_bytes // _get_sequence_bytes(cost, workload, layout))
    n_waves = -(-n_attempts // n_running)
    # Decoding one token of each row reads all weights once, and the KV cache at its mean length.
    mean_length = (workload.max_prompt_tokens + workload.max_sequence_tokens) / 2
    bytes_read = cost.parameters * BF16_BYTES + n_running * mean_length * cost.kv_bytes(BF16_BYTES)
    bandwidth_s = (
        bytes_read / layout.generator_tensor_parallel / (accelerator.bandwidth * DECODE_SHARE)
    )
    arithmetic_s = cost.forward_flop(n_running, workload.max_sequence_tokens / 2) / (
        layout.generator_tensor_parallel * accelerator.flop_s * SCORE_SHARE
    )
    answer_tokens = workload.max_sequence_tokens - workload.max_prompt_tokens
    sample = n_waves * answer_tokens * max(bandwidth_s, arithmetic_s)
    # Weight sync. The data sheet's rate of a link is the sum of both directions.
    sync = cost.parameters * BF16_BYTES / layout.generator_tensor_parallel / (accelerator.link / 2)
    seconds_by_phase = {"sample": sample, "score": score, "update": update, "sync": sync}
    longest = max(seconds_by_phase, key=lambda phase: seconds_by_phase[phase])
    bottlenecks = {
        "sample": "memory bandwidth" if bandwidth_s > arithmetic_s else "arithmetic",
        "sync": "links",
    }
    return seconds_by_phase, f"{longest}: {bottlenecks.get(longest, 'arithmetic')}"
