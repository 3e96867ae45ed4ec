"""Build a rank's pipeline stages as Megatron Core models, from a decoder's shape.

T = tokens of a forward pass, t = tokens that this rank keeps between layers (fewer than T under
sequence parallelism), d = hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import (
    MLATransformerConfig,
    TransformerConfig,
)
from torch import Tensor

from ratchet.config.model_shape.decoder_config import DecoderConfig
from ratchet.config.model_shape.megatron_decoder import MegatronDecoderConfig
from ratchet.models.layers.expert_routing import Routing
from ratchet.models.layers.packed_inputs import PackedInputs
from ratchet.models.layers.rope import RotaryTable
from ratchet.models.megatron.layer_modules import MegatronRMSNorm, PackedForwardParams, layer_spec
from ratchet.models.megatron.multi_token_prediction import (
    count_built_mtp_layers,
    make_mtp_spec,
    run_mtp_layers,
    set_router_shape,
)
from ratchet.models.parallel.collectives import gather
from ratchet.models.parallel.megatron_sizes import Fp8Format, MegatronSizes, padded_vocabulary
from ratchet.models.scalar_head import ScalarHead

TIMEOUT = timedelta(minutes=30)


def init_process_groups(sizes: MegatronSizes, seed: int = 0) -> None:
    """Create Megatron's process groups. All ranks call it together, after `init_process_group`.

    Ranks are ordered as everywhere in Ratchet: tensor, context, data, pipeline.
    """
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=sizes.tensor,
        pipeline_model_parallel_size=sizes.pipeline,
        virtual_pipeline_model_parallel_size=sizes.chunks if sizes.chunks > 1 else None,
        context_parallel_size=sizes.context,
        expert_model_parallel_size=sizes.experts,
        distributed_timeout_minutes=int(TIMEOUT.total_seconds() // 60),
    )
    model_parallel_cuda_manual_seed(seed)


def destroy_process_groups() -> None:
    """Destroy Megatron's process groups."""
    groups = parallel_state._global_process_group_list or []
    parallel_state.destroy_model_parallel()
    # Megatron destroys some of its groups, and forgets the others, which would keep their threads
    # and connections. PyTorch's table has those that are left.
    for group in groups:
        if group in dist.distributed_c10d._world.pg_map:
            dist.destroy_process_group(group)
    # Megatron keeps a second reference to two of them.
    parallel_state._INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP = None
    parallel_state._INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_GLOO = None


