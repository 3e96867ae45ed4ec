"""Tables of the Hugging Face weights in each Megatron Core 0.16 parameter.

A key is the name of a Megatron parameter, relative to its layer. The value lists the Hugging Face
weights in the parameter, and how tensor parallelism divides it. Both directions of the conversion
use these tables.

The names are those of Megatron's own ("local") layers. `FUSED`, `GROUPED` and `DUPLICATED` list
what differs in Transformer Engine's layers.
"""

from __future__ import annotations

from collections.abc import Mapping

from ratchet.models.convert.dimensions import Dimensions
from ratchet.models.convert.rules import Rule, columns, groups, rows, whole

Rules = Mapping[str, Rule]

EMBEDDING = {
    "embedding.word_embeddings.weight": rows("model.embed_tokens.weight [vocabulary, hidden]")
}
FINAL_NORM = {"decoder.final_layernorm.weight": whole("model.norm.weight [hidden]")}
HEAD = {"output_layer.weight": rows("lm_head.weight [vocabulary, hidden]")}
# On a pipeline stage without the embedding, a tied head is a copy of the embedding.
TIED_HEAD = {"output_layer.weight": EMBEDDING["embedding.word_embeddings.weight"]}

NORMS = {
    "input_layernorm.weight": whole("input_layernorm.weight [hidden]"),
    "pre_mlp_layernorm.weight": whole("post_attention_layernorm.weight [hidden]"),
}
ATTENTION = {
    "self_attention.linear_qkv.weight": groups(
        "self_attn.q_proj.weight [queries, hidden]",
        "self_attn.k_proj.weight [keys, hidden]",
        "self_attn.v_proj.weight [keys, hidden]",
    ),
    "self_attention.linear_proj.weight": columns("self_attn.o_proj.weight [hidden, queries]"),
}
QKV_BIAS = {
    "self_attention.linear_qkv.bias": groups(
        "self_attn.q_proj.bias [queries]",
        "self_attn.k_proj.bias [keys]",
        "self_attn.v_proj.bias [keys]",
    ),
}
OUT_BIAS = {"self_attention.linear_proj.bias": whole("self_attn.o_proj.bias [hidden]")}
SINKS = {"self_attention.core_attention.softmax_offset": rows("self_attn.sinks [heads]")}
QK_NORM = {
    "self_attention.q_layernorm.weight": whole("self_attn.q_norm.weight [head]"),
    "self_attention.k_layernorm.weight": whole("self_attn.k_norm.weight [head]"),
}
LATENT_ATTENTION = {  # DeepSeek's MLA (arXiv:2405.04434)
    "self_attention.linear_kv_down_proj.weight": rows(
        "self_attn.kv_a_proj_with_mqa.weight [latent_keys, hidden]"
    ),
    "self_attention.kv_layernorm.weight": whole("self_attn.kv_a_layernorm.weight [kv_rank]"),
    "self_attention.linear_kv_up_proj.weight": rows(
        "self_attn.kv_b_proj.weight [keys_values, kv_rank]"
    ),
    "self_attention.linear_proj.weight": columns("self_attn.o_proj.weight [hidden, values]"),
}
LATENT_QUERIES = {
    "self_attention.linear_q_down_proj.weight": rows("self_attn.q_a_proj.weight [q_rank, hidden]"),
    "self_attention.q_layernorm.weight": whole("self_attn.q_a_layernorm.weight [q_rank]"),
    "self_attention.linear_q_up_proj.weight": rows("self_attn.q_b_proj.weight [queries, q_rank]"),
}
FULL_QUERIES = {
    "self_attention.linear_q_proj.weight": rows("self_attn.q_proj.weight [queries, hidden]")
}

