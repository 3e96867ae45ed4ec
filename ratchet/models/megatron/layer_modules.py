"""The layer modules that Megatron Core itself provides only with Transformer Engine.

They compute the same as the built-in decoder: attention over packed sequences (also with context
parallelism), norms, and routers that can replay routing decisions.

T = tokens of this rank, H = query heads, K = key/value heads, D = head_dim, E = experts, k =
experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.extensions import transformer_engine as te_linear
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor, nn

from ratchet.config.model_shape.decoder_config import DecoderConfig
from ratchet.config.model_shape.megatron_decoder import MegatronDecoderConfig
from ratchet.models.decoder import AttentionFn
from ratchet.models.layers.expert_routing import RoutingHook
from ratchet.models.lora.layers import SeededDropout
from ratchet.models.megatron.low_rank import ColumnLinear, RowLinear
from ratchet.models.ops import rms_norm, rotate


@dataclass
class PackedForwardParams(PackedSeqParams):
    """The inputs that all layers of one forward pass share.

    Each layer gets them as an argument. So activation recomputation uses the inputs of the right
    micro-batch, even after forward passes of other micro-batches.
    """

    qkv_format: str = "thd"
    attend: AttentionFn | None = None
    cos_T1D: Tensor | None = None
    sin_T1C: Tensor | None = None
    route: RoutingHook | None = None
    seed: int | None = None  # seed of adapter dropout


class PackedCoreAttention(nn.Module):
    """The `core_attention` of a layer: it rotates queries and keys, then calls `attend`."""

    def __init__(self, *, layer_number: int, **others: Any) -> None:
        super().__init__()
        self.layer = layer_number - 1  # index in the whole model; Megatron counts from 1

    def forward(
        self,
        q_THD: Tensor,
        k_TKD: Tensor,
        v_TKD: Tensor,
        mask: None,
        /,
        *,
        packed_seq_params: PackedForwardParams,
        **others: Any,
    ) -> Tensor:
        packed = packed_seq_params
        assert packed.attend is not None
        assert packed.cos_T1D is not None
        assert packed.sin_T1C is not None
        q_THD, k_TKD = (
            _rotate_first(x.to(packed.cos_T1D.dtype), packed.cos_T1D, packed.sin_T1C).to(x.dtype)
            for x in (q_THD, k_TKD)
        )
        return packed.attend(self.layer, q_THD, k_TKD, v_TKD).flatten(1)


def _rotate_first(x_THD: Tensor, cos_T1R: Tensor, sin_T1C: Tensor) -> Tensor:
    """Rotate the first R = 2 C dimensions of each head, and keep the others."""
    rotated = cos_T1R.shape[-1]
    if rotated == x_THD.shape[-1]:
        return rotate(x_THD, cos_T1R, sin_T1C)
    first = rotate(x_THD[..., :rotated].contiguous(), cos_T1R, sin_T1C)
    return torch.cat([first, x_THD[..., rotated:]], dim=-1)


class MegatronRMSNorm(nn.Module):
    """The built-in decoder's `RMSNorm`, with Megatron's signature and parameter attributes."""

    def __init__(
        self, *, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **others: Any
    ) -> None:
        super().__init__()
        device = torch.cuda.current_device() if torch.cuda.is_available() else "cpu"
        self.weight = nn.Parameter(
            torch.ones(hidden_size, dtype=config.params_dtype, device=device)
        )
        self.weight.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class ReplayableRouter(TopKRouter):
    """A router that computes the same as `ratchet.models.layers.moe.ExpertRouter`."""

    sparse_index: int = 0  # index among the layers with experts
    route: RoutingHook | None = None  # may replace the chosen experts; set at each forward pass

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return (weights [T, E], 0 for other experts; mask of the chosen experts [T, E])."""
        logits_TE = logits.view(-1, logits.shape[-1])
        logits_TE = logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32))
        probabilities_TE = logits_TE.softmax(-1)
        experts_Tk = probabilities_TE.topk(self.topk).indices
        if self.route is not None:
            experts_Tk = self.route(self.sparse_index, logits_TE, experts_Tk)
        weights_Tk = probabilities_TE.gather(1, experts_Tk)
        # The weights of the chosen experts are scaled to sum to 1.
        if self.config.moe_router_pre_softmax is False:
            weights_Tk = weights_Tk / weights_Tk.sum(-1, keepdim=True)
        weights_TE = torch.zeros_like(probabilities_TE).scatter(1, experts_Tk, weights_Tk)
        chosen_TE = torch.zeros_like(probabilities_TE, dtype=torch.bool).scatter(
            1, experts_Tk, True
        )
        return weights_TE.to(logits.dtype), chosen_TE


