"""The layer modules that Megatron Core itself provides only with Transformer Engine.

They compute the same as the built-in decoder and transformers: attention over packed sequences
(also with context parallelism), and norms.

T = tokens of this rank, H = query heads, K = key/value heads, D = head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.extensions import transformer_engine as te_linear
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from ratchet.config.model_shape.decoder_config import DecoderConfig
from ratchet.config.model_shape.megatron_decoder import MegatronDecoderConfig
from ratchet.models.decoder import AttentionFn
from ratchet.models.layers.expert_routing import RoutingHook
from ratchet.models.layers.sink_attention import add_sinks
from ratchet.models.lora.layers import SeededDropout
from ratchet.models.megatron.latent_attention import LatentAttention
from ratchet.models.megatron.low_rank import ColumnLinear, RowLinear
from ratchet.models.megatron.routers import BiasedRouter, ReplayableRouter, SigmoidRouter
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

    def __init__(
        self,
        *,
        config: TransformerConfig,
        layer_number: int,
        has_sinks: bool,
        pg_collection: Any,
        **others: Any,
    ) -> None:
        super().__init__()
        self.layer = layer_number - 1  # index in the whole model; Megatron counts from 1
        self.group = pg_collection.tp
        self.softmax_offset: nn.Parameter | None = None  # the sinks of this rank's heads
        if has_sinks:
            heads = config.num_attention_heads // self.group.size()
            self.softmax_offset = nn.Parameter(
                torch.empty(heads, dtype=config.params_dtype, device=_find_device())
            )
            set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)

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
        value_dim = v_TKD.shape[-1]
        # Kernels of attention, and the gathering of tokens of other ranks, take one size of heads.
        v_TKD = F.pad(v_TKD, (0, k_TKD.shape[-1] - value_dim))
        if self.softmax_offset is not None:
            q_THD, k_TKD, v_TKD = add_sinks(q_THD, k_TKD, v_TKD, self.softmax_offset)
        return packed.attend(self.layer, q_THD, k_TKD, v_TKD)[..., :value_dim].flatten(1)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> dict[str, Any]:
        """Return the sinks in the form of Megatron's distributed checkpoints."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(keep_vars=True),
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=self.group,
            dp_cp_group=metadata["dp_cp_group"],
        )


def _rotate_first(x_THD: Tensor, cos_T1R: Tensor, sin_T1C: Tensor) -> Tensor:
    """Rotate the first R = 2 C dimensions of each head, and keep the others."""
    rotated = cos_T1R.shape[-1]
    if rotated == x_THD.shape[-1]:
        return rotate(x_THD, cos_T1R, sin_T1C)
    first = rotate(x_THD[..., :rotated].contiguous(), cos_T1R, sin_T1C)
    return torch.cat([first, x_THD[..., rotated:]], dim=-1)


def _find_device() -> Any:
    return torch.cuda.current_device() if torch.cuda.is_available() else "cpu"


class MegatronRMSNorm(nn.Module):
    """The built-in decoder's `RMSNorm`, with Megatron's signature and parameter attributes."""

    def __init__(
        self, *, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **others: Any
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.ones(hidden_size, dtype=config.params_dtype, device=_find_device())
        )
        self.weight.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


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


class ExpertRowLinear(RowLinear):
    """The second matrix of an expert, whose bias is added once.

    Megatron adds the biases of experts before it sums over tensor-parallel ranks. So the other
    ranks add zeros, and their gradient of the bias, which Megatron sums over the ranks, is 0.
    """

    def forward(self, x: Tensor, *arguments: Any, **keys: Any) -> tuple[Tensor, Any]:
        out, bias = super().forward(x, *arguments, **keys)
        # Megatron adds the bias in place, which autograd forbids for this output.
        return out.clone(), bias if self.tp_group.rank() == 0 else bias * 0


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
    dense = MLPSubmodules(
        linear_fc1=add_bias(column) if shape.mlp_bias else column,
        linear_fc2=add_bias(row) if shape.mlp_bias else row,
    )
    block = (
        _make_experts_spec(shape, MLPSubmodules(linear_fc1=column, linear_fc2=row))
        if shape.is_sparse(layer)
        else ModuleSpec(module=MLP, submodules=dense)
    )
    add: Any = get_bias_dropout_add
    return ModuleSpec(
        module=MegatronLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=MegatronRMSNorm,
            self_attention=_make_attention_spec(shape, column, row),
            self_attn_bda=add,
            pre_mlp_layernorm=MegatronRMSNorm,
            mlp=block,
            mlp_bda=add,
        ),
    )


def _make_experts_spec(shape: DecoderConfig, mlp: MLPSubmodules) -> ModuleSpec:
    """Return the specification of a layer's experts.

    mlp: The matrices of experts without biases.
    """
    submodules = MoESubmodules(
        experts=ModuleSpec(module=SequentialMLP, submodules=mlp), router=ReplayableRouter
    )
    if isinstance(shape, MegatronDecoderConfig):
        if shape.shared_intermediate_size:
            submodules.shared_experts = ModuleSpec(module=SharedExpertMLP, submodules=mlp)
        if shape.has_sigmoid_router:
            submodules.router = SigmoidRouter
        if shape.clamped_glu is not None:
            submodules.router = BiasedRouter
            biased = MLPSubmodules(
                linear_fc1=add_bias(ColumnLinear), linear_fc2=add_bias(ExpertRowLinear)
            )
            submodules.experts = ModuleSpec(module=SequentialMLP, submodules=biased)
    return ModuleSpec(module=MoELayer, submodules=submodules)


def _make_attention_spec(shape: DecoderConfig, column: Any, row: Any) -> ModuleSpec:
    """Return the specification of a layer's attention, of these classes of linear layers."""
    is_megatron_only = isinstance(shape, MegatronDecoderConfig)
    has_sinks = is_megatron_only and shape.sinks is not None
    core: Any = ModuleSpec(PackedCoreAttention, params={"has_sinks": has_sinks})
    mask = {"attn_mask_type": AttnMaskType.causal}
    if is_megatron_only and shape.latent is not None:
        latent = MLASelfAttentionSubmodules(
            linear_q_proj=column,
            linear_q_up_proj=column,
            linear_kv_up_proj=column,
            core_attention=core,
            linear_proj=row,
            q_layernorm=MegatronRMSNorm,
            kv_layernorm=MegatronRMSNorm,
        )
        return ModuleSpec(
            LatentAttention, params={**mask, "latent": shape.latent}, submodules=latent
        )
    norm = MegatronRMSNorm if shape.qk_norm else IdentityOp
    attention = SelfAttentionSubmodules(
        linear_qkv=column,
        core_attention=core,
        linear_proj=add_bias(row) if shape.out_bias else row,
        q_layernorm=norm,
        k_layernorm=norm,
    )
    return ModuleSpec(SelfAttention, params=mask, submodules=attention)
