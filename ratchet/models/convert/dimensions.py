"""How large everything is that the tables name, from a Hugging Face `config.json`. Free of
torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ratchet.errors import ModelError
from ratchet.models.config import FAMILIES, DecoderConfig

DEEPSEEK = "deepseek_v3"
LATENT = (
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "n_routed_experts",
    "moe_intermediate_size",
)
REQUIRED = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    *LATENT,
)


@dataclass(frozen=True)
class Dimensions:
    """Of the weights of a model. Sizes that a family does not have are 0.

    queries, keys, values: rows of the matrices that make those of all heads. head: size of one.
    keys_values, latent_keys, q_rank, kv_rank: of MLA. dense_layers: those without experts. padded:
    rows of the vocabulary in Megatron, on all ranks together, where these are more than the tokens.
    """

    family: str
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    hidden: int
    width: int
    queries: int
    keys: int = 0
    head: int = 0
    values: int = 0
    keys_values: int = 0
    latent_keys: int = 0
    q_rank: int = 0
    kv_rank: int = 0
    experts: int = 0
    expert_width: int = 0
    shared_width: int = 0
    dense_layers: tuple[int, ...] = ()
    tied: bool = False
    padded: int = 0

    def size(self, word: str) -> int:
        return getattr(self, word)

    def divided(self, word: str) -> int:
        """As many are divided over ranks, those that pad included."""
        return max(self.padded, self.vocabulary) if word == "vocabulary" else self.size(word)

    def sparse(self, layer: int) -> bool:
        return self.experts > 0 and layer not in self.dense_layers

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Dimensions:
        """Raises ModelError where there is no map for the architecture, naming those that there
        are."""
        family = str(hf.get("model_type"))
        if family == DEEPSEEK:
            return _of_deepseek(hf)
        if family not in FAMILIES:
            known = ", ".join((*FAMILIES, DEEPSEEK))
            raise ModelError(
                f"there is no map to Megatron for model_type '{family}': convert one of {known}"
            )
        return cls.of(DecoderConfig.from_hf(hf))

    @classmethod
    def of(cls, config: DecoderConfig) -> Dimensions:
        if config.out_bias or config.mlp_bias:
            key = "attention_bias" if config.out_bias else "mlp_bias"
            raise ModelError(
                f"Megatron has no place for biases behind the heads or in the MLPs alone: {key} "
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


def _of_deepseek(hf: Mapping[str, Any]) -> Dimensions:
    if missing := [key for key in REQUIRED if hf.get(key) is None]:
        raise ModelError(f"this {DEEPSEEK} config.json says nothing about {', '.join(missing)}")
    if hf.get("quantization_config") is not None:
        raise ModelError(
            "its weights are quantized (quantization_config): convert a checkpoint in bfloat16 or "
            "float32"
        )
    if hf.get("attention_bias"):
        raise ModelError("Megatron's MLA has no place for biases: attention_bias must be false")
    heads, layers, rope = hf["num_attention_heads"], hf["num_hidden_layers"], hf["qk_rope_head_dim"]
    first = min(hf.get("first_k_dense_replace", 3), layers)
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
        dense_layers=tuple(range(first)),
        tied=bool(hf.get("tie_word_embeddings", False)),
    )