class SigmoidRouter(ReplayableRouter):
    """The router of GLM-4-MoE, as transformers computes it.

    A sigmoid of each logit weighs an expert. A bias of each expert, which no gradient reaches,
    changes which experts are chosen.
    """

    shape: MegatronDecoderConfig  # set when the model is built
    expert_bias: Tensor

    def __init__(self, config: TransformerConfig, **keys: Any) -> None:
        super().__init__(config=config, **keys)
        # Megatron's own bias would be changed after each step by its own rule.
        del self.expert_bias
        self.register_buffer("expert_bias", torch.zeros(config.num_moe_experts or 0))

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return (weights [T, E], 0 for other experts; mask of the chosen experts [T, E])."""
        logits_TE = logits.view(-1, logits.shape[-1])
        logits_TE = logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32))
        scores_TE = logits_TE.sigmoid()
        experts_Tk = self._choose(scores_TE.detach() + self.expert_bias)
        if self.route is not None:
            experts_Tk = self.route(self.sparse_index, logits_TE, experts_Tk)
        weights_Tk = scores_TE.gather(1, experts_Tk)
        if self.shape.renormalise:
            weights_Tk = weights_Tk / (weights_Tk.sum(-1, keepdim=True) + 1e-20)
        weights_Tk = weights_Tk * self.shape.routed_scale
        weights_TE = torch.zeros_like(scores_TE).scatter(1, experts_Tk, weights_Tk)
        chosen_TE = torch.zeros_like(scores_TE, dtype=torch.bool).scatter(1, experts_Tk, True)
        return weights_TE.to(logits.dtype), chosen_TE

    def _choose(self, scores_TE: Tensor) -> Tensor:
        """Return the experts [T, k] of the groups whose two best experts have the largest sums."""
        n_groups, used = self.shape.n_expert_groups, self.shape.groups_per_token
        if used < n_groups:
            scores_TGe = scores_TE.view(len(scores_TE), n_groups, -1)
            groups_Tg = scores_TGe.topk(2, dim=-1).values.sum(-1).topk(used, dim=-1).indices
            is_used_TG = torch.zeros_like(scores_TGe[..., 0], dtype=torch.bool)
            is_used_TG = is_used_TG.scatter(1, groups_Tg, True)
            scores_TE = scores_TGe.masked_fill(~is_used_TG[..., None], float("-inf")).flatten(1)
        return scores_TE.topk(self.topk, dim=-1).indices


class MegatronLayer(TransformerLayer):
    """A layer that passes `route` to its router and `seed` to its adapters."""

    def forward(self, *args: Any, packed_seq_params: PackedForwardParams, **others: Any) -> Any:
        if isinstance(self.mlp, MoELayer):
            router: Any = self.mlp.router
            router.route = packed_seq_params.route
        for module in self.modules():
            if isinstance(module, SeededDropout):
                module.seed = packed_seq_params.seed
        return super().forward(*args, packed_seq_params=packed_seq_params, **others)


def add_bias(linear: type[nn.Module]) -> Any:
    """Return a class of linear layers that have a bias, whatever Megatron's configuration says.

    The configuration can only give biases to all linear layers, or to none but the fused QKV.
    """

    class Biased(linear):
        def __init__(self, *arguments: Any, **keys: Any) -> None:
            super().__init__(*arguments, **{**keys, "bias": True})

    return Biased


def layer_spec(shape: DecoderConfig, layer: int, *, fp8: bool = False) -> ModuleSpec:
    """Return the specification of a layer.

    Args:
        shape: The shape of the decoder.
        layer: The index of the layer in the whole model, from 0.
        fp8: True to use Transformer Engine's linear layers, which support fp8.
    """
    column, row = (
        (te_linear.TEColumnParallelLinear, te_linear.TERowParallelLinear)
        if fp8
        else (ColumnLinear, RowLinear)
    )
    mlp = MLPSubmodules(
        linear_fc1=add_bias(column) if shape.mlp_bias else column,
        linear_fc2=add_bias(row) if shape.mlp_bias else row,
    )
    norm = MegatronRMSNorm if shape.qk_norm else IdentityOp
    if shape.is_sparse(layer):
        experts = ModuleSpec(module=SequentialMLP, submodules=mlp)
        submodules = MoESubmodules(experts=experts, router=ReplayableRouter)
        if isinstance(shape, MegatronDecoderConfig):
            submodules.shared_experts = ModuleSpec(module=SharedExpertMLP, submodules=mlp)
            submodules.router = SigmoidRouter if shape.has_sigmoid_router else ReplayableRouter
        block = ModuleSpec(module=MoELayer, submodules=submodules)
    else:
        block = ModuleSpec(module=MLP, submodules=mlp)
    core: Any = PackedCoreAttention
    add: Any = get_bias_dropout_add
    attention = SelfAttentionSubmodules(
        linear_qkv=column,
        core_attention=core,
        linear_proj=add_bias(row) if shape.out_bias else row,
        q_layernorm=norm,
        k_layernorm=norm,
    )
    return ModuleSpec(
        module=MegatronLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=MegatronRMSNorm,
            self_attention=ModuleSpec(
                SelfAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=attention
            ),
            self_attn_bda=add,
            pre_mlp_layernorm=MegatronRMSNorm,
            mlp=block,
            mlp_bda=add,
        ),
    )
