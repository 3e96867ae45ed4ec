"""Estimate the memory of each pipeline rank of a distributed learner, from shapes.

Ranks differ: they may have other numbers of layers, the first has the embedding and the last the
language head, and early ranks keep the activations of more micro-batches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ratchet.algorithms.base import Algorithm
from ratchet.commands.plan.command import (
    BF16_BYTES,
    FP32_BYTES,
    MIB,
    OPTIMIZER_BYTES,
    ProcessMemory,
    Workload,
    find_micro_batch_tokens,
    find_role_cost,
)
from ratchet.commands.plan.trained import count_frozen_weights
from ratchet.config.lora import LoRAConfig
from ratchet.config.schema import StageConfig
from ratchet.learners.compute.forward import resolve_chunk_mib
from ratchet.learners.config import DistributedConfig, DTensorConfig, MegatronConfig
from ratchet.learners.device_memory import LOGITS_TENSORS, count_stage_models, recomputes_layers
from ratchet.learners.distributed.topology import (
    build_first_shard,
    build_megatron_sizes,
    build_topology,
    list_rank_stages,
)
from ratchet.models.flops import DecoderCost, StageParameters
from ratchet.models.parallel.sharding import ModelShard, ShardIndex, StageIndex

# What the memory of a rank is for, in the order of a table.
PURPOSES = (
    "weights",
    "adapters",
    "gathered weights",
    "gradients",
    "optimizer",
    "average",
    "activations",
    "experts with adapters",
    "logits",
)


@dataclass(frozen=True)
class RankPlan:
    """The memory of a learner's rank: bytes by purpose, which add up."""

    layers: tuple[range, ...]  # the layers of each of its stages
    bytes_by_purpose: Mapping[str, int]

    @property
    def peak_bytes(self) -> int:
        return sum(self.bytes_by_purpose.values())

    @property
    def n_layers(self) -> int:
        return sum(map(len, self.layers))


def plan_pipeline_ranks(
    stage: StageConfig,
    algorithm: Algorithm,
    cost: DecoderCost,
    process: ProcessMemory,
    workload: Workload,
) -> tuple[RankPlan, ...]:
    """Return the memory of each pipeline rank; of none without a pipeline.

    Raises ModelError if the learner can't divide the model so.
    """
    learner = stage.learner
    if not isinstance(learner, DistributedConfig) or learner.pipeline_parallel == 1:
        return ()
    costs = {"policy": cost}
    for name in algorithm.roles:
        if (role_cost := find_role_cost(stage, algorithm, cost, name)) is not None:
            costs[name] = replace(role_cost, uses_transformers=cost.uses_transformers)
    for role_cost in costs.values():
        _check_division(learner, role_cost)
    models = count_stage_models(algorithm, cost, stage.lora)
    workers = build_topology(learner).data_ranks
    tokens = find_micro_batch_tokens(stage, models, process, workload, workers)
    plans: list[RankPlan] = []
    for rank in range(learner.pipeline_parallel):
        stages = list_rank_stages(learner, rank)
        states = _estimate_state_bytes(stage, learner, algorithm, costs, process, stages)
        activations = _estimate_activation_bytes(learner, cost, process, stages, tokens, stage.lora)
        layers = tuple(part.range(cost.shape.n_layers) for part in stages)
        plans.append(RankPlan(layers, {**states, **activations}))
    return tuple(plans)


def _check_division(learner: DistributedConfig, cost: DecoderCost) -> None:
    """Raise ModelError if the learner can't divide a decoder."""
    shape = cost.shape
    if isinstance(learner, MegatronConfig):
        build_megatron_sizes(learner).check(shape)
    elif isinstance(learner, DTensorConfig):
        if cost.uses_transformers:
            # The plans of transformers divide layers with biases too.
            shape = replace(shape, out_bias=False, mlp_bias=False)
        build_first_shard(learner).check(shape)


