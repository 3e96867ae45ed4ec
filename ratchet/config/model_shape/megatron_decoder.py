"""The shape of decoders that Megatron Core runs, and the built-in decoder does not.

These are Qwen2-MoE, GLM-4-MoE, GPT-OSS and DeepSeek-V3. This module does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ratchet.config.model_shape.config_json import ORIGINAL_CONTEXT, read_original_context
from ratchet.config.model_shape.decoder_config import (
    ROPE_KEYS,
    SILU,
    DecoderConfig,
    explain_rope,
    read_ids,
)
from ratchet.errors import ModelError

SIZE_KEYS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
)
# The keys that a config.json must have, of families that the built-in decoder lacks.
REQUIRED_KEYS: Mapping[str, tuple[str, ...]] = {
    "qwen2_moe": (
        *SIZE_KEYS,
        "num_key_value_heads",
        "num_experts",
        "moe_intermediate_size",
        "shared_expert_intermediate_size",
    ),
    "glm4_moe": (
        *SIZE_KEYS,
        "num_key_value_heads",
        "n_routed_experts",
        "moe_intermediate_size",
    ),
    "gpt_oss": (*SIZE_KEYS, "num_key_value_heads", "num_local_experts"),
    "deepseek_v3": (
        *SIZE_KEYS,
        "kv_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
        "n_routed_experts",
        "moe_intermediate_size",
    ),
}


@dataclass(frozen=True)
class LatentHeads:
    """The sizes of multi-head latent attention (MLA, arXiv:2405.04434, section 2.1)."""

    q_rank: int  # size of the latent queries; 0: queries are not compressed
    kv_rank: int  # size of the latent keys and values
    plain_dim: int  # dimensions of a query or key that are not rotated
    value_dim: int  # dimensions of a value
    is_interleaved: bool  # True if neighbouring dimensions are rotated together
    query_scale: float  # factor of the queries, for long contexts


@dataclass(frozen=True)
class SinkAttentionShape:
    """The sliding windows of a model whose heads have attention sinks."""

    window: int  # how many tokens a query of a windowed layer sees, itself included
    windowed_layers: tuple[int, ...]


class ClampedGLU(NamedTuple):
    """The numbers of GPT-OSS's gated linear unit."""

    limit: float  # gate and up projection are clamped to this
    alpha: float  # factor of the gate in its sigmoid


@dataclass(frozen=True)
class MegatronDecoderConfig(DecoderConfig):
    """The shape of a decoder with experts and what only some families have."""

    shared_intermediate_size: int = 0  # of the shared experts together; 0: there are none
    has_shared_gate: bool = False  # True if a sigmoid weighs the shared experts' output
    # True if a sigmoid of each logit weighs an expert, and a bias of each expert changes which
    # experts are chosen (DeepSeek-V3, arXiv:2412.19437, eq. 16); False: a softmax of the logits.
    has_sigmoid_router: bool = False
    n_expert_groups: int = 1  # groups of experts, of which a token uses a few
    groups_per_token: int = 1
    routed_scale: float = 1.0  # factor of the weights of routed experts
    rotary_dim: int = 0  # how many dimensions of each head are rotated
    latent: LatentHeads | None = None
    sinks: SinkAttentionShape | None = None
    # The unit of experts with biases, which come with a bias of the router; None: SwiGLU.
    clamped_glu: ClampedGLU | None = None
    # Layers for multi-token prediction (MTP) behind the others. `read_megatron_decoder` leaves them
    # out, as transformers does.
    mtp_layers: int = 0
    hf: Mapping[str, Any] = field(default_factory=dict)  # content of config.json

    def _check_experts(self) -> None:
        if not 0 < self.experts_per_token <= self.n_experts or self.expert_intermediate_size < 1:
            raise ModelError(
                f"experts_per_token={self.experts_per_token} of n_experts={self.n_experts} with "
                f"expert_intermediate_size={self.expert_intermediate_size} is no mixture of experts"
            )
        if self.n_experts % self.n_expert_groups:
            raise ModelError(
                f"n_group={self.n_expert_groups} doesn't divide {self.n_experts} experts"
            )

    def to_hf(self) -> dict[str, Any]:
        eos = self.eos_ids[0] if len(self.eos_ids) == 1 else list(self.eos_ids) or None
        return {**self.hf, "bos_token_id": self.bos_id, "eos_token_id": eos}


