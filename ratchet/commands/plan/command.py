"""The command `ratchet plan`: estimate a recipe's memory and time before it is run.

Memory, by phase and role, is computed from shapes. A probe (`ratchet.commands.plan.probe`), which
is a short run of the recipe, measures the memory, and the time of each phase on this machine. An
estimate of the memory that only a longer run takes is added to the measured memory. Time on
accelerators that this machine lacks is estimated from data sheets (`ratchet.utils.datasheets`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ratchet.algorithms.base import Algorithm
from ratchet.commands.plan.probe import Probe
from ratchet.commands.plan.trained import count_trained_weights
from ratchet.config.model_shape.decoder_config import DecoderConfig, unsupported_reason
from ratchet.config.model_shape.presets import get_preset
from ratchet.config.resolve import build
from ratchet.config.schema import RecordConfig, RunConfig, StageConfig
from ratchet.data.chat.task_variables import get_task_renderer
from ratchet.errors import ConfigError
from ratchet.experience.sources.render_task import OFFLINE_SOURCES, render_task
from ratchet.experience.sources.tasks import TaskStream
from ratchet.generators.config import EngineConfig
from ratchet.generators.engine.engine import copies_float32_matrices
from ratchet.generators.engine.sampler import CHUNK_ELEMENTS
from ratchet.learners.compute.forward import resolve_chunk_mib
from ratchet.learners.compute.microbatching import resolve_micro_batch_tokens
from ratchet.learners.config import LocalConfig
from ratchet.learners.device_memory import (
    BF16_BYTES,
    FP32_BYTES,
    LOGITS_TENSORS,
    StageModels,
    count_stage_models,
    get_sizes,
    recomputes_layers,
    size_micro_batches,
)
from ratchet.models.flops import DecoderCost
from ratchet.models.load import find_model, read_model_config, reads_media
from ratchet.models.weights.hf_weights import read_config
from ratchet.observe.records.writer import MAX_STEPS, MAX_TOKENS
from ratchet.training.from_config import build_renderer
from ratchet.training.stage_from_config import build_env_setup

MIB, GIB = 2**20, 2**30
# Bytes of optimizer state per weight. Optimizers that are not listed keep two float32 moments.
OPTIMIZER_BYTES: Mapping[str, float] = {
    "muon": 4,
    "adamw8bit": 2 + 8 / 256,
}
N_TASKS = 64  # number of tasks whose lengths are measured
# Bytes per token that the engine keeps for a running request, beside the KV cache: the token's id
# and two log-probabilities.
HISTORY_BYTES = 8 + 4 + 4
# Bytes per row and per token that the record keeps in memory until a file is written.
RECORD_BYTES_PER_ROW, RECORD_BYTES_PER_TOKEN = 400, 30
# Copies of the recorded rows in memory while a file is written: the tables of the steps, and one
# table into which they are concatenated.
RECORD_COPIES = 2
# The label of the memory that a background checkpoint needs for its copy of the state.
CHECKPOINT_COPY = "copy for checkpoints"


@dataclass(frozen=True)
class ProcessMemory:
    """The memory that one process on a device takes."""

    device_kind: str  # "cpu" or "cuda"
    empty_process_bytes: int  # of Python, PyTorch and their libraries
    rounds_products: bool = False  # True if products of layers have operands in bfloat16
    accelerator_bytes: int = 0  # total memory of the accelerator; 0 if it is not here, or a CPU

    @property
    def is_cpu(self) -> bool:
        return self.device_kind == "cpu"

    @property
    def engine_copies_matrices(self) -> bool:
        """True if the engine generates from a copy in bfloat16, with a KV cache in bfloat16."""
        return copies_float32_matrices(self.rounds_products, on_cpu=self.is_cpu)


@dataclass(frozen=True)
class MemoryPlan:
    """The memory of a stage: bytes by purpose."""

    resident: Mapping[str, int]  # during the whole stage
    phases: Mapping[str, Mapping[str, int]]  # in addition to `resident`, by phase
    # True if each phase frees its memory before the next one. Otherwise the phases add up, because
    # the engine keeps its KV cache, and a process does not return freed memory to the system.
    phases_take_turns: bool = False

    @property
    def peak_bytes(self) -> int:
        """The highest number of bytes at any time."""
        phase_bytes = [sum(bytes_by_purpose.values()) for bytes_by_purpose in self.phases.values()]
        return sum(self.resident.values()) + (
            max(phase_bytes, default=0) if self.phases_take_turns else sum(phase_bytes)
        )


@dataclass(frozen=True)
class StagePlan:
    """The plan of a stage."""

    name: str
    steps: int
    workload: Workload
    memory: MemoryPlan
    flop_by_phase: Mapping[str, float]  # upper bound for one step, by phase
    max_buffered_steps: int  # maximum number of steps that the record keeps in memory at a time


@dataclass(frozen=True)
class Workload:
    """The work of a step."""

    n_rows: int  # sequences that are trained on
    max_prompt_tokens: int  # tokens of the longest prompt, in a sample of the tasks
    max_sequence_tokens: int  # tokens of the longest sequence, in a sample of the tasks
    # Attempts generated at a time in training; 0 if the algorithm trains on given texts.
    max_running_attempts: int
    max_running_eval_attempts: int  # attempts generated at a time in evaluation
    n_scoring_passes: int  # scoring forwards of each row before the update
    n_updates: int  # forwards and backwards of each row in the update

    @property
    def max_trained_tokens(self) -> int:
        """The trained tokens, if every row has the longest length."""
        return self.n_rows * self.max_sequence_tokens

    def count_flop(self, cost: DecoderCost) -> dict[str, float]:
        """Return the FLOP of a step, by phase. A backward takes twice the FLOP of a forward."""
        forward_flop = cost.forward_flop(self.max_trained_tokens, self.max_sequence_tokens / 2)
        sampling_flop = forward_flop if self.max_running_attempts else 0.0
        return {
            "sample": sampling_flop,
            "score": self.n_scoring_passes * forward_flop,
            "update": 3 * self.n_updates * forward_flop,
        }


def plan_stage(
    config: RunConfig, index: int, cost: DecoderCost, process: ProcessMemory
) -> StagePlan:
    """Return the plan of stage `index`. Raises DataError if its data can't be read.

    Args:
        config: The recipe.
        index: The index of the stage.
        cost: The cost of the model that the run starts with.
        process: The memory of an empty process on the device, and the size of its numbers.
    """
    stage = config.stages[index]
    algorithm: Algorithm = build(stage.algorithm)
    workload = measure_workload(config, index, algorithm, cost.shape)
    memory = estimate_memory(stage, algorithm, cost, process, workload)
    memory = replace(memory, resident={**memory.resident, **_estimate_judge_bytes(config, process)})
    max_buffered_steps = find_max_buffered_steps(stage, config.record, workload)
    if max_buffered_steps:
        recorded_share = min(1.0, (config.record.groups or stage.batch_size) / stage.batch_size)
        bytes_per_step = recorded_share * (
            workload.n_rows * RECORD_BYTES_PER_ROW
            + workload.max_trained_tokens * RECORD_BYTES_PER_TOKEN
        )
        memory = replace(
            memory,
            resident={
                **memory.resident,
                "record": int(RECORD_COPIES * max_buffered_steps * bytes_per_step),
            },
        )
    return StagePlan(
        stage.name, stage.n_steps, workload, memory, workload.count_flop(cost), max_buffered_steps
    )


def estimate_run_peak(plans: Sequence[StagePlan], probe: Probe | None) -> int:
    """Return the peak bytes of the process over all stages.

    With a probe, this is the measured peak plus the memory that only a longer run takes: for the
    largest files of the record, and for the copies of the state that checkpoints make.
    """
    if probe is None:
        return max(plan.memory.peak_bytes for plan in plans)
    copy_bytes = max(plan.memory.resident.get(CHECKPOINT_COPY, 0) for plan in plans)
    plans_and_probes = list(zip(plans, probe.stages, strict=True))
    largest_record_bytes = max(
        stage_probe.record_bytes_per_step * plan.max_buffered_steps
        for plan, stage_probe in plans_and_probes
    )
    probed_record_bytes = max(
        stage_probe.record_bytes_per_step * stage_probe.max_buffered_steps
        for _, stage_probe in plans_and_probes
    )
    return (
        probe.peak_bytes
        + copy_bytes
        + int(RECORD_COPIES * max(0.0, largest_record_bytes - probed_record_bytes))
    )


def find_max_buffered_steps(stage: StageConfig, record: RecordConfig, workload: Workload) -> int:
    """Return the maximum number of steps that the record keeps in memory.

    The record writes a file when it has MAX_STEPS steps or MAX_TOKENS tokens, and at every
    checkpoint.
    """
    if not record.every:
        return 0
    recorded_steps = min(stage.n_steps, stage.checkpoint.every or stage.n_steps) // record.every
    return min(recorded_steps, MAX_STEPS, math.ceil(MAX_TOKENS / workload.max_trained_tokens))


def read_shape(config: RunConfig) -> DecoderConfig:
    """Return the shape of the model that the run starts with.

    Raises ConfigError for a model that is not counted.
    """
    source = config.model
    if source.path is None:
        assert source.preset is not None, "a recipe sets either model.path or model.preset"
        vocabulary = build(config.tokenizer, None).vocab_size
        return get_preset(source.preset, vocab_size=vocabulary, **source.overrides)
    directory = find_model(source.path, revision=source.revision)
    hf = read_model_config(
        directory,
        source.overrides,
        backend=source.backend,
        trust_remote_code=source.trust_remote_code,
    )
    reason = "nothing counts its encoders" if reads_media(directory) else unsupported_reason(hf)
    if reason:
        raise ConfigError(
            f"ratchet plan counts only models with the layers of Ratchet's own decoder, and not "
            f"{source.path}: {reason}. Measure it with ratchet train RECIPE --try 60."
        )
    return read_config(directory, hf)


def measure_workload(
    config: RunConfig, index: int, algorithm: Algorithm, shape: DecoderConfig
) -> Workload:
    """Return the work of one step of stage `index`."""
    stage = config.stages[index]
    max_prompt_tokens, max_sequence_tokens, rows_per_attempt = measure_lengths(
        config, index, algorithm, shape
    )
    n_rows = stage.batch_size * stage.algorithm.n_attempts * rows_per_attempt
    max_running = stage.generator.request_limit or 2**30
    n_eval_attempts = (
        stage.evaluation.tasks * max(1, stage.evaluation.samples)
        if generates_in_evaluation(stage, algorithm)
        else 0
    )
    return Workload(
        n_rows=n_rows,
        max_prompt_tokens=max_prompt_tokens,
        max_sequence_tokens=max_sequence_tokens,
        max_running_attempts=min(max_running, n_rows) if algorithm.source == "rollouts" else 0,
        max_running_eval_attempts=min(max_running, n_eval_attempts),
        n_scoring_passes=len(algorithm.passes),
        n_updates=stage.algorithm.n_epochs * len(algorithm.losses),
    )


def measure_lengths(
    config: RunConfig, index: int, algorithm: Algorithm, shape: DecoderConfig
) -> tuple[int, int, int]:
    """Return what N_TASKS tasks need: the tokens of the longest prompt and of the longest sequence,
    and the rows of an attempt.

    A preference pair has two rows, and with `rollouts.history_window` a demonstration has one for
    each turn.
    """
    stage = config.stages[index]
    env_setup = build_env_setup(stage)
    tokenizer = build(config.tokenizer, config.model.path)
    renderer = build_renderer(config, tokenizer, None)
    tasks = [task for _, task in TaskStream(env_setup.environment, seed=config.seed).take(N_TASKS)]
    prompt_lengths = [
        len(get_task_renderer(renderer, task).prompt(task.messages)) if task.messages else 0
        for task in tasks
    ]
    rows_per_attempt = 1
    if algorithm.source in OFFLINE_SOURCES:
        rows_by_task = [
            render_task(
                env_setup.environment,
                task,
                renderer,
                algorithm.source,
                turns=algorithm.turns,
                history_window=stage.rollouts.history_window,
            )
            for task in tasks
        ]
        max_length = max(len(row.tokens) for rows in rows_by_task for row in rows)
        rows_per_attempt = max(map(len, rows_by_task))
    else:
        max_length = max(prompt_lengths) + stage.sampling.max_new_tokens
    return (
        min(max(prompt_lengths), shape.max_positions),
        min(max_length, shape.max_positions),
        rows_per_attempt,
    )


def generates_in_evaluation(stage: StageConfig, algorithm: Algorithm) -> bool:
    """Return True if the policy generates answers in the stage's evaluations."""
    return bool(stage.eval_rewards) or algorithm.source == "rollouts"


