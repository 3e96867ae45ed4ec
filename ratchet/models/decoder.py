"""Define the decoder that learner and embedded engine share.

It has no batch dimension and no padding. The caller decides how tokens attend to each other:
the learner passes attention over packed sequences, the engine attention over its KV cache. So both
run the same weights through the same arithmetic.

T = tokens, d = hidden size, H = query heads, K = key/value heads, D = head_dim, C = D / 2.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ratchet.config.model_shape.decoder_config import DecoderConfig
from ratchet.models.layers.expert_routing import RoutingHook
from ratchet.models.layers.moe import SparseMLP
from ratchet.models.layers.quantized import QuantFormat, QuantizedMatrix
from ratchet.models.layers.rope import RotaryTable
from ratchet.models.lora.layers import FusedLoRA
from ratchet.models.ops import heads, linear, rms_norm, select_rows, swiglu
from ratchet.models.parallel.sharding import NO_TP_COMM, WHOLE, ModelShard, TPComm


class AttentionFn(Protocol):
    """A function that computes the attention of one layer.

    It maps (layer index, queries [T, H, D], keys [T, K, D], values [T, K, D]) to [T, H, D]. Queries
    and keys are already rotated.
    """

    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, /) -> Tensor: ...


class Linear(nn.Linear):
    """A linear map that can have an adapter and a quantized matrix."""

    adapter: FusedLoRA | None  # added to the product; see `ratchet.models.lora.layers`
    quantised: QuantizedMatrix | None  # if set, replaces `weight`, which is then None

    def __init__(self, inputs: int, outputs: int, *, bias: bool) -> None:
        super().__init__(inputs, outputs, bias=bias)
        self.register_module("adapter", None)
        self.register_module("quantised", None)

    def forward(self, input: Tensor) -> Tensor:
        out = (
            linear(input, self.weight, self.bias)
            if self.quantised is None
            else self.quantised(input, self.bias)
        )
        return out if self.adapter is None else self.adapter(input, out)

    def quantise(self, form: QuantFormat) -> None:
        """Replace the matrix by a quantized one."""
        if self.quantised is None:
            self.quantised = QuantizedMatrix(self.weight, form)
            self.register_parameter("weight", None)

    def restore(self) -> None:
        """Replace the quantized matrix by a plain one."""
        if self.quantised is not None:
            self.register_parameter("weight", nn.Parameter(self.quantised.plain()))
            self.quantised = None

    def reset_parameters(self) -> None:
        """Do nothing: weights are loaded, or drawn by `Decoder.init_weights`.

        Torch would draw values here that are thrown away, which takes seconds per billion
        parameters.
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
        read: Tensor | None = None,
    ) -> Tensor:
        c = self.config
        qkv = self.qkv_proj(x_Td).view(len(x_Td), -1, c.head_dim)
        q_norm, k_norm = (
            None if norm is None else norm.weight for norm in (self.q_norm, self.k_norm)
        )
        qkv = heads(qkv, (q_norm, k_norm), cos_T1D, sin_T1C, (c.n_heads, c.n_kv_heads), c.norm_eps)
        out = attend(self.layer, *qkv).flatten(1)
        return self.o_proj(out if read is None else select_rows(out, read))


