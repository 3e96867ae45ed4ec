"""The shape of decoders that Megatron Core runs, and the built-in decoder does not.

These are Qwen2-MoE and GLM-4-MoE: they have shared experts, which compute every token. This module
does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ratchet.config.model_shape.decoder_config import (
    SILU,
    DecoderConfig,
    explain_rope,
    read_ids,
)
from ratchet.errors import ModelError

QWEN2_MOE, GLM4_MOE = "qwen2_moe", "glm4_moe"
EXPERT_COUNT_KEYS = {QWEN2_MOE: "num_experts", GLM4_MOE: "n_routed_experts"}


class Defaults(NamedTuple):
    """Holds the values that transformers 5.19 takes where a config.json lacks the key."""

    rotated_share: float  # share of a head's dimensions that are rotated
    norm_eps: float
    max_positions: int


DEFAULTS = {QWEN2_MOE: Defaults(1.0, 1e-6, 32768), GLM4_MOE: Defaults(0.5, 1e-5, 131072)}


@dataclass(frozen=True)
class MegatronDecoderConfig(DecoderConfig):
    """The shape of a decoder with shared experts."""

    shared_intermediate_size: int = 0  # of the shared experts together
    has_shared_gate: bool = False  # True if a sigmoid weighs the shared experts' output
    # True if a sigmoid of each logit weighs an expert, and a bias of each expert changes which
    # experts are chosen (DeepSeek-V3, arXiv:2412.19437, eq. 16); False: a softmax of the logits.
    has_sigmoid_router: bool = False
    n_expert_groups: int = 1  # groups of experts, of which a token uses a few
    groups_per_token: int = 1
    routed_scale: float = 1.0  # factor of the weights of routed experts
    rotary_dim: int = 0  # how many dimensions of each head are rotated
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
    family = str(hf.get("model_type"))
    if family not in EXPERT_COUNT_KEYS or hf.get("quantization_config") is not None:
        return None
    rope = dict(hf.get("rope_parameters") or hf.get("rope_scaling") or {})
    defaults = DEFAULTS[family]
    rotated = rope.pop("partial_rotary_factor", hf.get("partial_rotary_factor"))
    rotated = defaults.rotated_share if rotated is None else rotated
    rope.setdefault("rope_type", rope.pop("type", "default"))
    rope.setdefault("rope_theta", hf.get("rope_theta", 10000.0))
    if (
        hf.get("hidden_act", "silu") not in SILU
        or hf.get("use_sliding_window")
        or explain_rope({"rope_parameters": rope})
    ):
        return None
    heads = hf["num_attention_heads"]
    head_dim = hf.get("head_dim") or hf["hidden_size"] // heads
    bos = hf.get("bos_token_id")
    return MegatronDecoderConfig(
        vocab_size=hf["vocab_size"],
        hidden_size=hf["hidden_size"],
        n_layers=hf["num_hidden_layers"],
        n_heads=heads,
        n_kv_heads=hf["num_key_value_heads"],
        head_dim=head_dim,
        intermediate_size=hf["intermediate_size"],
        max_positions=hf.get("max_position_embeddings", defaults.max_positions),
        family=family,
        tied=bool(hf.get("tie_word_embeddings", False)),
        norm_eps=hf.get("rms_norm_eps", defaults.norm_eps),
        rope=rope,
        bos_id=None if bos is None else int(bos),
        eos_ids=read_ids((generation or {}).get("eos_token_id"))
        or read_ids(hf.get("eos_token_id")),
        n_experts=hf[EXPERT_COUNT_KEYS[family]],
        experts_per_token=hf["num_experts_per_tok"],
        expert_intermediate_size=hf["moe_intermediate_size"],
        rotary_dim=int(head_dim * rotated),
        hf=hf,
        **read_family_fields(hf),
    )


def read_family_fields(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `MegatronDecoderConfig` that each family has under keys of its own."""
    return _read_qwen2_moe(hf) if hf["model_type"] == QWEN2_MOE else _read_glm4_moe(hf)


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


def _read_glm4_moe(hf: Mapping[str, Any]) -> dict[str, Any]:
    n_dense = min(hf.get("first_k_dense_replace", 1), hf["num_hidden_layers"])
    return {
        "qk_norm": bool(hf.get("use_qk_norm", False)),
        "qkv_bias": bool(hf.get("attention_bias", False)),
        "renormalise": bool(hf.get("norm_topk_prob", True)),
        "dense_layers": tuple(range(n_dense)),
        "shared_intermediate_size": hf["moe_intermediate_size"] * hf.get("n_shared_experts", 1),
        "has_sigmoid_router": True,
        "n_expert_groups": hf.get("n_group", 1),
        "groups_per_token": hf.get("topk_group", 1),
        "routed_scale": float(hf.get("routed_scaling_factor", 1.0)),
    }
