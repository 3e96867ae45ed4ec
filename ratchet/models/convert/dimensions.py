"""Read the sizes used in the conversion tables from a Hugging Face `config.json`.

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ratchet.config.model_shape.decoder_config import FAMILIES, DecoderConfig
from ratchet.errors import ModelError

DEEPSEEK = "deepseek_v3"
LATENT_KEYS = (
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "n_routed_experts",
    "moe_intermediate_size",
)
REQUIRED_KEYS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    *LATENT_KEYS,
)


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
    tied: bool = False  # True if the head is the embedding
    # rows of Megatron's embedding over all ranks, including padding; 0: not set
    padded_vocabulary: int = 0

    def size(self, name: str) -> int:
        """Return the size in the field `name`."""
        return getattr(self, name)

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
        if family == DEEPSEEK:
            return _from_deepseek(hf)
        if family not in FAMILIES:
            families = ", ".join((*FAMILIES, DEEPSEEK))
            raise ModelError(
                f"model_type '{family}' can't be converted to Megatron: use a model of {families}"
            )
        return cls.from_config(DecoderConfig.from_hf(hf))

    @classmethod
    def from_config(cls, config: DecoderConfig) -> Dimensions:
        """Return the sizes of a built-in decoder.

        Raises ModelError if it has biases that Megatron can't represent.
        """
        if config.out_bias or config.mlp_bias:
            key = "attention_bias" if config.out_bias else "mlp_bias"
            raise ModelError(
                f"Megatron has no biases in the attention's output projection or in MLPs: {key} "
                "must be false"
            )
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
            experts=config.n_experts,
            expert_width=config.expert_intermediate_size,
            dense_layers=config.dense_layers,
            tied=config.tied,
        )


def _from_deepseek(hf: Mapping[str, Any]) -> Dimensions:
    if missing := [key for key in REQUIRED_KEYS if hf.get(key) is None]:
        raise ModelError(f"the config.json of this {DEEPSEEK} model lacks {', '.join(missing)}")
    if hf.get("quantization_config") is not None:
        raise ModelError(
            f"the weights of this {DEEPSEEK} model are quantized (quantization_config): convert a "
            "checkpoint in bfloat16 or float32"
        )
    if hf.get("attention_bias"):
        raise ModelError("Megatron's MLA has no biases: attention_bias must be false")
    heads = hf["num_attention_heads"]
    layers = hf["num_hidden_layers"]
    rope = hf["qk_rope_head_dim"]
    n_dense = min(hf.get("first_k_dense_replace", 3), layers)
    return Dimensions(
        family=DEEPSEEK,
        layers=layers,
        heads=heads,
        kv_heads=heads,
        vocabulary=hf["vocab_size"],
        hidden=hf["hidden_size"],
        width=hf["intermediate_size"],
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
        tied=bool(hf.get("tie_word_embeddings", False)),
    )
