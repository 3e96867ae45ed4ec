"""Read the sizes used in the conversion tables from a Hugging Face `config.json`.

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ratchet.config.model_shape.decoder_config import FAMILIES, DecoderConfig
from ratchet.config.model_shape.megatron_decoder import (
    FAMILY_FACTS,
    REQUIRED_KEYS,
    MegatronDecoderConfig,
    read_family_fields,
)
from ratchet.errors import ModelError

# What Megatron Core 0.16 lacks for a family, by `model_type`.
GEMMA_2 = (
    "Megatron Core 0.16 has no norms behind attention and MLP, no scaled embeddings and no soft "
    "caps of logits"
)
GEMMA_3 = (
    "Megatron Core 0.16 has no norms behind attention and MLP, no scaled embeddings and no rotary "
    "embedding that differs between layers"
)
LACKS: Mapping[str, str] = {
    "gemma2": GEMMA_2,
    "gemma3": GEMMA_3,
    "gemma3_text": GEMMA_3,
    "qwen3_next": "Megatron Core 0.16 runs its gated delta layers only with fla's CUDA kernels",
}
# The families whose files may have layers for multi-token prediction (MTP).
MTP_FAMILIES = ("deepseek_v3", "glm4_moe")


@dataclass(frozen=True)
class Dimensions:
    """The sizes of a model's weights. Sizes that a family does not have are 0."""

    family: str
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    hidden: int
    width: int  # intermediate size of the MLP
    queries: int  # rows of the query matrix, for all heads
    keys: int = 0  # rows of the key matrix, for all heads
    head: int = 0  # size of one head
    qkv_bias: bool = False  # True if the query, key and value matrices have biases
    out_bias: bool = False  # True if the attention's output projection has a bias
    mlp_bias: bool = False  # True if the matrices of MLPs without experts have biases
    has_sinks: bool = False  # True if each head has an attention sink
    qk_norm: bool = False  # True if the queries and keys of each head are normalised
    # DeepSeek's multi-head latent attention (MLA):
    values: int = 0  # columns of the output projection
    keys_values: int = 0  # rows of the matrix from latent states to keys and values
    latent_keys: int = 0  # rows of the matrix to latent keys and values, with the rotary key
    q_rank: int = 0  # size of the latent queries; 0: queries are not compressed
    kv_rank: int = 0  # size of the latent keys and values
    experts: int = 0  # number of experts of a layer
    expert_width: int = 0  # intermediate size of an expert
    shared_width: int = 0  # intermediate size of the shared experts together
    dense_layers: tuple[int, ...] = ()  # indices of layers without experts
    has_packed_experts: bool = False  # True if files have experts as in `packed_experts`
    tied: bool = False  # True if the head is the embedding
    # rows of Megatron's embedding over all ranks, including padding; 0: not set
    padded_vocabulary: int = 0
    # layers for multi-token prediction (MTP), behind the others; 0 unless the caller sets it, see
    # `find_mtp_layers`
    mtp_layers: int = 0

    @property
    def double_hidden(self) -> int:
        """Return the columns of `eh_proj`: those of an embedding, then of a hidden state."""
        return 2 * self.hidden

    def size(self, name: str) -> int:
        """Return the size in the field `name`, or the number that `name` spells."""
        return int(name) if name.isdigit() else getattr(self, name)

    def padded_size(self, name: str) -> int:
        """Return the size in the field `name`; for "vocabulary", the size with its padding."""
        return (
            max(self.padded_vocabulary, self.vocabulary)
            if name == "vocabulary"
            else self.size(name)
        )

    def is_sparse(self, layer: int) -> bool:
        """True if the layer has experts."""
        return self.experts > 0 and layer not in self.dense_layers

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Dimensions:
        """Return the sizes of the model that a `config.json` describes.

        Raises ModelError if its weights can't be mapped to Megatron.
        """
        family = str(hf.get("model_type"))
        if family in READERS:
            _check_config(family, hf)
            return READERS[family](hf)
        if family in FAMILIES:
            return cls.from_config(DecoderConfig.from_hf(hf))
        if family in LACKS:
            raise ModelError(
                f"model_type '{family}' can't be converted to Megatron: {LACKS[family]}. Train it "
                "by learner.kind=dtensor, which needs no conversion."
            )
        families = ", ".join((*FAMILIES, *READERS))
        raise ModelError(
            f"model_type '{family}' can't be converted to Megatron: use a model of {families}"
        )

    @classmethod
    def from_config(cls, config: DecoderConfig) -> Dimensions:
        """Return the sizes of a decoder of the learner."""
        if isinstance(config, MegatronDecoderConfig):
            return replace(cls.from_hf(config.hf), mtp_layers=config.mtp_layers)
        return cls(
            family=config.family,
            layers=config.n_layers,
            heads=config.n_heads,
            kv_heads=config.n_kv_heads,
            vocabulary=config.vocab_size,
            hidden=config.hidden_size,
            width=config.intermediate_size,
            queries=config.n_heads * config.head_dim,
            keys=config.n_kv_heads * config.head_dim,
            head=config.head_dim,
            qkv_bias=config.qkv_bias,
            out_bias=config.out_bias,
            mlp_bias=config.mlp_bias,
            qk_norm=config.qk_norm,
            experts=config.n_experts,
            expert_width=config.expert_intermediate_size,
            dense_layers=config.dense_layers,
            tied=config.tied,
        )


