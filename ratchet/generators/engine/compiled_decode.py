"""Run a whole decoding step as one call of a compiled kernel, for plain decoders on a CPU.

PyTorch needs some twenty calls a layer, and its threads synchronise at each. In the kernel, each
thread computes its rows through all layers.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ratchet.generators.engine.kv_cache import KVCache
from ratchet.kernels import cpu
from ratchet.models.decoder import Decoder, DecoderLayer, GatedMLP
from ratchet.models.parallel.sharding import NoTPComm

# Maximum number of entries of all matrices. For larger models and few rows PyTorch is faster,
# because all its threads share each matrix product.
MAX_ENTRIES = 2**24
Layers = list[list[Tensor | None]]  # by layer, in the order of the struct `Layer` in decoding.c


class CompiledDecoder:
    """A compiled decoding step, which reads the decoder's own weights at every call."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        blocks = list(decoder.layers.values())
        dense = [
            block
            for block in blocks
            if isinstance(block, DecoderLayer) and isinstance(block.mlp, GatedMLP)
        ]
        self._modules = [_modules(block) for block in dense]
        self._maps = [linear for _, linear in decoder.inner_maps]
        small = (
            sum(linear.in_features * linear.out_features for linear in self._maps) <= MAX_ENTRIES
        )
        self._possible = (
            len(dense) == len(blocks) and small and decoder.config.head_dim <= cpu.MAX_HEAD_DIM
        )

    def layers(self) -> Layers | None:
        """Return the current weights by layer; None if the kernel can't compute with them.

        `_parameters` and `_modules` are read directly, because attribute lookups of `nn.Module`
        would take a noticeable part of a small model's step.
        """
        decoder = self.decoder
        if not self._possible or not cpu.is_enabled() or not isinstance(decoder.tp_comm, NoTPComm):
            return None
        # A linear map's submodule is an adapter or a quantised matrix, which the kernel can't read.
        if any(child is not None for linear in self._maps for child in linear._modules.values()):
            return None
        layers: Layers = []
        for modules in self._modules:
            layers.append([])
            for module in modules:
                layers[-1] += (None,) if module is None else module._parameters.values()
        assert decoder.norm is not None
        assert decoder.embed_tokens is not None
        # The KV cache has the dtype of the head's weight.
        ends = decoder.norm.weight, decoder.embed_tokens.weight, decoder.head_weight
        weights = [*ends, *(weight for layer in layers for weight in layer if weight is not None)]
        return (
            layers
            if cpu.is_supported(*weights) and all(weight.is_contiguous() for weight in weights)
            else None
        )

    @torch.no_grad()
    def __call__(
        self, layers: Layers, tokens_N: Tensor, positions_N: Tensor, slots_N: Tensor, cache: KVCache
    ) -> Tensor:
        """Return hidden states [N, d] of one new token in each of N slots of the cache.

        This computes the same as `Decoder.forward` with a `DecodeAttention`.

        layers: the result of `layers()`.
        """
        decoder = self.decoder
        c = decoder.config
        assert decoder.norm is not None
        assert int(positions_N.max()) < cache.capacity
        assert int(slots_N.max()) < cache.rows
        x_Nd = decoder.embed(tokens_N)
        whole = [
            [*layer, *store] for layer, *store in zip(layers, cache.keys, cache.values, strict=True)
        ]
        sizes = (
            c.hidden_size,
            c.n_heads,
            c.n_kv_heads,
            cache.capacity,
            c.head_dim,
            c.intermediate_size,
        )
        tables = decoder.rotary(positions_N, x_Nd.dtype)
        cpu.step(
            whole, x_Nd, decoder.norm.weight, tables, (positions_N, slots_N), sizes, c.norm_eps
        )
        return x_Nd


def _modules(block: DecoderLayer) -> list[nn.Module | None]:
    attention, mlp = block.self_attn, block.mlp
    assert isinstance(mlp, GatedMLP)
    before = [
        block.input_layernorm,
        attention.qkv_proj,
        attention.q_norm,
        attention.k_norm,
        attention.o_proj,
    ]
    return [*before, block.post_attention_layernorm, mlp.gate_up_proj, mlp.down_proj]
