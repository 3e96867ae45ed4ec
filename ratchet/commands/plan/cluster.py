"""The best division of a stage over a cluster that is not here, and its cost, by shapes and data
sheets."""

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
LARGEST_MICRO = 32768  # tokens: larger ones gain nothing
# logits of a learner's chunk on an accelerator, with their softmax and gradient
CHUNK = 3 * 256 * 2**20
ROOM = 0.35  # of an accelerator's memory that generation wants for keys and values


@dataclass(frozen=True)
class Division:
    """A division for a learner and for generators that share the accelerators by turns. replicas:
    of the generator."""

    tensor: int
    shards: int
    micro_batch_tokens: int
    checkpointing: bool
    generator_tensor: int
    replicas: int

    def recipe(self) -> dict[str, object]:
        """Return the keys of a recipe."""
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
    """A division with its cost. memory: bytes of one accelerator. seconds: of a step, by phase.
    bound: what limits the longest phase."""

    division: Division
    memory: MemoryPlan
    seconds: Mapping[str, float]
    bound: str


def plan_cluster(
    stage: StageConfig, cost: DecoderCost, load: Load, trained: int, frozen: int, spec: ClusterSpec
) -> ClusterPlan:
    """Return the cheapest division that fits. trained: parameters that optimizers move. frozen: of
    models that only score. Raises ConfigError if nothing fits."""
    limit, least = spec.accelerator.memory * USABLE, float("inf")
    for division in _divisions(cost, load, spec):
        memory = _memory(cost, load, trained, frozen, division)
        if memory.peak <= limit:
            seconds, bound = _seconds(cost, load, division, spec)
            return ClusterPlan(division, memory, seconds, bound)
        least = min(least, memory.peak / GIB)
    raise ConfigError(
        f"stage {stage.name} does not fit on {spec.count} {spec.kind}: the best division found "
        f"takes {least:.0f} GiB of the "
        f"{limit / GIB:.0f} GiB usable on each; give more accelerators, shorter sequences, or "
        "train an adapter (lora)"
    )


def _divisions(cost: DecoderCost, load: Load, spec: ClusterSpec) -> Iterator[Division]:
    """Yield divisions, the cheapest first: the fewest ranks that share a layer, no recomputation,
    the largest micro-batch."""
    weights = cost.parameters * HALF
    room = spec.accelerator.memory * (USABLE - ROOM)
    sizes = [
        size
        for size in (1, 2, 4, 8)
        if spec.per_node % size == 0 and cost.shape.n_kv_heads % size == 0
    ]
    generating = next((size for size in sizes if weights / size <= room), sizes[-1])
    for tensor in sizes:
        for again in (False, True):
            micro = LARGEST_MICRO
            while micro >= load.length:
                yield Division(
                    tensor, spec.count // tensor, micro, again, generating, spec.count // generating
                )
                micro //= 2
            yield Division(
                tensor,
                spec.count // tensor,
                load.length,
                again,
                generating,
                spec.count // generating,
            )


def _memory(
    cost: DecoderCost, load: Load, trained: int, frozen: int, division: Division
) -> MemoryPlan:
    ranks = division.tensor * division.shards
    micro = min(division.micro_batch_tokens, load.tokens)
    layer = cost.parameters / max(1, cost.shape.n_layers) / division.tensor
    held = {
        "process": GIB,
        "weights": cost.parameters * MASTER // ranks,
        "optimizer": trained * 2 * MASTER // ranks,
    }
    if frozen:
        held["frozen roles"] = frozen * MASTER // ranks
    update = {
        "gradients": trained * MASTER // ranks,
        "gathered layers": int(2 * layer * (HALF + MASTER)),
        "activations": micro
        * cost.activation_bytes(HALF, checkpointing=division.checkpointing)
        // division.tensor,
        "logits": CHUNK,
    }
    rows = -(-max(load.attempts, load.evaluated) // division.replicas)
    sample = (
        {"keys and values": rows * load.length * cost.kv_bytes(HALF) // division.generator_tensor}
        if rows
        else {}
    )
    sample |= (
        {"generator's weights": cost.parameters * HALF // division.generator_tensor} if rows else {}
    )
    return MemoryPlan(held, {"update": update, "sample": sample}, by_turns=True)


def _seconds(
    cost: DecoderCost, load: Load, division: Division, spec: ClusterSpec
) -> tuple[dict[str, float], str]:
    chip, flop = spec.accelerator, load.flop(cost)
    update = flop["update"] / (spec.count * chip.flop_s * UPDATE_SHARE)
    score = flop["score"] / (spec.count * chip.flop_s * SCORE_SHARE)
    if not load.attempts:
        return {"update": update, "score": score}, "update: arithmetic"
    rows = -(-load.attempts // division.replicas)
    read = cost.parameters * HALF + rows * (load.prompt + load.length) / 2 * cost.kv_bytes(HALF)
    by_memory = read / division.generator_tensor / (chip.bandwidth * DECODE_SHARE)
    by_arithmetic = cost.forward_flop(rows, load.length / 2) / (
        division.generator_tensor * chip.flop_s * SCORE_SHARE
    )
    sample = (load.length - load.prompt) * max(by_memory, by_arithmetic)
    sync = cost.parameters * HALF / division.generator_tensor / (chip.link / 2)
    seconds = {"sample": sample, "score": score, "update": update, "sync": sync}
    longest = max(seconds, key=lambda phase: seconds[phase])
    limits = {
        "sample": "memory bandwidth" if by_memory > by_arithmetic else "arithmetic",
        "sync": "links",
    }
    return seconds, f"{longest}: {limits.get(longest, 'arithmetic')}"
