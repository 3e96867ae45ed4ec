"""Tiny models of every family, and the ranks of Megatron with parameters of its shapes, without
Megatron."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ratchet.models.convert.dimensions import Dimensions
from ratchet.models.convert.megatron import Layout, MegatronShard
from ratchet.models.convert.packed_experts import read_single_experts
from ratchet.models.model_source import ReadBlock
from ratchet.models.parallel.sharding import ShardIndex
from ratchet.models.weights.hf_weights import WeightFiles

BASE: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
    "num_hidden_layers": 4,
    "head_dim": 8,
}
SPARSE = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
GROUPED_EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 2,
    "routed_scaling_factor": 2.5,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
}
LATENT = {
    **GROUPED_EXPERTS,
    "num_key_value_heads": 4,
    "head_dim": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"tie_word_embeddings": False}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": (
        "llama",
        {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True},
    ),
    "mistral": ("mistral", {"tie_word_embeddings": False, "sliding_window": None}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3_moe": ("qwen3_moe", {"tie_word_embeddings": False, **SPARSE}),
    "qwen3_moe-dense-first": (
        "qwen3_moe",
        {"tie_word_embeddings": False, "mlp_only_layers": [0], **SPARSE},
    ),
    "mixtral": ("mixtral", {"tie_word_embeddings": False, "sliding_window": None, **SPARSE}),
    "qwen2_moe": (
        "qwen2_moe",
        {"tie_word_embeddings": False, "shared_expert_intermediate_size": 36, **SPARSE},
    ),
    "qwen2_moe-dense-first": (
        "qwen2_moe",
        {
            "tie_word_embeddings": True,
            "shared_expert_intermediate_size": 36,
            "qkv_bias": False,
            "norm_topk_prob": True,
            "mlp_only_layers": [0],
            **SPARSE,
        },
    ),
    "glm4_moe": (
        "glm4_moe",
        {
            "tie_word_embeddings": False,
            "attention_bias": True,
            "use_qk_norm": True,
            **GROUPED_EXPERTS,
        },
    ),
    "glm4_moe-plain-heads": ("glm4_moe", {"tie_word_embeddings": False, **GROUPED_EXPERTS}),
    "gpt_oss": (
        "gpt_oss",
        {
            "tie_word_embeddings": False,
            "sliding_window": 5,
            "swiglu_limit": 0.5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "deepseek_v3": ("deepseek_v3", {"tie_word_embeddings": False, **LATENT}),
    "deepseek_v3-full-queries": (
        "deepseek_v3",
        {"tie_word_embeddings": False, **LATENT, "q_lora_rank": None},
    ),
}
# How many layers of multi-token prediction the files of a model have.
MTP = {"glm4_moe-plain-heads": 1, "deepseek_v3-full-queries": 2}


def reader(directory: Path, dimensions: Dimensions) -> ReadBlock:
    """Reads blocks of a directory's weights by the names of the tables."""
    read = WeightFiles.find(directory).block
    return read_single_experts(read) if dimensions.has_packed_experts else read


def places(
    tensor: int = 1,
    pipeline: int = 1,
    experts: int = 1,
    stage: Callable[[int], ShardIndex] | None = None,
    **fields: Any,
) -> Iterator[MegatronShard]:
    """Every rank that holds something of its own. stage: by the pipeline rank; None: equal ones."""
    stages = [stage(p) if stage else ShardIndex(p, pipeline) for p in range(pipeline)]
    for t, p, e in itertools.product(range(tensor), stages, range(experts)):
        yield MegatronShard(ShardIndex(t, tensor), p, ShardIndex(e, experts), **fields)


def empty(layout: Layout, place: MegatronShard, dimensions: Dimensions) -> dict[str, Tensor]:
    """Parameters of the shapes that Megatron gives them, from the pieces' own shapes and the rank's
    share of columns."""
    made = {}
    for name, pieces in layout.items():
        rows = pieces[-1].rows.stop
        if name.startswith(("embedding.", "output_layer.")):
            rows = -(-dimensions.vocabulary // place.tensor.count)
        rest = list(pieces[0].shape[1:])
        if rest and ("linear_fc2" in name or "linear_proj" in name):
            routed = ".experts." in name
            rest[0] //= (
                place.expert_tensor if routed and place.expert_tensor else place.tensor
            ).count
        made[name] = torch.full((rows, *rest), float("nan"))
    return made