def estimate_memory(
    stage: StageConfig,
    algorithm: Algorithm,
    cost: DecoderCost,
    process: ProcessMemory,
    workload: Workload,
) -> MemoryPlan:
    """Estimate the memory of a stage from shapes.

    The phases are the update and, if the stage generates, sampling.
    """
    learner, shape = stage.learner, cost.shape
    n_workers = 1
    if isinstance(learner, LocalConfig) and process.is_cpu:
        n_workers = 1 if learner.workers == "auto" else learner.workers
    n_trained = count_trained_parameters(stage, algorithm, cost)
    models = count_stage_models(algorithm, cost, stage.lora)
    micro_batch_tokens = find_micro_batch_tokens(stage, models, process, workload, n_workers)
    activation_bytes = cost.activation_bytes(FP32_BYTES, checkpointing=recomputes_layers(learner))
    chunk_bytes = resolve_chunk_mib(get_sizes(learner).logprob_chunk_mib, process.device_kind) * MIB
    phases = {
        "update": {
            "gradients": n_trained * FP32_BYTES * n_workers,
            "activations": micro_batch_tokens * activation_bytes * n_workers,
            "logits": LOGITS_TENSORS
            * min(chunk_bytes, micro_batch_tokens * shape.vocab_size * FP32_BYTES)
            * n_workers,
        }
    }
    if stage.lora is not None and stage.lora.target_parameters:
        sums = cost.count_adapted_experts(stage.lora)
        n_sums = max(sums) if recomputes_layers(learner) else sum(sums)
        phases["update"]["experts with adapters"] = n_sums * FP32_BYTES * n_workers
    if process.engine_copies_matrices:
        phases["update"]["matrices in bfloat16"] = BF16_BYTES * cost.count_layer_matrices()
    if n_running := max(workload.max_running_attempts, workload.max_running_eval_attempts):
        # The engine's buffers grow by powers of two.
        token_slots = _round_up_to_power_of_two(n_running) * _round_up_to_power_of_two(
            workload.max_sequence_tokens
        )
        number_bytes = BF16_BYTES if process.engine_copies_matrices else FP32_BYTES
        cache_bytes = token_slots * cost.kv_bytes(number_bytes)
        if isinstance(stage.generator, EngineConfig) and stage.generator.kv_cache_gib != "auto":
            # Attempts without room in the cache wait.
            cache_bytes = min(cache_bytes, int(stage.generator.kv_cache_gib * GIB))
        n_logits = min(n_running * shape.vocab_size, CHUNK_ELEMENTS)
        phases["sample"] = {
            "keys and values": cache_bytes,
            "histories": token_slots * HISTORY_BYTES,
            "logits": LOGITS_TENSORS * n_logits * FP32_BYTES,
        }
    return MemoryPlan(
        {
            "process": process.empty_process_bytes,
            **_estimate_role_bytes(stage, algorithm, cost),
            **_estimate_rounded_bytes(stage, algorithm, cost, process),
        },
        phases,
    )