class MegatronStage(GPTModel):
    """Consecutive layers of a decoder, as a model of Megatron Core.

    The first stage has the embedding, the last the final norm and the language head. Every stage
    returns hidden states, never logits.
    """

    def __init__(
        self, shape: DecoderConfig, sizes: MegatronSizes, config: TransformerConfig, chunk: int
    ) -> None:
        """Allocate one chunk of layers. Weights are uninitialised memory."""
        stage_index = sizes.stage(parallel_state.get_pipeline_model_parallel_rank(), chunk)
        layers = stage_index.range(shape.n_layers)
        super().__init__(
            config=config,
            transformer_layer_spec=TransformerBlockSubmodules(  # pyright: ignore[reportArgumentType]
                layer_specs=[
                    layer_spec(shape, layer, fp8=config.fp8 is not None) for layer in layers
                ],
                layer_norm=MegatronRMSNorm,  # pyright: ignore[reportArgumentType]
            ),
            vocab_size=padded_vocabulary(shape.vocab_size, sizes.tensor),
            max_sequence_length=shape.max_positions,
            pre_process=stage_index.index == 0,
            post_process=stage_index.index == stage_index.count - 1,
            share_embeddings_and_output_weights=shape.tied,
            position_embedding_type="none",  # `PackedCoreAttention` rotates queries and keys
            vp_stage=chunk if sizes.chunks > 1 else None,
            mtp_block_spec=(
                make_mtp_spec(shape) if stage_index.index == stage_index.count - 1 else None
            ),
        )
        self.shape = shape  # the shape of the whole model
        self.stage_index = stage_index
        self.layers = layers  # indices of the layers in this stage
        # The head of a critic or a reward model, on the last stage.
        self.scalar: ScalarHead | None = None
        self.rotary = RotaryTable(
            replace(shape, head_dim=shape.rotary_dim)
            if isinstance(shape, MegatronDecoderConfig)
            else shape
        )
        self.tensor: Any = (
            parallel_state.get_tensor_model_parallel_group() if sizes.tensor > 1 else None
        )
        for layer, module in zip(layers, self.decoder.layers, strict=True):
            if isinstance(module.mlp, MoELayer):
                router: Any = module.mlp.router
                router.sparse_index = shape.sparse_layers.index(layer)
                router.shape = shape
        if self.mtp_process:
            set_router_shape(self.mtp.layers, shape)

    @property
    def head_weight(self) -> Tensor:
        """Return the head's matrix [rows of this rank, d], including vocabulary padding."""
        weight: Any = (
            self.shared_embedding_or_output_weight()
            if self.shape.tied
            else self.output_layer.weight
        )
        return weight

    def forward(self, packed: PackedInputs) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the hidden states after these layers.

        The last stage returns [T, d], the same on all ranks of a tensor-parallel group. Other
        stages return [t, 1, d] for the next one, which receives it by `set_input_tensor`. If the
        inputs have later tokens, the states of each MTP layer follow: [(1 + K) * T, d].
        """
        dtype = torch.promote_types(self.config.params_dtype, torch.float32)
        cos_T1D, sin_T1C = self.rotary(packed.positions_U, dtype)
        params = PackedForwardParams(
            attend=packed.attend,
            cos_T1D=cos_T1D,
            sin_T1C=sin_T1C,
            route=self._select_routing(packed),
            seed=packed.seed,
        )
        x = None
        if self.pre_process:
            # Hidden states must require a gradient even if the embedding is frozen. Otherwise
            # Megatron neither recomputes layers with adapters nor sends gradients between stages.
            x = self.embedding(input_ids=packed.tokens_U[None], position_ids=None).requires_grad_()
        x = self.decoder(hidden_states=x, attention_mask=None, packed_seq_params=params)
        if not self.post_process:
            return x
        if packed.later_tokens_KU is None:
            return self._gather_tokens(x)
        states = run_mtp_layers(self.mtp.layers, self.embedding, x, packed.later_tokens_KU, params)
        return torch.cat([self._gather_tokens(x), *map(self._gather_tokens, states)])

    def _gather_tokens(self, x_t1d: Tensor) -> Tensor:
        """Return the states of all tokens [T, d]."""
        x_td = x_t1d[:, 0]
        return (
            gather(x_td, self.tensor, same_use_on_all_ranks=True)
            if self.tensor is not None and self.config.sequence_parallel
            else x_td
        )

    def _select_routing(self, packed: PackedInputs) -> Routing | None:
        """Return the routing of this rank's tokens: fewer than T under sequence parallelism."""
        routing = packed.routing
        if routing is None or self.tensor is None or not self.config.sequence_parallel:
            return routing
        n_tokens = len(packed.tokens_U) // self.tensor.size()
        first = n_tokens * self.tensor.rank()
        return routing.select(torch.arange(first, first + n_tokens, device=packed.tokens_U.device))


def build_stages(
    shape: DecoderConfig,
    sizes: MegatronSizes,
    *,
    dtype: torch.dtype = torch.float32,
    recompute: str = "none",
    fp8: Fp8Format | None = None,
) -> list[MegatronStage]:
    """Return this rank's stages, one per chunk of an interleaved pipeline.

    Call `init_process_groups` first. The stages are on the current CUDA device if there is one.
    Raises ModelError if the shape can't be divided by these sizes.

    Args:
        recompute: as in `MegatronConfig`.
        fp8: as in `MegatronConfig`; None: off.
    """
    sizes.check(shape)
    config = transformer_config(shape, sizes, dtype=dtype, recompute=recompute, fp8=fp8)
    return [MegatronStage(shape, sizes, config, chunk) for chunk in range(sizes.chunks)]


# Megatron's options for each value of `recompute`.
RECOMPUTED: Mapping[str, Mapping[str, Any]] = {
    "none": {},
    "attention": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "full": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
}


def _keep_uninitialised(weight: Tensor) -> Tensor:
    """Return the weight unchanged: an initialiser that does nothing.

    Megatron's initialisation can't be switched off, because it also marks divided parameters.
    """
    return weight