def read_megatron_decoder(
    hf: Mapping[str, Any], generation: Mapping[str, Any] | None = None
) -> MegatronDecoderConfig | None:
    """Return the shape that a `config.json` describes; None if Megatron has no layers for it.

    generation: content of `generation_config.json`; its end-of-sequence ids take precedence.
    """
    if explain_missing_layers(hf) is not None:
        return None
    family = str(hf["model_type"])
    facts = FAMILY_FACTS[family]
    heads = hf["num_attention_heads"]
    head_dim = hf.get("head_dim") or facts.head_dim or hf["hidden_size"] // heads
    rope = _read_rope(hf)
    rotated = rope.pop("partial_rotary_factor", hf.get("partial_rotary_factor"))
    rotated = facts.rotated_share if rotated is None else rotated
    bos = hf.get("bos_token_id")
    fields = {
        "head_dim": head_dim,
        "rotary_dim": int(head_dim * rotated),
        "intermediate_size": hf["intermediate_size"],
        "expert_intermediate_size": hf[facts.expert_width_key],
        **read_family_fields(hf),
    }
    return MegatronDecoderConfig(
        vocab_size=hf["vocab_size"],
        hidden_size=hf["hidden_size"],
        n_layers=hf["num_hidden_layers"],
        n_heads=heads,
        n_kv_heads=hf.get("num_key_value_heads") or heads,
        max_positions=hf.get("max_position_embeddings", facts.max_positions),
        family=family,
        tied=bool(hf.get("tie_word_embeddings", False)),
        norm_eps=hf.get("rms_norm_eps", facts.norm_eps),
        rope=rope,
        bos_id=None if bos is None else int(bos),
        eos_ids=read_ids((generation or {}).get("eos_token_id"))
        or read_ids(hf.get("eos_token_id")),
        n_experts=hf[facts.expert_count_key],
        experts_per_token=hf["num_experts_per_tok"],
        hf=hf,
        generation=generation or {},
        **fields,
    )


def explain_missing_layers(hf: Mapping[str, Any]) -> str | None:
    """Return why Megatron has no layers for a model of FAMILY_FACTS; None if it has."""
    family = str(hf.get("model_type"))
    if family not in FAMILY_FACTS:
        return f"its model_type is '{family:.80}'"
    keys = (*REQUIRED_KEYS[family], "num_experts_per_tok")
    if missing := [key for key in keys if hf.get(key) is None]:
        return f"its config.json says nothing about {', '.join(missing)}"
    if hf.get("quantization_config") is not None:
        return "its weights are quantized (quantization_config)"
    if hf.get("hidden_act", "silu") not in SILU:
        return f"hidden_act '{hf['hidden_act']}' is not silu"
    if hf.get("use_sliding_window"):
        return "it has sliding windows (use_sliding_window)"
    takes_bias = FAMILY_FACTS[family].attention_bias
    if takes_bias is not None and bool(hf.get("attention_bias", takes_bias)) != takes_bias:
        return f"Megatron's layers of {family} need attention_bias={str(takes_bias).lower()}"
    rope = _read_rope(hf)
    rope.pop("partial_rotary_factor", None)
    return explain_rope({"rope_parameters": rope})