MLP = {
    "mlp.linear_fc1.weight": rows(
        "mlp.gate_proj.weight [width, hidden]", "mlp.up_proj.weight [width, hidden]"
    ),
    "mlp.linear_fc2.weight": columns("mlp.down_proj.weight [hidden, width]"),
}
MLP_BIAS = {
    "mlp.linear_fc1.bias": rows("mlp.gate_proj.bias [width]", "mlp.up_proj.bias [width]"),
    "mlp.linear_fc2.bias": whole("mlp.down_proj.bias [hidden]"),
}
EXPERTS = {
    "mlp.router.weight": whole("mlp.gate.weight [experts, hidden]"),
    "mlp.experts.local_experts.{expert}.linear_fc1.weight": rows(
        "mlp.experts.{expert}.gate_proj.weight [expert_width, hidden]",
        "mlp.experts.{expert}.up_proj.weight [expert_width, hidden]",
    ),
    "mlp.experts.local_experts.{expert}.linear_fc2.weight": columns(
        "mlp.experts.{expert}.down_proj.weight [hidden, expert_width]"
    ),
}
MIXTRAL_EXPERTS = {
    "mlp.router.weight": whole("block_sparse_moe.gate.weight [experts, hidden]"),
    "mlp.experts.local_experts.{expert}.linear_fc1.weight": rows(
        "block_sparse_moe.experts.{expert}.w1.weight [expert_width, hidden]",
        "block_sparse_moe.experts.{expert}.w3.weight [expert_width, hidden]",
    ),
    "mlp.experts.local_experts.{expert}.linear_fc2.weight": columns(
        "block_sparse_moe.experts.{expert}.w2.weight [hidden, expert_width]"
    ),
}
ROUTER_BIAS = {"mlp.router.expert_bias": whole("mlp.gate.e_score_correction_bias [experts]")}
SHARED_EXPERTS = {
    "mlp.shared_experts.linear_fc1.weight": rows(
        "mlp.shared_experts.gate_proj.weight [shared_width, hidden]",
        "mlp.shared_experts.up_proj.weight [shared_width, hidden]",
    ),
    "mlp.shared_experts.linear_fc2.weight": columns(
        "mlp.shared_experts.down_proj.weight [hidden, shared_width]"
    ),
}
GATED_SHARED_EXPERT = {  # Qwen2-MoE
    "mlp.shared_experts.gate_weight": whole("mlp.shared_expert_gate.weight [1, hidden]"),
    "mlp.shared_experts.linear_fc1.weight": rows(
        "mlp.shared_expert.gate_proj.weight [shared_width, hidden]",
        "mlp.shared_expert.up_proj.weight [shared_width, hidden]",
    ),
    "mlp.shared_experts.linear_fc2.weight": columns(
        "mlp.shared_expert.down_proj.weight [hidden, shared_width]"
    ),
}
GPT_OSS_EXPERTS = {  # The names of experts are those of `packed_experts`.
    **EXPERTS,
    "mlp.router.weight": whole("mlp.router.weight [experts, hidden]"),
    "mlp.router.bias": whole("mlp.router.bias [experts]"),
    "mlp.experts.local_experts.{expert}.linear_fc1.bias": rows(
        "mlp.experts.{expert}.gate_proj.bias [expert_width]",
        "mlp.experts.{expert}.up_proj.bias [expert_width]",
    ),
    "mlp.experts.local_experts.{expert}.linear_fc2.bias": whole(
        "mlp.experts.{expert}.down_proj.bias [hidden]"
    ),
}
# The rules of the MLPs of layers with experts, by model family.
SPARSE_MLPS: Mapping[str, Rules] = {
    "qwen3_moe": EXPERTS,
    "mixtral": MIXTRAL_EXPERTS,
    "qwen2_moe": EXPERTS | GATED_SHARED_EXPERT,
    "glm4_moe": EXPERTS | ROUTER_BIAS | SHARED_EXPERTS,
    "gpt_oss": GPT_OSS_EXPERTS,
    "deepseek_v3": EXPERTS | ROUTER_BIAS | SHARED_EXPERTS,
}


# What a layer for multi-token prediction (MTP, DeepSeek-V3, arXiv:2412.19437, section 2.2) has
# beside an ordinary layer, which Megatron names `transformer_layer`. Both sides multiply `eh_proj`
# by the embedding and the hidden state in this order, the reverse of equation 21.
MTP_LAYER = {
    "enorm.weight": whole("enorm.weight [hidden]"),
    "hnorm.weight": whole("hnorm.weight [hidden]"),
    "eh_proj.weight": rows("eh_proj.weight [hidden, double_hidden]"),
    "final_layernorm.weight": whole("shared_head.norm.weight [hidden]"),
}
# Weights of an MTP layer in Hugging Face's files that are copies of the embedding and of the head.
MTP_EMBEDDING, MTP_HEAD = "embed_tokens.weight", "shared_head.head.weight"


def list_mtp_copies(dimensions: Dimensions) -> dict[str, str]:
    """Return the weight that each weight of MTP layers is a copy of."""
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    copies: dict[str, str] = {}
    for layer in range(dimensions.layers, dimensions.layers + dimensions.mtp_layers):
        copies[f"model.layers.{layer}.{MTP_EMBEDDING}"] = embedding
        copies[f"model.layers.{layer}.{MTP_HEAD}"] = embedding if dimensions.tied else head
    return copies


def find_layer_rules(dimensions: Dimensions, layer: int) -> Rules:
    """Return the rules of a model's layer, counted from 0."""
    rules: dict[str, Rule] = {**NORMS}
    if dimensions.kv_rank:
        rules |= LATENT_ATTENTION
        rules |= LATENT_QUERIES if dimensions.q_rank else FULL_QUERIES
    else:
        rules |= ATTENTION
    is_sparse = dimensions.is_sparse(layer)
    rules |= SPARSE_MLPS[dimensions.family] if is_sparse else MLP
    for is_there, part in (
        (dimensions.qkv_bias, QKV_BIAS),
        (dimensions.out_bias, OUT_BIAS),
        (dimensions.qk_norm, QK_NORM),
        (dimensions.has_sinks, SINKS),
        (dimensions.mlp_bias and not is_sparse, MLP_BIAS),
    ):
        rules |= part if is_there else {}
    return rules


# Transformer Engine fuses these norms with the linear layer after them (norm -> linear layer).
FUSED: Mapping[str, str] = {
    "input_layernorm.weight": "self_attention.linear_qkv",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1",
    "self_attention.q_layernorm.weight": "self_attention.linear_q_up_proj",
    "self_attention.kv_layernorm.weight": "self_attention.linear_kv_up_proj",
}
# Transformer Engine has all experts of a layer in one module.
GROUPED: Mapping[str, str] = {
    "mlp.experts.local_experts.{expert}.linear_fc1.weight": "mlp.experts.linear_fc1.weight{expert}",
    "mlp.experts.local_experts.{expert}.linear_fc1.bias": "mlp.experts.linear_fc1.bias{expert}",
    "mlp.experts.local_experts.{expert}.linear_fc2.weight": "mlp.experts.linear_fc2.weight{expert}",
    "mlp.experts.local_experts.{expert}.linear_fc2.bias": "mlp.experts.linear_fc2.bias{expert}",
}
# Transformer Engine does not divide these projections to MLA's latent states: each tensor-parallel
# rank holds the whole matrix.
DUPLICATED = (
    "self_attention.linear_q_down_proj.weight",
    "self_attention.linear_kv_down_proj.weight",
)