def count_mtp_layers(hf: Mapping[str, Any]) -> int:
    """Return the number of MTP layers in a `config.json`; 0 for families without a map of them."""
    is_mapped = hf.get("model_type") in MTP_FAMILIES
    return int(hf.get("num_nextn_predict_layers") or 0) if is_mapped else 0


def find_mtp_layers(hf: Mapping[str, Any], names: Iterable[str]) -> int:
    """Return the number of MTP layers of stored weights.

    It is that of `config.json`, or 0 if the weights have none: transformers neither reads nor
    writes these layers, and still counts them in the `config.json` that it writes.

    Args:
        names: The names of the weights, or of a Megatron checkpoint's tensors.
    """
    prefixes = (f"model.layers.{hf.get('num_hidden_layers')}.", "mtp.layers.")
    return count_mtp_layers(hf) if any(name.startswith(prefixes) for name in names) else 0


def _check_config(family: str, hf: Mapping[str, Any]) -> None:
    """Raise ModelError unless a config.json has all sizes, and the weights are not quantized."""
    if missing := [key for key in REQUIRED_KEYS[family] if hf.get(key) is None]:
        raise ModelError(f"the config.json of this {family} model lacks {', '.join(missing)}")
    if hf.get("quantization_config") is not None:
        raise ModelError(
            f"the weights of this {family} model are quantized (quantization_config): convert a "
            "checkpoint in bfloat16 or float32"
        )


def _read_sizes(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sizes that all families have under the same keys."""
    return {
        "family": hf["model_type"],
        "layers": hf["num_hidden_layers"],
        "heads": hf["num_attention_heads"],
        "vocabulary": hf["vocab_size"],
        "hidden": hf["hidden_size"],
        "width": hf["intermediate_size"],
        "tied": bool(hf.get("tie_word_embeddings", False)),
    }


def _read_grouped_heads(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sizes of grouped-query attention."""
    heads, kv_heads = hf["num_attention_heads"], hf["num_key_value_heads"]
    head = hf.get("head_dim") or hf["hidden_size"] // heads
    return {"kv_heads": kv_heads, "head": head, "queries": heads * head, "keys": kv_heads * head}


def _from_megatron_decoder(hf: Mapping[str, Any]) -> Dimensions:
    fields = read_family_fields(hf)
    return Dimensions(
        **_read_sizes(hf),
        **_read_grouped_heads(hf),
        qkv_bias=fields["qkv_bias"],
        qk_norm=fields["qk_norm"],
        experts=hf[FAMILY_FACTS[hf["model_type"]].expert_count_key],
        expert_width=hf["moe_intermediate_size"],
        shared_width=fields["shared_intermediate_size"],
        dense_layers=fields["dense_layers"],
    )


def _from_gpt_oss(hf: Mapping[str, Any]) -> Dimensions:
    if not hf.get("attention_bias", True):
        raise ModelError(
            "Megatron has biases in all linear layers, or in none: attention_bias of a gpt_oss "
            "model, whose experts have biases, must be true"
        )
    return Dimensions(
        **_read_sizes(hf),
        **_read_grouped_heads(hf),
        qkv_bias=True,
        out_bias=True,
        has_sinks=True,
        experts=hf["num_local_experts"],
        expert_width=hf["intermediate_size"],
        has_packed_experts=True,
    )


def _from_deepseek(hf: Mapping[str, Any]) -> Dimensions:
    if hf.get("attention_bias"):
        raise ModelError("Megatron's MLA has no biases: attention_bias must be false")
    heads = hf["num_attention_heads"]
    rope = hf["qk_rope_head_dim"]
    n_dense = min(hf.get("first_k_dense_replace", 3), hf["num_hidden_layers"])
    return Dimensions(
        **_read_sizes(hf),
        kv_heads=heads,
        queries=heads * (hf["qk_nope_head_dim"] + rope),
        values=heads * hf["v_head_dim"],
        keys_values=heads * (hf["qk_nope_head_dim"] + hf["v_head_dim"]),
        latent_keys=hf["kv_lora_rank"] + rope,
        q_rank=hf.get("q_lora_rank") or 0,
        kv_rank=hf["kv_lora_rank"],
        experts=hf["n_routed_experts"],
        expert_width=hf["moe_intermediate_size"],
        shared_width=hf["moe_intermediate_size"] * hf.get("n_shared_experts", 1),
        dense_layers=tuple(range(n_dense)),
    )


# The functions that read the sizes of families that the built-in decoder lacks.
READERS: Mapping[str, Callable[[Mapping[str, Any]], Dimensions]] = {
    "qwen2_moe": _from_megatron_decoder,
    "glm4_moe": _from_megatron_decoder,
    "gpt_oss": _from_gpt_oss,
    "deepseek_v3": _from_deepseek,
}
