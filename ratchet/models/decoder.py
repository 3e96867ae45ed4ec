"""The built-in transformer decoder, which learner and embedded engine share.

It has no batch dimension and no padding. The caller passes the attention: the learner attends over
packed sequences, the engine over its KV cache. Everything else is the same code for both.

T = tokens, d = hidden size, H = query heads, K = key/value heads, D = head_dim, C = D / 2. The
cosines of rotary embeddings are repeated to D columns, the sines are not (C).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ratchet.config.model_shape.decoder_config import DecoderConfig
from ratchet.kernels.bfloat16 import RoundedWeight, SharedRoundedWeight
from ratchet.models.layers.expert_routing import RoutingHook
from ratchet.models.layers.moe import Experts, SparseMLP
from ratchet.models.layers.quantized import QuantFormat, QuantizedMatrix
from ratchet.models.layers.rope import RotaryTable
from ratchet.models.lora.layers import FusedLoRA
from ratchet.models.ops import linear, rms_norm, select_rows, split_heads, swiglu
from ratchet.models.parallel.sharding import NO_TP_COMM, WHOLE, ModelShard, TPComm


class AttentionFn(Protocol):
    """A function that computes the attention of one layer.

    It maps (layer index, queries [T, H, D], keys [T, K, D], values [T, K, D]) to [T, H, D]. Queries
    and keys are already rotated.
    """

    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, /) -> Tensor: ...


class Linear(nn.Linear):
    """A linear layer that can have a LoRA adapter and a quantized matrix."""

    adapter: FusedLoRA | None  # added to the product; see `ratchet.models.lora.layers`
    quantised: QuantizedMatrix | None  # if set, replaces `weight`, which is then None
    rounded: RoundedWeight  # the weight for products in bfloat16

    def __init__(self, inputs: int, outputs: int, *, bias: bool) -> None:
        super().__init__(inputs, outputs, bias=bias)
        self.register_module("adapter", None)
        self.register_module("quantised", None)
        self.rounded = RoundedWeight()

    def forward(self, input: Tensor, before_swiglu: bool = False) -> Tensor:
        """Return the product. before_swiglu: as in `ops.linear`."""
        if self.quantised is None:
            before_swiglu = before_swiglu and self.adapter is None
            out = linear(input, self.weight, self.bias, self.rounded, before_swiglu=before_swiglu)
        else:
            out = self.quantised(input, self.bias)
        return out if self.adapter is None else self.adapter(input, out)

    @property
    def takes_rounded(self) -> bool:
        """True if the input may be in bfloat16: only the product reads it, and rounds it anyway."""
        return self.quantised is None and self.adapter is None

    def quantise(self, quant_format: QuantFormat) -> None:
        """Replace the matrix by a quantized one."""
        if self.quantised is None:
            self.quantised = QuantizedMatrix(self.weight, quant_format)
            self.register_parameter("weight", None)

    def restore(self) -> None:
        """Replace the quantized matrix by a plain one."""
        if self.quantised is not None:
            self.register_parameter("weight", nn.Parameter(self.quantised.plain()))
            self.quantised = None

    def reset_parameters(self) -> None:
        """Do nothing: weights are loaded, or drawn by `Decoder.init_weights`.

        torch's version would draw random values that are never used, which takes seconds per
        billion parameters.
        """


class Embedding(nn.Embedding):
    """An embedding that is uninitialised until weights are loaded."""

    def reset_parameters(self) -> None:
        """Do nothing, as in `Linear.reset_parameters`."""


class RMSNorm(nn.Module):
    """Root mean square normalisation over the last dimension (arXiv:1910.07467)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class SelfAttention(nn.Module):
    """Grouped-query attention with one fused matrix for queries, keys and values.

    The rows of the matrix are all query heads, then all key heads, then all value heads.
    """

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.config = config
        self.layer = layer
        n_heads = config.n_heads + 2 * config.n_kv_heads
        self.qkv_proj = Linear(config.hidden_size, n_heads * config.head_dim, bias=config.qkv_bias)
        self.o_proj = Linear(
            config.n_heads * config.head_dim, config.hidden_size, bias=config.out_bias
        )
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None

    def forward(
        self,
        x_Td: Tensor,
        cos_T1D: Tensor,
        sin_T1C: Tensor,
        attend: AttentionFn,
        output_index: Tensor | None = None,
    ) -> Tensor:
        c = self.config
        qkv = self.qkv_proj(x_Td).view(len(x_Td), -1, c.head_dim)
        q_norm, k_norm = (
            None if norm is None else norm.weight for norm in (self.q_norm, self.k_norm)
        )
        qkv = split_heads(
            qkv, (q_norm, k_norm), cos_T1D, sin_T1C, (c.n_heads, c.n_kv_heads), c.norm_eps
        )
        out = attend(self.layer, *qkv).flatten(1)
        return self.o_proj(out if output_index is None else select_rows(out, output_index))