def find_micro_batch_tokens(
    stage: StageConfig,
    models: StageModels,
    process: ProcessMemory,
    workload: Workload,
    workers: int,
) -> int:
    """Return the maximum number of tokens of a micro-batch: at least one sequence.

    `workers` divide the rows of a mini-batch.
    """
    section = stage.learner
    if process.accelerator_bytes:
        section = size_micro_batches(section, models, process.accelerator_bytes)
    limit = resolve_micro_batch_tokens(get_sizes(section).micro_batch_tokens, process.device_kind)
    parts = workers * stage.algorithm.n_minibatches
    minibatch_tokens = math.ceil(workload.max_trained_tokens / parts)
    return max(min(limit, minibatch_tokens), workload.max_sequence_tokens)


def count_trained_parameters(stage: StageConfig, algorithm: Algorithm, cost: DecoderCost) -> int:
    """Return the number of trained parameters of all roles."""
    return count_trained_weights(cost, stage.lora) * len(algorithm.losses)


def count_frozen_parameters(stage: StageConfig, algorithm: Algorithm, cost: DecoderCost) -> int:
    """Return the number of parameters of models that only score."""
    frozen_roles = [name for name in algorithm.roles if name not in algorithm.losses]
    return sum(_count_role_parameters(stage, algorithm, cost, name) for name in frozen_roles)