class GatedMLP(nn.Module):
    """A SwiGLU layer (arXiv:2002.05202); gate and up are one fused matrix."""

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

        `row_multiple` and `route` are unused; they are here because `SparseMLP` has them.
        """
        return self.down_proj(swiglu(self.gate_up_proj(x_Td)))


class DecoderLayer(nn.Module):
    """A decoder layer: attention and an MLP, each behind a norm and with a residual connection."""

    def __init__(self, config: DecoderConfig, layer: int, held: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = SelfAttention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        sparse = config.is_sparse(layer)
        self.mlp = (
            SparseMLP(config, config.sparse_layers.index(layer), held)
            if sparse
            else GatedMLP(config)
        )
        self.seams: TPComm = NO_TP_COMM

    def forward(
        self,
        x_Td: Tensor,
        cos_T1D: Tensor,
        sin_T1C: Tensor,
        attend: AttentionFn,
        row_multiple: int = 1,
        route: RoutingHook | None = None,
        read: Tensor | None = None,
    ) -> Tensor:
        """Return the hidden states after the layer.

        Args:
            read: int64, indices of the tokens whose states are returned; None: all. The
                output projection and the MLP run for these tokens only.
        """
        enter = self.seams.enter
        leave = self.seams.leave
        attended = leave(
            self.self_attn(enter(self.input_layernorm(x_Td)), cos_T1D, sin_T1C, attend, read)
        )
        x_Td = (x_Td if read is None else select_rows(x_Td, read)) + attended
        return x_Td + leave(
            self.mlp(enter(self.post_attention_layernorm(x_Td)), row_multiple, route)
        )


class Decoder(nn.Module):
    """A causal decoder, or the shard of one that this process holds.

    Its matrices are uninitialised memory until weights are loaded or `init_weights` is called.
    """

    def __init__(self, config: DecoderConfig, part: ModelShard = WHOLE) -> None:
        """Allocate the layers of the shard.

        Args:
            config: shape of the whole model.
            part: the shard of it that is allocated here.
        """
        super().__init__()
        self.config = config
        self.part = part
        local_config = part.local(config)
        rows = len(part.tensor.range(config.vocab_size))
        embeds = part.first or (part.last and config.tied)
        self.embed_tokens = Embedding(rows, config.hidden_size) if embeds else None
        experts = len(part.experts.range(config.n_experts))
        self.layers = nn.ModuleDict(
            {
                str(layer): DecoderLayer(local_config, layer, experts)
                for layer in part.pipeline.range(config.n_layers)
            }
        )
        self.norm = RMSNorm(config.hidden_size, config.norm_eps) if part.last else None
        self.lm_head = (
            Linear(config.hidden_size, rows, bias=False) if part.last and not config.tied else None
        )
        self.rotary = RotaryTable(config)
        self.checkpointing = False
        # the communication with the other tensor-parallel ranks
        self.seams: TPComm = NO_TP_COMM

    @property
    def inner_maps(self) -> Iterator[tuple[str, Linear]]:
        """Return the (path, module) pairs of the linear maps inside the layers."""
        return (
            (path, m)
            for path, m in self.named_modules()
            if isinstance(m, Linear) and m is not self.lm_head
        )

    def named_weights(self) -> Iterator[tuple[str, nn.Parameter | QuantizedMatrix]]:
        """Yield `named_parameters()`, and quantized matrices under the names of the plain ones."""
        for path, module in self.named_modules():
            quantised = getattr(module, "quantised", None)
            weights = [
                *([("weight", quantised)] if quantised is not None else []),
                *module.named_parameters(recurse=False),
            ]
            yield from ((f"{path}.{name}" if path else name, weight) for name, weight in weights)

    @property
    def head_weight(self) -> Tensor:
        """Return the head's matrix [V, d]; that of the embedding if the head is tied."""
        holder = self.embed_tokens if self.lm_head is None else self.lm_head
        assert holder is not None, "this part of the decoder has no head"
        return holder.weight

    def embed(self, tokens_T: Tensor) -> Tensor:
        """Return the embeddings [T, d] of tokens."""
        assert self.embed_tokens is not None, "this part of the decoder has no embedding"
        return self.seams.embed(tokens_T, self.embed_tokens.weight)

    def join(self, seams: TPComm) -> None:
        """Use `seams` to exchange hidden states with other tensor-parallel ranks."""
        self.seams = seams
        for module in self.modules():
            if isinstance(module, DecoderLayer):
                module.seams = seams

    def forward(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        attend: AttentionFn,
        x_Td: Tensor | None = None,
        *,
        row_multiple: int = 1,
        route: RoutingHook | None = None,
        read: Tensor | None = None,
    ) -> Tensor:
        """Return normalised hidden states [T, d]; `hidden @ head_weight.T` are the logits of the
        *next* token.

        A pipeline shard other than the last returns hidden states that are not normalised.

        Args:
            x_Td: hidden states of the pipeline shard before this one; None in the first.
            row_multiple: the multiple to which the caller has padded T for batch invariance. The
                rows of each expert are padded to it too.
            route: is called with each layer's router logits and chosen experts, and returns the
                experts to use; None: the routers' choice.
            read: int64, distinct indices of the tokens whose states are returned, in this order;
                None: all.
        """
        self.seams.begin(len(tokens_T))
        x_Td = self.embed(tokens_T) if x_Td is None else x_Td
        cos_T1D, sin_T1C = self.rotary(positions_T, x_Td.dtype)
        last = len(self.layers) - 1
        for i, block in enumerate(self.layers.values()):
            inputs = (
                x_Td,
                cos_T1D,
                sin_T1C,
                attend,
                row_multiple,
                route,
                read if i == last else None,
            )
            recompute = self.checkpointing and torch.is_grad_enabled()
            x_Td = cast(
                Tensor,
                checkpoint(block, *inputs, use_reentrant=False) if recompute else block(*inputs),
            )
        return x_Td if self.norm is None else self.seams.finish(self.norm(x_Td))

    def init_weights(self, seed: int) -> Decoder:
        """Draw matrices from normal(0, init_std); set biases to 0 and norms to 1.

        A seed gives the same bits on every device.
        """
        with torch.no_grad():
            for parameter, (_, values) in zip(self.parameters(), self.draws(seed), strict=True):
                parameter.copy_(values)
        return self

    def draws(self, seed: int) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, initial value) of every parameter, one at a time."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            values = torch.empty(parameter.shape, device="cpu")
            if parameter.dim() >= 2:
                yield name, values.normal_(0.0, self.config.init_std, generator=generator)
            else:
                yield name, values.fill_(0.0 if name.endswith("bias") else 1.0)