class GatedMLP(nn.Module):
    """A SwiGLU MLP (arXiv:2002.05202). Its gate and up matrices are fused into one."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate_up_proj = Linear(
            config.hidden_size, 2 * config.intermediate_size, bias=config.mlp_bias
        )
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(
        self, x_Td: Tensor, row_multiple: int = 1, route: RoutingHook | None = None
    ) -> Tensor:
        """Return the layer's output [T, d].

        `row_multiple` and `route` are for `SparseMLP`, and unused here.
        """
        return self.down_proj(
            swiglu(self.gate_up_proj(x_Td, before_swiglu=self.down_proj.takes_rounded))
        )


class DecoderLayer(nn.Module):
    """A decoder layer: attention and an MLP, each behind a norm and with a residual connection."""

    def __init__(self, config: DecoderConfig, layer: int, n_local_experts: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = SelfAttention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = (
            SparseMLP(config, config.sparse_layers.index(layer), n_local_experts)
            if config.is_sparse(layer)
            else GatedMLP(config)
        )
        self.tp_comm: TPComm = NO_TP_COMM

    def forward(
        self,
        x_Td: Tensor,
        cos_T1D: Tensor,
        sin_T1C: Tensor,
        attend: AttentionFn,
        row_multiple: int = 1,
        route: RoutingHook | None = None,
        output_index: Tensor | None = None,
    ) -> Tensor:
        """Return the hidden states after the layer.

        Args:
            output_index: int64, indices of the tokens whose states are returned; None: all. The
                output projection and the MLP run for these tokens only.
        """
        enter = self.tp_comm.enter
        leave = self.tp_comm.leave
        attended = leave(
            self.self_attn(
                enter(self.input_layernorm(x_Td)), cos_T1D, sin_T1C, attend, output_index
            )
        )
        x_Td = (x_Td if output_index is None else select_rows(x_Td, output_index)) + attended
        return x_Td + leave(
            self.mlp(enter(self.post_attention_layernorm(x_Td)), row_multiple, route)
        )


class Decoder(nn.Module):
    """A causal decoder, or this process's shard of one.

    Its matrices are uninitialised memory until weights are loaded or `init_weights` is called.
    """

    def __init__(self, config: DecoderConfig, shard: ModelShard = WHOLE) -> None:
        """Allocate the layers of the shard.

        Args:
            config: Shape of the whole model.
            shard: The shard of the model that is allocated here.
        """
        super().__init__()
        self.config = config
        self.shard = shard
        local_config = shard.local_config(config)
        rows = len(shard.tensor.range(config.vocab_size))
        has_embedding = shard.is_first or (shard.is_last and config.tied)
        self.embed_tokens = Embedding(rows, config.hidden_size) if has_embedding else None
        n_local_experts = len(shard.experts.range(config.n_experts))
        self.layers = nn.ModuleDict(
            {
                str(layer): DecoderLayer(local_config, layer, n_local_experts)
                for layer in shard.pipeline.range(config.n_layers)
            }
        )
        self.norm = RMSNorm(config.hidden_size, config.norm_eps) if shard.is_last else None
        self.lm_head = (
            Linear(config.hidden_size, rows, bias=False)
            if shard.is_last and not config.tied
            else None
        )
        self.rotary = RotaryTable(config)
        self.checkpointing = False
        # The communication with the other tensor-parallel ranks.
        self.tp_comm: TPComm = NO_TP_COMM

    @property
    def layer_linears(self) -> Iterator[tuple[str, Linear]]:
        """The (path, module) pairs of the linear layers inside the decoder layers."""
        return (
            (path, module)
            for path, module in self.named_modules()
            if isinstance(module, Linear) and module is not self.lm_head
        )

    @property
    def layer_experts(self) -> Iterator[tuple[str, Experts]]:
        """The (path, module) pairs of the experts of the decoder layers."""
        return (
            (path, module) for path, module in self.named_modules() if isinstance(module, Experts)
        )

    def named_weights(self) -> Iterator[tuple[str, nn.Parameter | QuantizedMatrix]]:
        """Yield (name, parameter or quantized matrix).

        A quantized matrix has the name of the parameter that it replaces.
        """
        for path, module in self.named_modules():
            quantised = module.quantised if isinstance(module, Linear) else None
            weights = [
                *([("weight", quantised)] if quantised is not None else []),
                *module.named_parameters(recurse=False),
            ]
            yield from ((f"{path}.{name}" if path else name, weight) for name, weight in weights)

    @property
    def head_weight(self) -> Tensor:
        """The matrix [V, d] of the language head. If the head is tied, it is the embedding's."""
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        assert head is not None, "this shard of the decoder has no head"
        return head.weight

    def embed(self, tokens_T: Tensor) -> Tensor:
        """Return the embeddings [T, d] of tokens."""
        assert self.embed_tokens is not None, "this shard of the decoder has no embedding"
        return self.tp_comm.embed(tokens_T, self.embed_tokens.weight)

    def set_tp_comm(self, tp_comm: TPComm) -> None:
        """Use `tp_comm` to exchange hidden states with other tensor-parallel ranks."""
        self.tp_comm = tp_comm
        for module in self.modules():
            if isinstance(module, DecoderLayer):
                module.tp_comm = tp_comm

    def forward(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        attend: AttentionFn,
        x_Td: Tensor | None = None,
        *,
        row_multiple: int = 1,
        route: RoutingHook | None = None,
        output_index: Tensor | None = None,
    ) -> Tensor:
        """Return the normalised final hidden states [T, d].

        The logits of the next token are `hidden @ head_weight.T`. Pipeline stages other than the
        last return hidden states that are not normalised.

        Args:
            x_Td: Hidden states from the previous pipeline stage; None in the first.
            row_multiple: The multiple to which the caller has padded T for batch invariance. The
                rows of each expert are padded to it too.
            route: Called with each layer's router logits and chosen experts; returns the experts to
                use. None: use the routers' choice.
            output_index: int64, distinct indices of the tokens whose states are returned, in this
                order; None: all.
        """
        self.tp_comm.begin(len(tokens_T))
        x_Td = self.embed(tokens_T) if x_Td is None else x_Td
        cos_T1D, sin_T1C = self.rotary(positions_T, x_Td.dtype)
        last = len(self.layers) - 1
        for i, layer in enumerate(self.layers.values()):
            inputs = (
                x_Td,
                cos_T1D,
                sin_T1C,
                attend,
                row_multiple,
                route,
                output_index if i == last else None,
            )
            must_checkpoint = self.checkpointing and torch.is_grad_enabled()
            x_Td = cast(
                Tensor,
                # The only random numbers in layers come from a seed (`SeededDropout`).
                checkpoint(layer, *inputs, use_reentrant=False, preserve_rng_state=False)
                if must_checkpoint
                else layer(*inputs),
            )
        return x_Td if self.norm is None else self.tp_comm.finish(self.norm(x_Td))

    def init_weights(self, seed: int) -> Decoder:
        """Draw matrices from normal(0, init_std); set biases to 0 and norms to 1.

        A seed gives the same bits on every device.
        """
        initial_values = self.draw_initial_values(seed)
        with torch.no_grad():
            for parameter, (_, values) in zip(self.parameters(), initial_values, strict=True):
                parameter.copy_(values)
        return self

    def draw_initial_values(self, seed: int) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, initial value) of every parameter, one at a time."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            values = torch.empty(parameter.shape, device="cpu")
            if parameter.dim() >= 2:
                yield name, values.normal_(0.0, self.config.init_std, generator=generator)
            else:
                yield name, values.fill_(0.0 if name.endswith("bias") else 1.0)


def share_rounded_weights(model: nn.Module) -> dict[int, object]:
    """Return a memo of `deepcopy` by which a copy of the model shares its rounded weights.

    The copy's parameters must be in the same memory.
    """
    return {
        id(module.rounded): SharedRoundedWeight(module.rounded, module.weight)
        for module in model.modules()
        if isinstance(module, Linear) and module.quantised is None
    }