def _count_role_parameters(
    stage: StageConfig, algorithm: Algorithm, cost: DecoderCost, name: str
) -> int:
    """Return the number of parameters that a role other than the policy adds."""
    role_cost = find_role_cost(stage, algorithm, cost, name)
    return 0 if role_cost is None else role_cost.parameters


def find_role_cost(
    stage: StageConfig, algorithm: Algorithm, cost: DecoderCost, name: str
) -> DecoderCost | None:
    """Return the cost of the model that a role other than the policy adds; None for none.

    A role with a path has a model of its own, and other roles are copies of the policy. With LoRA,
    a copy is the policy without its adapter, so it adds none.
    """
    path = algorithm.roles[name].path
    if path is not None:
        return DecoderCost(read_config(find_model(path)))
    return cost if stage.lora is None else None


def _estimate_rounded_bytes(
    stage: StageConfig, algorithm: Algorithm, cost: DecoderCost, process: ProcessMemory
) -> dict[str, int]:
    """Return the bytes of matrices that are kept in bfloat16 beside those in float32, by role.

    On a CPU each model keeps those of its layers, experts excepted, once for all workers. On an
    accelerator the engine does, for the policy.
    """
    if process.is_cpu and process.rounds_products:
        costs = {"policy": cost} | {
            name: role_cost
            for name in algorithm.roles
            if (role_cost := find_role_cost(stage, algorithm, cost, name)) is not None
        }
    elif process.engine_copies_matrices and isinstance(stage.generator, EngineConfig):
        costs = {"policy": cost}
    else:
        return {}
    return {
        f"{name}: matrices in bfloat16": BF16_BYTES
        * role_cost.count_layer_matrices(experts=not process.is_cpu)
        for name, role_cost in costs.items()
    }