def _read_rope(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return `rope_parameters` in the form of transformers 5."""
    facts = FAMILY_FACTS[str(hf["model_type"])]
    rope = dict(hf.get("rope_parameters") or hf.get("rope_scaling") or facts.rope)
    rope.setdefault("rope_type", rope.pop("type", "default"))
    rope.setdefault("rope_theta", hf.get("rope_theta", facts.rope_theta))
    if ORIGINAL_CONTEXT in ROPE_KEYS.get(rope["rope_type"], ()):
        rope[ORIGINAL_CONTEXT] = read_original_context(hf, rope, facts.max_positions)
    return rope


def read_family_fields(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `MegatronDecoderConfig` that each family has under keys of its own."""
    return FAMILY_FACTS[str(hf["model_type"])].read_fields(hf)


def _read_qwen2_moe(hf: Mapping[str, Any]) -> dict[str, Any]:
    dense, step = hf.get("mlp_only_layers") or (), hf.get("decoder_sparse_step", 1)
    layers = range(hf["num_hidden_layers"])
    return {
        "qk_norm": False,
        "qkv_bias": bool(hf.get("qkv_bias", True)),
        "renormalise": bool(hf.get("norm_topk_prob", False)),
        "dense_layers": tuple(n for n in layers if n in dense or (n + 1) % step),
        "shared_intermediate_size": hf["shared_expert_intermediate_size"],
        "has_shared_gate": True,
    }


def _read_grouped_experts(hf: Mapping[str, Any], first_dense: int) -> dict[str, Any]:
    """Return the fields of experts that GLM-4-MoE and DeepSeek-V3 have in common.

    first_dense: how many layers have no experts where `config.json` does not say it.
    """
    n_dense = min(hf.get("first_k_dense_replace", first_dense), hf["num_hidden_layers"])
    return {
        "renormalise": bool(hf.get("norm_topk_prob", True)),
        "dense_layers": tuple(range(n_dense)),
        "shared_intermediate_size": hf["moe_intermediate_size"] * hf.get("n_shared_experts", 1),
        "has_sigmoid_router": True,
    }


def _read_glm4_moe(hf: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "qk_norm": bool(hf.get("use_qk_norm", False)),
        "qkv_bias": bool(hf.get("attention_bias", False)),
        **_read_grouped_experts(hf, first_dense=1),
        "n_expert_groups": hf.get("n_group", 1),
        "groups_per_token": hf.get("topk_group", 1),
        "routed_scale": float(hf.get("routed_scaling_factor", 1.0)),
    }


def _read_gpt_oss(hf: Mapping[str, Any]) -> dict[str, Any]:
    layers = range(hf["num_hidden_layers"])
    # Without the key, every second layer has a window, from the first on.
    kinds = hf.get("layer_types") or [
        "full_attention" if layer % 2 else "sliding_attention" for layer in layers
    ]
    window = hf.get("sliding_window", 128)
    windowed = tuple(layer for layer in layers if kinds[layer] == "sliding_attention")
    return {
        "qk_norm": False,
        "qkv_bias": True,
        "out_bias": True,
        "sinks": SinkAttentionShape(window or 0, windowed if window else ()),
        "clamped_glu": ClampedGLU(hf.get("swiglu_limit", 7.0), hf.get("swiglu_alpha", 1.702)),
    }


def _read_deepseek_v3(hf: Mapping[str, Any]) -> dict[str, Any]:
    plain, rotated = hf["qk_nope_head_dim"], hf["qk_rope_head_dim"]
    latent = LatentHeads(
        q_rank=hf.get("q_lora_rank", 1536) or 0,
        kv_rank=hf["kv_lora_rank"],
        plain_dim=plain,
        value_dim=hf["v_head_dim"],
        is_interleaved=bool(hf.get("rope_interleave", True)),
        query_scale=_compute_query_scale(_read_rope(hf)),
    )
    return {
        "qk_norm": False,
        "head_dim": plain + rotated,
        "rotary_dim": rotated,
        **_read_grouped_experts(hf, first_dense=3),
        "n_expert_groups": hf.get("n_group", 8),
        "groups_per_token": hf.get("topk_group", 4),
        "routed_scale": float(hf.get("routed_scaling_factor", 2.5)),
        "latent": latent,
    }


def _compute_query_scale(rope: Mapping[str, Any]) -> float:
    """Return the factor of DeepSeek's queries, by which YaRN sharpens attention.

    YaRN (arXiv:2309.00071, section 3.4) scales queries and keys; DeepSeek has both in one factor.
    """
    if rope["rope_type"] == "default" or not rope.get("mscale_all_dim") or rope["factor"] <= 1:
        return 1.0
    return (0.1 * rope["mscale_all_dim"] * math.log(rope["factor"]) + 1.0) ** 2


class FamilyFacts(NamedTuple):
    """The keys of a family's config.json, and what transformers 5.19 takes where they lack."""

    read_fields: Callable[[Mapping[str, Any]], dict[str, Any]]
    expert_count_key: str
    norm_eps: float
    max_positions: int
    expert_width_key: str = "moe_intermediate_size"
    head_dim: int | None = None  # None: hidden_size / heads
    rotated_share: float = 1.0  # share of a head's dimensions that are rotated
    rope_theta: float = 10000.0
    rope: Mapping[str, Any] = {}
    attention_bias: bool | None = None  # the only value that Megatron's layers take; None: any


FAMILY_FACTS: Mapping[str, FamilyFacts] = {
    "qwen2_moe": FamilyFacts(_read_qwen2_moe, "num_experts", 1e-6, 32768),
    "glm4_moe": FamilyFacts(_read_glm4_moe, "n_routed_experts", 1e-5, 131072, rotated_share=0.5),
    "gpt_oss": FamilyFacts(
        _read_gpt_oss,
        "num_local_experts",
        1e-5,
        131072,
        expert_width_key="intermediate_size",
        head_dim=64,
        rope_theta=150000.0,
        rope={
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            ORIGINAL_CONTEXT: 4096,
        },
        attention_bias=True,
    ),
    "deepseek_v3": FamilyFacts(
        _read_deepseek_v3, "n_routed_experts", 1e-6, 4096, attention_bias=False
    ),
}