def _estimate_state_bytes(
    stage: StageConfig,
    learner: DistributedConfig,
    algorithm: Algorithm,
    costs: Mapping[str, DecoderCost],
    process: ProcessMemory,
    stages: Sequence[StageIndex],
) -> dict[str, int]:
    """Return the bytes of weights, gradients and optimizer state of all roles."""
    parameters = {name: _count(role_cost, learner, stages) for name, role_cost in costs.items()}
    trained = [
        _count_trained(costs.get(n, costs["policy"]), learner, stages) for n in algorithm.losses
    ]
    bytes_by_purpose = {
        "weights": sum(_count_shard(count, learner) for count in parameters.values())
        * (BF16_BYTES if learner.weight_format == "bfloat16" else FP32_BYTES)
    }
    if _count_fsdp_ranks(learner) > 1:
        bytes_by_purpose["gathered weights"] = max(
            _estimate_gathered_bytes(costs.get(name, costs["policy"]), learner, process, stages)
            for name in algorithm.losses
        )
    if stage.lora is not None:
        adapter = _count_adapter(costs["policy"], stage, learner, stages)
        trained = [StageParameters(vectors=adapter)] * len(algorithm.losses)
        bytes_by_purpose["adapters"] = adapter * len(algorithm.losses) * FP32_BYTES
    gradients = [count.total for count in trained]
    # Megatron's buffers hold the gradients of all roles.
    n_gradients = sum(gradients) if isinstance(learner, MegatronConfig) else max(gradients)
    bytes_by_purpose["gradients"] = n_gradients * FP32_BYTES
    optimizer_bytes = OPTIMIZER_BYTES.get(stage.optimizer.kind_name, 2 * FP32_BYTES)
    if learner.weight_format == "bfloat16":
        optimizer_bytes += FP32_BYTES  # of the master weights
    n_moments = sum(_count_shard(count, learner) for count in trained)
    if isinstance(learner, MegatronConfig) and learner.distributed_optimizer:
        optimizer_bytes /= learner.data_parallel * learner.context_parallel
    bytes_by_purpose["optimizer"] = int(n_moments * optimizer_bytes)
    if stage.optimizer.ema_decay is not None:
        bytes_by_purpose["average"] = n_moments * FP32_BYTES
    return bytes_by_purpose


def _count(
    cost: DecoderCost,
    learner: DistributedConfig,
    stages: Sequence[StageIndex],
    *,
    ends: bool = True,
) -> StageParameters:
    """Return the parameters of a rank's stages, before FSDP divides them.

    ends: False to leave out the embedding, the language head and the final norm.
    """
    counts = (
        cost.count_stage_parameters(
            part.range(cost.shape.n_layers),
            is_first=ends and part.index == 0,
            is_last=ends and part.index == part.count - 1,
            tensor_parallel=learner.tensor_parallel,
            expert_parallel=learner.expert_parallel,
        )
        for part in stages
    )
    return sum(counts, StageParameters())


def _count_trained(
    cost: DecoderCost, learner: DistributedConfig, stages: Sequence[StageIndex]
) -> StageParameters:
    """Return the parameters of a rank's stages that updates change, before FSDP divides them."""
    # The last rank has the largest part of a vocabulary that can't be divided evenly.
    tensor = ShardIndex(learner.tensor_parallel - 1, learner.tensor_parallel)
    experts = ShardIndex(0, learner.expert_parallel)
    frozen = (count_frozen_weights(cost, ModelShard(tensor, part, experts)) for part in stages)
    return _count(cost, learner, stages) - sum(frozen, StageParameters())


def _count_adapter(
    cost: DecoderCost,
    stage: StageConfig,
    learner: DistributedConfig,
    stages: Sequence[StageIndex],
) -> int:
    """Return the number of an adapter's parameters in a rank's stages."""
    assert stage.lora is not None, "a stage with an adapter"
    return cost.count_adapter_parameters(
        stage.lora,
        [layer for part in stages for layer in part.range(cost.shape.n_layers)],
        tensor_parallel=learner.tensor_parallel,
        expert_parallel=learner.expert_parallel,
    )


