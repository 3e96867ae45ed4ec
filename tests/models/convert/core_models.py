"""Models of families that no decoder of ours is, by the layers that Megatron-core has itself.

Without Transformer Engine these lack an attention over keys and values of two sizes, so it is
brought along."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ratchet.models import megatron as megatron  # makes Megatron ready to be imported

from megatron.core.fusions.fused_bias_geglu import quick_gelu  # isort: skip
from megatron.core.models.gpt import GPTModel  # isort: skip
from megatron.core.models.gpt.gpt_layer_specs import (  # isort: skip
    get_gpt_decoder_block_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.transformer.transformer_config import (  # isort: skip
    MLATransformerConfig,
    TransformerConfig,
)


class CoreAttention(torch.nn.Module):
    def __init__(self, *, softmax_scale, **others):
        super().__init__()
        self.scale = softmax_scale

    def forward(self, q, k, v, mask, **others):
        """[T, 1, H, D] each, values of another D -> [T, 1, H x D]."""
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        x = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        return x.permute(2, 0, 1, 3).flatten(2)


def _grouped_heads(hf):
    return {"num_query_groups": hf["num_key_value_heads"], "kv_channels": hf["head_dim"]}


def _latent_heads(hf):
    return {
        "q_lora_rank": hf["q_lora_rank"],
        "kv_lora_rank": hf["kv_lora_rank"],
        "qk_head_dim": hf["qk_nope_head_dim"],
        "qk_pos_emb_head_dim": hf["qk_rope_head_dim"],
        "v_head_dim": hf["v_head_dim"],
        "rope_type": "rope",
        "rotary_base": hf["rope_parameters"]["rope_theta"],
        "multi_latent_attention": True,
        "qk_layernorm": True,
    }


def _grouped_experts(hf):
    """Sigmoid routers with a bias, groups of experts, and shared ones."""
    width = hf["moe_intermediate_size"]
    first = hf["first_k_dense_replace"]
    return {
        "num_moe_experts": hf["n_routed_experts"],
        "moe_ffn_hidden_size": width,
        "moe_shared_expert_intermediate_size": width * hf["n_shared_experts"],
        "moe_layer_freq": [int(layer >= first) for layer in range(hf["num_hidden_layers"])],
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_num_groups": hf["n_group"],
        "moe_router_group_topk": hf["topk_group"],
        "moe_router_topk_scaling_factor": hf["routed_scaling_factor"],
    }


def _qwen2_moe(hf):
    dense, step = hf["mlp_only_layers"], hf["decoder_sparse_step"]
    layers = range(hf["num_hidden_layers"])
    return {
        **_grouped_heads(hf),
        "add_qkv_bias": hf["qkv_bias"],
        "num_moe_experts": hf["num_experts"],
        "moe_ffn_hidden_size": hf["moe_intermediate_size"],
        "moe_shared_expert_intermediate_size": hf["shared_expert_intermediate_size"],
        "moe_shared_expert_gate": True,
        "moe_layer_freq": [int(n not in dense and not (n + 1) % step) for n in layers],
        "moe_router_pre_softmax": not hf["norm_topk_prob"],
    }


def _glm4_moe(hf):
    return {
        **_grouped_heads(hf),
        "add_qkv_bias": hf["attention_bias"],
        "qk_layernorm": hf["use_qk_norm"],
        **_grouped_experts(hf),
    }


def _gpt_oss(hf):
    windows = [int(kind == "sliding_attention") for kind in hf["layer_types"]]
    return {
        **_grouped_heads(hf),
        "add_bias_linear": True,
        "softmax_type": "learnable",
        "window_size": (hf["sliding_window"] - 1, 0),
        "window_attn_skip_freq": windows,
        "activation_func": quick_gelu,
        "activation_func_clamp_value": hf["swiglu_limit"],
        "glu_linear_offset": 1.0,
        "num_moe_experts": hf["num_local_experts"],
        "moe_ffn_hidden_size": hf["intermediate_size"],
    }


OPTIONS = {
    "qwen2_moe": _qwen2_moe,
    "glm4_moe": _glm4_moe,
    "gpt_oss": _gpt_oss,
    "deepseek_v3": lambda hf: {**_latent_heads(hf), **_grouped_experts(hf)},
}


def core_model(hf, mtp_layers=0):
    """On a single rank, with weights that are still to be filled."""
    options = OPTIONS[hf["model_type"]](hf)
    is_latent = "multi_latent_attention" in options
    defaults = {"add_bias_linear": False, "activation_func": F.silu}
    config = (MLATransformerConfig if is_latent else TransformerConfig)(
        num_layers=hf["num_hidden_layers"],
        hidden_size=hf["hidden_size"],
        ffn_hidden_size=hf["intermediate_size"],
        num_attention_heads=hf["num_attention_heads"],
        gated_linear_unit=True,
        normalization="RMSNorm",
        layernorm_epsilon=hf["rms_norm_eps"],
        attention_dropout=0.0,
        hidden_dropout=0.0,
        moe_router_topk=hf["num_experts_per_tok"],
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="alltoall",
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
        use_cpu_initialization=True,
        mtp_num_layers=mtp_layers or None,
        **{**defaults, **options},
    )
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    if is_latent:
        for layer in spec.layer_specs:
            layer.submodules.self_attention.submodules.core_attention = CoreAttention
    mtp_spec = None
    if mtp_layers:
        mtp_spec = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False)
    rope = hf["rope_parameters"]
    return GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=hf["vocab_size"],
        max_sequence_length=128,
        position_embedding_type="rope",
        rotary_base=rope["rope_theta"],
        rotary_percent=rope.get("partial_rotary_factor", 1.0),
        share_embeddings_and_output_weights=hf["tie_word_embeddings"],
        mtp_block_spec=mtp_spec,
    ).eval()
