"""The one decoder that learner and embedded engine share, over flat token axes: no batch dimension, no padding.

How tokens attend to each other is the caller's: the learner passes attention over packed sequences, the engine attention
over its KV cache. Both therefore run the same weights through the same arithmetic.

T = tokens, d = hidden size, H = query heads, K = key/value heads, D = head_dim, C = D / 2.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ratchet.models.config import DecoderConfig
from ratchet.models.moe import SparseMLP
from ratchet.models.ops import rms_norm, rotate, swiglu
from ratchet.models.rope import RotaryTable


class Attend(Protocol):
    """(layer index, queries [T, H, D], keys [T, K, D], values [T, K, D]) -> [T, H, D]; queries and keys are rotated."""

    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, /) -> Tensor: ...


class Linear(nn.Linear):
    def reset_parameters(self) -> None:
        """Nothing: weights are loaded, or drawn by `Decoder.init_weights`. What torch draws here would be thrown away, after
        seconds per billion parameters."""


class Embedding(nn.Embedding):
    def reset_parameters(self) -> None:
        """Nothing, as above."""


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class SelfAttention(nn.Module):
    """Grouped-query attention; q, k and v come from one fused matrix (rows: all q heads, all k heads, all v heads)."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        heads = config.n_heads + 2 * config.n_kv_heads
        self.qkv_proj = Linear(config.hidden_size, heads * config.head_dim, bias=config.qkv_bias)
        self.o_proj = Linear(config.n_heads * config.head_dim, config.hidden_size, bias=config.out_bias)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None

    def forward(self, x_Td: Tensor, cos_T1D: Tensor, sin_T1C: Tensor, attend: Attend) -> Tensor:
        c = self.config
        qkv = self.qkv_proj(x_Td).view(len(x_Td), -1, c.head_dim)
        qk, v_TKD = qkv.split([c.n_heads + c.n_kv_heads, c.n_kv_heads], dim=1)
        if self.q_norm is not None and self.k_norm is not None:  # both at once: a small model pays by the operation
            weights = self.q_norm.weight.expand(c.n_heads, -1), self.k_norm.weight.expand(c.n_kv_heads, -1)
            qk = rms_norm(qk, torch.cat(weights), c.norm_eps)
        q_THD, k_TKD = rotate(qk, cos_T1D, sin_T1C).split([c.n_heads, c.n_kv_heads], dim=1)
        return self.o_proj(attend(self.layer, q_THD, k_TKD, v_TKD).flatten(1))


class GatedMLP(nn.Module):
    """SwiGLU (arXiv:2002.05202); gate and up are one fused matrix."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate_up_proj = Linear(config.hidden_size, 2 * config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x_Td: Tensor, row_multiple: int = 1) -> Tensor:
        """row_multiple: the caller has padded all rows to it, and here they stay together."""
        return self.down_proj(swiglu(self.gate_up_proj(x_Td)))


class Block(nn.Module):
    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = SelfAttention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = SparseMLP(config) if config.is_sparse(layer) else GatedMLP(config)

    def forward(self, x_Td: Tensor, cos_T1D: Tensor, sin_T1C: Tensor, attend: Attend, row_multiple: int = 1) -> Tensor:
        x_Td = x_Td + self.self_attn(self.input_layernorm(x_Td), cos_T1D, sin_T1C, attend)
        return x_Td + self.mlp(self.post_attention_layernorm(x_Td), row_multiple)


class Decoder(nn.Module):
    """Its matrices are uninitialised memory until weights are loaded, or `init_weights` is called."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([Block(config, layer) for layer in range(config.n_layers)])
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.lm_head = None if config.tied else Linear(config.hidden_size, config.vocab_size, bias=False)
        self.rotary = RotaryTable(config)
        self.checkpointing = False

    @property
    def head_weight(self) -> Tensor:
        """[V, d]; the embedding itself when tied."""
        return self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def forward(self, tokens_T: Tensor, positions_T: Tensor, attend: Attend, row_multiple: int = 1) -> Tensor:
        """Normalised hidden states [T, d]; `hidden @ head_weight.T` are the logits of the *next* token.

        row_multiple: who pads T to a multiple for the sake of stable products names it here, for products with fewer rows.
        """
        x_Td = self.embed_tokens(tokens_T)
        cos_T1D, sin_T1C = self.rotary(positions_T, x_Td.dtype)
        for block in self.layers:
            if self.checkpointing and torch.is_grad_enabled():
                x_Td = checkpoint(block, x_Td, cos_T1D, sin_T1C, attend, row_multiple, use_reentrant=False)
            else:
                x_Td = block(x_Td, cos_T1D, sin_T1C, attend, row_multiple)
        return self.norm(x_Td)

    def init_weights(self, seed: int) -> Decoder:
        """Matrices normal(0, init_std), biases 0, norms 1; the same bits on every device for one seed."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if parameter.dim() >= 2:
                    values = torch.empty(parameter.shape).normal_(0.0, self.config.init_std, generator=generator)
                    parameter.copy_(values)
                elif name.endswith("bias"):
                    parameter.zero_()
                else:
                    parameter.fill_(1.0)
        return self