def _count_fsdp_ranks(learner: DistributedConfig) -> int:
    """Return the number of ranks over which FSDP divides matrices; 1 without FSDP."""
    return learner.dp_shard * learner.context_parallel if isinstance(learner, DTensorConfig) else 1


def _count_shard(count: StageParameters, learner: DistributedConfig) -> int:
    """Return the number of parameters that FSDP leaves to a rank.

    It divides no vectors, and a rank's experts over fewer ranks.
    """
    ranks = _count_fsdp_ranks(learner)
    if ranks == 1:
        return count.total
    matrices = -(-count.matrices // ranks)
    experts = -(-count.experts // (ranks // learner.expert_parallel))
    return matrices + experts + count.vectors


def _estimate_gathered_bytes(
    cost: DecoderCost,
    learner: DistributedConfig,
    process: ProcessMemory,
    stages: Sequence[StageIndex],
) -> int:
    """Return the bytes of the matrices that FSDP has gathered from other ranks.

    In a pipeline those of all layers stay gathered from the first backward of a step to its last,
    and gradients are whole. On an accelerator those of layers are gathered in bfloat16.
    """
    layers = _count(cost, learner, stages, ends=False)
    ends = _count(cost, learner, stages).matrices - layers.matrices
    n_gathered = layers.matrices
    if learner.expert_parallel < _count_fsdp_ranks(learner):
        n_gathered += layers.experts
    return n_gathered * (FP32_BYTES if process.is_cpu else BF16_BYTES) + ends * FP32_BYTES


def _estimate_activation_bytes(
    learner: DistributedConfig,
    cost: DecoderCost,
    process: ProcessMemory,
    stages: Sequence[StageIndex],
    tokens: int,
    lora: LoRAConfig | None,
) -> dict[str, int]:
    """Return the bytes of activations and logits, if each micro-batch has `tokens` tokens.

    Before its first backward a rank runs the forwards of the micro-batches that later ranks wait
    for (1F1B, arXiv:2104.04473, section 2.2). What tensor parallelism saves without sequence
    parallelism is left out.
    """
    rank, ranks, chunks = stages[0].index, learner.pipeline_parallel, learner.pipeline_chunks
    # Forwards of one chunk of layers whose backward is still to come.
    forwards = ranks - rank if chunks == 1 else (ranks - rank - 1) * 2 + (chunks - 1) * ranks + 1
    number_bytes = BF16_BYTES if learner.weight_format == "bfloat16" else FP32_BYTES
    layers = [layer for part in stages for layer in part.range(cost.shape.n_layers)]
    token_bytes = cost.layers_activation_bytes(
        layers, number_bytes, checkpointing=recomputes_layers(learner)
    )
    sharded_tokens = -(-tokens // learner.context_parallel)
    if learner.sequence_parallel:
        token_bytes //= learner.tensor_parallel
    memory = {"activations": sharded_tokens * token_bytes * forwards // chunks}
    if lora is not None and lora.target_parameters:
        sums = cost.count_adapted_experts(
            lora,
            layers,
            tensor_parallel=learner.tensor_parallel,
            expert_parallel=learner.expert_parallel,
        )
        # The sums have the dtype in which FSDP gathers the experts.
        is_gathered = learner.expert_parallel < _count_fsdp_ranks(learner)
        sum_bytes = BF16_BYTES if is_gathered and not process.is_cpu else FP32_BYTES
        n_sums = (
            max(sums, default=0) if recomputes_layers(learner) else sum(sums) * forwards // chunks
        )
        memory["experts with adapters"] = n_sums * sum_bytes
    if stages[-1].index == stages[-1].count - 1:
        chunk_bytes = resolve_chunk_mib(learner.logprob_chunk_mib, process.device_kind) * MIB
        vocabulary = -(-cost.shape.vocab_size // learner.tensor_parallel)
        memory["logits"] = LOGITS_TENSORS * min(
            chunk_bytes, sharded_tokens * vocabulary * FP32_BYTES
        )
    return memory
