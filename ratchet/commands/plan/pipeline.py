"""Estimate the memory of each rank of a Megatron learner's pipeline, from shapes.

Ranks differ: they may have other numbers of layers, the first has the embedding and the last the
language head, and early ranks keep the activations of more micro-batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ratchet.algorithms.base import Algorithm
from ratchet.commands.plan.command import (
    BF16_BYTES,
    FP32_BYTES,
    MIB,
    ProcessMemory,
    Workload,
    find_micro_batch_tokens,
    find_role_cost,
)
from ratchet.config.model_shape.lora_targets import resolve_decoder_targets
from ratchet.config.schema import StageConfig
from ratchet.learners.compute.forward import resolve_chunk_mib
from ratchet.learners.config import MegatronConfig
from ratchet.learners.device_memory import LOGITS_TENSORS, count_stage_models
from ratchet.learners.distributed.topology import build_megatron_sizes
from ratchet.models.flops import DecoderCost
from ratchet.models.parallel.megatron_sizes import PipelineStage


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
    """Return the memory of each pipeline rank; of none without a Megatron pipeline.

    Raises ModelError if Megatron can't divide the model so.
    """
    learner = stage.learner
    if not isinstance(learner, MegatronConfig) or learner.pipeline_parallel == 1:
        return ()
    sizes = build_megatron_sizes(learner)
    costs = {"policy": cost}
    for name in algorithm.roles:
        if (role_cost := find_role_cost(stage, algorithm, cost, name)) is not None:
            costs[name] = role_cost
    for role_cost in costs.values():
        sizes.check(role_cost.shape)
    models = count_stage_models(algorithm, cost, stage.lora)
    tokens = find_micro_batch_tokens(stage, models, process, workload, learner.data_parallel)
    plans: list[RankPlan] = []
    for rank in range(learner.pipeline_parallel):
        stages = [sizes.stage(rank, chunk) for chunk in range(learner.pipeline_chunks)]
        states = _estimate_state_bytes(stage, learner, algorithm, costs, stages)
        activations = _estimate_activation_bytes(learner, cost, process, stages, tokens)
        layers = tuple(part.range(cost.shape.n_layers) for part in stages)
        plans.append(RankPlan(layers, {**states, **activations}))
    return tuple(plans)


def _estimate_state_bytes(
    stage: StageConfig,
    learner: MegatronConfig,
    algorithm: Algorithm,
    costs: Mapping[str, DecoderCost],
    stages: list[PipelineStage],
) -> dict[str, int]:
    """Return the bytes of weights, gradients and optimizer state of all roles."""

    def count(role_cost: DecoderCost) -> int:
        parameters = sum(
            role_cost.count_stage_parameters(
                part.range(role_cost.shape.n_layers),
                is_first=part.index == 0,
                is_last=part.index == part.count - 1,
                expert_parallel=learner.expert_parallel,
            )
            for part in stages
        )
        return parameters // learner.tensor_parallel

    n_parameters = {name: count(role_cost) for name, role_cost in costs.items()}
    trained = [n_parameters.get(name, n_parameters["policy"]) for name in algorithm.losses]
    if stage.lora is not None:
        cost = costs["policy"]
        targets = resolve_decoder_targets(cost.shape, stage.lora)
        adapter = sum(
            cost.count_stage_adapter_parameters(
                part.range(cost.shape.n_layers),
                targets,
                stage.lora.rank,
                expert_parallel=learner.expert_parallel,
            )
            for part in stages
        )
        trained = [adapter // learner.tensor_parallel] * len(algorithm.losses)
    is_bfloat16 = learner.weights == "bfloat16"
    # Two moments, and the master weights if the weights themselves are rounded.
    optimizer_bytes = FP32_BYTES * (3 if is_bfloat16 else 2)
    shards = learner.data_parallel * learner.context_parallel
    return {
        "weights": sum(n_parameters.values()) * (BF16_BYTES if is_bfloat16 else FP32_BYTES),
        "gradients": sum(trained) * FP32_BYTES,
        "optimizer": sum(trained)
        * optimizer_bytes
        // (shards if learner.distributed_optimizer else 1),
    }


def _estimate_activation_bytes(
    learner: MegatronConfig,
    cost: DecoderCost,
    process: ProcessMemory,
    stages: list[PipelineStage],
    tokens: int,
) -> dict[str, int]:
    """Return the bytes of activations and logits, if each micro-batch has `tokens` tokens.

    Before its first backward a rank runs the forwards of the micro-batches that later ranks wait
    for (1F1B, arXiv:2104.04473, section 2.2). What tensor parallelism saves without sequence
    parallelism is left out.
    """
    rank, ranks, chunks = stages[0].index, learner.pipeline_parallel, learner.pipeline_chunks
    # Forwards of one chunk of layers whose backward is still to come.
    forwards = ranks - rank if chunks == 1 else (ranks - rank - 1) * 2 + (chunks - 1) * ranks + 1
    number_bytes = BF16_BYTES if learner.weights == "bfloat16" else FP32_BYTES
    layers = [layer for part in stages for layer in part.range(cost.shape.n_layers)]
    token_bytes = cost.layers_activation_bytes(
        layers, number_bytes, checkpointing=learner.recomputes_layers
    )
    sharded_tokens = -(-tokens // learner.context_parallel)
    if learner.sequence_parallel:
        token_bytes //= learner.tensor_parallel
    memory = {"activations": sharded_tokens * token_bytes * forwards // chunks}
    if stages[-1].index == stages[-1].count - 1:
        chunk_bytes = resolve_chunk_mib(learner.logprob_chunk_mib, process.device_kind) * MIB
        vocabulary = -(-cost.shape.vocab_size // learner.tensor_parallel)
        memory["logits"] = LOGITS_TENSORS * min(
            chunk_bytes, sharded_tokens * vocabulary * FP32_BYTES
        )
    return memory