def _estimate_role_bytes(
    stage: StageConfig, algorithm: Algorithm, cost: DecoderCost
) -> dict[str, int]:
    """Return the bytes of weights, optimizer state and checkpoint copy, by role and purpose."""
    bytes_by_purpose = {"policy: weights": cost.parameters * FP32_BYTES}
    for name in algorithm.roles:
        if n_parameters := _count_role_parameters(stage, algorithm, cost, name):
            bytes_by_purpose[f"{name}: weights"] = n_parameters * FP32_BYTES
    n_trained = count_trained_weights(cost, stage.lora)
    if stage.lora is not None:
        bytes_by_purpose["adapters: weights"] = n_trained * len(algorithm.losses) * FP32_BYTES
    for name in algorithm.losses:
        bytes_by_purpose[f"{name}: optimizer"] = int(
            n_trained * OPTIMIZER_BYTES.get(stage.optimizer.kind_name, 2 * FP32_BYTES)
        )
        if stage.optimizer.ema_decay is not None:
            bytes_by_purpose[f"{name}: average"] = n_trained * FP32_BYTES
    if stage.checkpoint.background and stage.checkpoint.every:
        bytes_by_purpose[CHECKPOINT_COPY] = sum(bytes_by_purpose.values())
    return bytes_by_purpose


def _estimate_judge_bytes(config: RunConfig, process: ProcessMemory) -> dict[str, int]:
    """Return the bytes of the judges' weights on the stage's device.

    On a CPU the judges' processes use the same memory. On accelerators they have their own.
    """
    return {
        f"judge {judge.name}: weights": DecoderCost(read_config(find_model(judge.path))).parameters
        * FP32_BYTES
        * max(1, judge.n_processes)
        for judge in config.judges
        if process.is_cpu or not judge.n_processes
    }


def _round_up_to_power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least `n`."""
    return 1 << max(0, n - 1).bit_length()