def transformer_config(
    shape: DecoderConfig,
    sizes: MegatronSizes,
    *,
    dtype: torch.dtype = torch.float32,
    recompute: str = "none",
    fp8: Fp8Format | None = None,
) -> TransformerConfig:
    """Return Megatron's configuration of a decoder."""
    options = {**_make_expert_options(shape, dtype), **RECOMPUTED[recompute]}
    options |= _make_latent_options(shape)
    if fp8 is not None:
        options |= {"fp8": fp8.format, "fp8_recipe": fp8.recipe}
    return (MLATransformerConfig if "kv_lora_rank" in options else TransformerConfig)(
        num_layers=shape.n_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.intermediate_size,
        num_attention_heads=shape.n_heads,
        num_query_groups=shape.n_kv_heads,
        kv_channels=shape.head_dim,
        gated_linear_unit=True,
        **_make_activation_options(shape),
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_eps,
        qk_layernorm=shape.qk_norm,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=sizes.tensor,
        sequence_parallel=sizes.sequence,
        context_parallel_size=sizes.context,
        pipeline_model_parallel_size=sizes.pipeline,
        virtual_pipeline_model_parallel_size=sizes.chunks if sizes.chunks > 1 else None,
        mtp_num_layers=count_built_mtp_layers(shape) or None,
        pipeline_model_parallel_layout=_make_stage_layout(shape, sizes),
        # In an interleaved pipeline of two ranks, each rank both precedes and follows the other.
        # Batched messages would be mixed up.
        overlap_p2p_comm=sizes.chunks > 1,
        batch_p2p_comm=sizes.chunks == 1,
        expert_model_parallel_size=sizes.experts,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        pipeline_dtype=dtype,
        init_method=_keep_uninitialised,
        output_layer_init_method=_keep_uninitialised,
        calculate_per_token_loss=True,  # sum gradients without dividing them
        # These options need kernels of apex or Transformer Engine.
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
        **options,
    )


def _make_stage_layout(shape: DecoderConfig, sizes: MegatronSizes) -> list[list[str]] | None:
    """Return the modules of each pipeline stage; None if all stages have as many layers."""
    layers = sizes.stage(0).count_layers(shape.n_layers)
    if len(set(layers)) == 1:
        return None
    stages = [["decoder"] * count for count in layers]
    last = [*stages[-1], *["mtp"] * count_built_mtp_layers(shape), "loss"]
    return [["embedding", *stages[0]], *stages[1:-1], last]


def _make_latent_options(shape: DecoderConfig) -> dict[str, Any]:
    """Return Megatron's options of multi-head latent attention; none if the decoder lacks it."""
    if not isinstance(shape, MegatronDecoderConfig) or shape.latent is None:
        return {}
    return {
        "q_lora_rank": shape.latent.q_rank or None,
        "kv_lora_rank": shape.latent.kv_rank,
        "qk_head_dim": shape.latent.plain_dim,
        "qk_pos_emb_head_dim": shape.rotary_dim,
        "v_head_dim": shape.latent.value_dim,
        "rope_type": "rope",  # `PackedCoreAttention` rotates instead
        "rotary_scaling_factor": 1.0,
    }


def _make_activation_options(shape: DecoderConfig) -> dict[str, Any]:
    """Return Megatron's options of the gated linear unit."""
    glu = shape.clamped_glu if isinstance(shape, MegatronDecoderConfig) else None
    if glu is None:
        return {"activation_func": F.silu}

    def gate(x: Tensor) -> Tensor:
        return x * torch.sigmoid(x * glu.alpha)

    return {
        "activation_func": gate,
        "activation_func_clamp_value": glu.limit,
        "glu_linear_offset": 1.0,
    }


def _make_expert_options(shape: DecoderConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Return Megatron's options of a mixture of experts."""
    if not shape.n_experts:
        return {}
    shared: dict[str, Any] = {}
    if isinstance(shape, MegatronDecoderConfig):
        # Megatron takes a size of 0 for shared experts of width 0.
        shared["moe_shared_expert_intermediate_size"] = shape.shared_intermediate_size or None
        shared["moe_shared_expert_gate"] = shape.has_shared_gate
    return {
        **shared,
        "num_moe_experts": shape.n_experts,
        "moe_router_topk": shape.experts_per_token,
        "moe_ffn_hidden_size": shape.expert_intermediate_size,
        "moe_layer_freq": [int(shape.is_sparse(layer)) for layer in range(shape.n_layers)],
        "moe_router_pre_softmax": not shape.renormalise,
        "moe_router_load_balancing_type": "none",  # router losses are loss terms of Ratchet
        "moe_router_dtype": "fp32" if dtype == torch.bfloat16 else None,
        "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": False,
    }
