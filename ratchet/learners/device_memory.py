"""Size the micro-batches of an accelerator by its memory, and count what an update takes there.

Micro-batches are sized from shapes and total memory, not from what is free, so that a resumed run
has the same ones.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ratchet.algorithms.base import Algorithm
from ratchet.config.lora import LoRAConfig
from ratchet.config.sections import LearnerSection
from ratchet.errors import ModelError
from ratchet.learners.compute.forward import resolve_chunk_mib
from ratchet.learners.compute.microbatching import MAX_TOKENS_GPU, resolve_micro_batch_tokens
from ratchet.learners.config import DistributedConfig, DTensorConfig, LocalConfig
from ratchet.models.flops import DecoderCost
from ratchet.models.load import find_model
from ratchet.models.weights.hf_weights import read_config
from ratchet.utils.datasheets import GIB, USABLE_MEMORY_SHARE

log = logging.getLogger(__name__)

MIN_TOKENS_GPU = 512  # a smaller micro-batch would not keep an accelerator busy
FP32_BYTES, BF16_BYTES = 4, 2
# Bytes that an optimizer step adds for each trained weight: a gradient and two moments.
TRAINED_BYTES = 3 * FP32_BYTES
# Tensors of the logits' size that exist at a time: the logits, their softmax and its gradient.
LOGITS_TENSORS = 3


@dataclass(frozen=True)
class StageModels:
    """The models of a stage."""

    cost: DecoderCost
    """The cost of the policy."""
    n_parameters: int
    """Number of parameters of all models."""
    n_trained: int
    """Number of parameters that train."""


def count_stage_models(
    algorithm: Algorithm, cost: DecoderCost, lora: LoRAConfig | None
) -> StageModels:
    """Return the numbers of parameters of all roles' models.

    Roles without a path are copies of the policy. With an adapter they share its other weights.

    Args:
        cost: The cost of the policy.
    """
    n_parameters = n_trained = cost.parameters
    for role in algorithm.roles.values():
        if role.path is not None:
            n_parameters += _read_cost(role.path, cost).parameters
        elif lora is None:
            n_parameters += cost.parameters
    if lora is not None:
        n_trained = cost.count_adapter_parameters(lora)
    return StageModels(cost, n_parameters, n_trained * len(algorithm.losses))


def _read_cost(path: str, policy_cost: DecoderCost) -> DecoderCost:
    """Return the cost of a model; the policy's for one that is not a built-in decoder."""
    try:
        return DecoderCost(read_config(find_model(path)))
    except ModelError:
        return policy_cost


def recomputes_layers(section: LearnerSection) -> bool:
    """Return True if an update keeps only the inputs of layers, and recomputes them."""
    if isinstance(section, LocalConfig | DTensorConfig):
        return section.activation_checkpointing
    return section.recomputes_layers


def get_sizes(section: LearnerSection) -> LocalConfig | DistributedConfig:
    """Return the section, or the default sizes for a learner class of the user's own."""
    return section if isinstance(section, LocalConfig | DistributedConfig) else LocalConfig()


def count_token_bytes(section: LearnerSection, cost: DecoderCost) -> int:
    """Return the bytes of activations of one token of a micro-batch on one accelerator.

    All count as float32. Under autocast products keep theirs in bfloat16, and the backward's own
    tensors take about as much as that saves.
    """
    token_bytes = cost.activation_bytes(FP32_BYTES, checkpointing=recomputes_layers(section))
    return token_bytes // section.tensor_ranks


def count_room(section: LearnerSection, models: StageModels, device_bytes: int) -> int:
    """Return the bytes of an accelerator that are left for activations and the KV cache.

    All else is weights, gradients, moments, the engine's copy of the layers' matrices and the
    update's, both in bfloat16.
    """
    n_shards = section.tensor_ranks * section.pipeline_ranks
    if isinstance(section, DTensorConfig):
        n_shards *= section.dp_shard
    state_bytes = FP32_BYTES * models.n_parameters + TRAINED_BYTES * models.n_trained
    copied_bytes = 2 * BF16_BYTES * models.cost.count_layer_matrices()
    usable_bytes = int(USABLE_MEMORY_SHARE * device_bytes)
    return usable_bytes - (state_bytes + copied_bytes) // n_shards


def choose_micro_batch_tokens(room_bytes: int, token_bytes: int) -> int:
    """Return the largest micro-batch whose activations fit half of `room_bytes`, in tokens.

    It is a power of two between MIN_TOKENS_GPU and MAX_TOKENS_GPU. The other half is for the KV
    cache, beside what activations leave of theirs.
    """
    tokens = MAX_TOKENS_GPU
    while tokens > MIN_TOKENS_GPU and tokens * token_bytes > room_bytes // 2:
        tokens //= 2
    return tokens


def size_micro_batches(
    section: LearnerSection, models: StageModels, device_bytes: int
) -> LearnerSection:
    """Return the section with a number in place of `micro_batch_tokens: auto`, and log it."""
    if get_sizes(section) is not section or get_sizes(section).micro_batch_tokens != "auto":
        return section
    room_bytes = count_room(section, models, device_bytes)
    token_bytes = count_token_bytes(section, models.cost)
    tokens = choose_micro_batch_tokens(room_bytes, token_bytes)
    log.info(
        "learner.micro_batch_tokens=auto became %d: its activations take up to %.1f GiB of the "
        "%.1f GiB that models, gradients and moments leave on each accelerator",
        tokens,
        tokens * token_bytes / GIB,
        room_bytes / GIB,
    )
    return section.model_copy(update={"micro_batch_tokens": tokens})


def count_update_bytes(
    section: LearnerSection, cost: DecoderCost, device_kind: str, longest: int
) -> int:
    """Return the bytes of a micro-batch: activations, logits and matrices in bfloat16.

    Args:
        longest: Tokens of the longest sequence, which may be a micro-batch of its own.
    """
    sizes = get_sizes(section)
    tokens = max(resolve_micro_batch_tokens(sizes.micro_batch_tokens, device_kind), longest)
    chunk_bytes = resolve_chunk_mib(sizes.logprob_chunk_mib, device_kind) * 2**20
    logits_bytes = LOGITS_TENSORS * min(chunk_bytes, tokens * cost.shape.vocab_size * FP32_BYTES)
    casts = BF16_BYTES * cost.count_layer_matrices() // section.tensor_ranks
    return tokens * count_token_bytes(section, cost) + logits_bytes + casts


@contextmanager
def explain_out_of_memory(count_largest: Callable[[], int]) -> Iterator[None]:
    """Add to an out-of-memory error of an update which key to lower.

    count_largest: Returns the tokens of the largest micro-batch.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        cause = str(error).partition("\n")[0].partition(" GPU ")[0].rstrip(". ")
        error.args = (
            f"{cause}, in an update by micro-batches of up to {count_largest()} tokens. Lower "
            "learner.micro_batch_tokens or generator.kv_cache_gib, or set "
            "learner.activation_checkpointing=true",
        )
        raise
