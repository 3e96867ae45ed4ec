"""DeepSeek-V3 by the layers that Megatron-core has itself. Without Transformer Engine these lack an
attention over keys and values of two sizes, so it is brought along; and ask whether a layer is of a
class that is then none."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ratchet.models import megatron as megatron  # makes Megatron ready to be imported

from megatron.core.models.gpt import GPTModel  # isort: skip
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec  # isort: skip
from megatron.core.transformer import multi_latent_attention  # isort: skip
from megatron.core.transformer.transformer_config import MLATransformerConfig  # isort: skip

for name in ("TELinear", "TEColumnParallelLinear", "Linear"):
    if not isinstance(getattr(multi_latent_attention, name), type):
        setattr(multi_latent_attention, name, type(name, (), {}))


class CoreAttention(torch.nn.Module):
    def __init__(self, *, softmax_scale, **others):
        super().__init__()
        self.scale = softmax_scale

    def forward(self, q, k, v, mask, **others):
        """[T, 1, H, D] each, values of another D -> [T, 1, H x D]."""
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        x = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        return x.permute(2, 0, 1, 3).flatten(2)


def latent_model(hf):
    """On a single rank, with weights that are still to be filled."""
    layers, theta = hf["num_hidden_layers"], hf["rope_parameters"]["rope_theta"]
    config = MLATransformerConfig(
        num_layers=layers,
        hidden_size=hf["hidden_size"],
        ffn_hidden_size=hf["intermediate_size"],
        num_attention_heads=hf["num_attention_heads"],
        q_lora_rank=hf["q_lora_rank"],
        kv_lora_rank=hf["kv_lora_rank"],
        qk_head_dim=hf["qk_nope_head_dim"],
        qk_pos_emb_head_dim=hf["qk_rope_head_dim"],
        v_head_dim=hf["v_head_dim"],
        rope_type="rope",
        rotary_base=theta,
        multi_latent_attention=True,
        qk_layernorm=True,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        normalization="RMSNorm",
        layernorm_epsilon=hf["rms_norm_eps"],
        attention_dropout=0.0,
        hidden_dropout=0.0,
        num_moe_experts=hf["n_routed_experts"],
        moe_router_topk=hf["num_experts_per_tok"],
        moe_ffn_hidden_size=hf["moe_intermediate_size"],
        moe_shared_expert_intermediate_size=hf["moe_intermediate_size"] * hf["n_shared_experts"],
        moe_layer_freq=[int(layer >= hf["first_k_dense_replace"]) for layer in range(layers)],
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_router_num_groups=hf["n_group"],
        moe_router_group_topk=hf["topk_group"],
        moe_router_topk_scaling_factor=hf["routed_scaling_factor"],
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="alltoall",
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
        use_cpu_initialization=True,
    )
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    for layer in spec.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = CoreAttention
    return GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=hf["vocab_size"],
        max_sequence_length=128,
        position_embedding_type="rope",
        rotary_base=theta,
    ).eval()
