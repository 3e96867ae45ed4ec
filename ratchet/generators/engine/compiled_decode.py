"""A decoding step as one call, where the compiled kernels are in use and the decoder is of the
plain kind.

PyTorch's way there is some twenty calls a layer, at each of which threads meet. Here a thread takes
rows through all layers.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ratchet.generators.engine.kv_cache import KVCache
from ratchet.kernels import cpu
from ratchet.models.decoder import Block, Decoder, GatedMLP
from ratchet.models.parallel.sharding import Undivided

# entries of all matrices: of more, a few rows are better shared by all threads, as PyTorch's
# products are
MOST = 2**24
Layers = list[list[Tensor | None]]  # as `Layer` of decoding.c has them


class CompiledDecoder:
    """It reads the decoder's own weights at every step."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        blocks = list(decoder.layers.values())
        dense = [
            block
            for block in blocks
            if isinstance(block, Block) and isinstance(block.mlp, GatedMLP)
        ]
        self._modules = [_modules(block) for block in dense]
        self._maps = [linear for _, linear in decoder.inner_maps]
        small = sum(linear.in_features * linear.out_features for linear in self._maps) <= MOST
        self._possible = (
            len(dense) == len(blocks) and small and decoder.config.head_dim <= cpu.WIDEST_HEAD
        )

    def layers(self) -> Layers | None:
        """The weights as they are now; None where it can't make a step with them. By the modules'
        own tables: a step of a small model would feel what `nn.Module` takes to find attributes."""
        decoder = self.decoder
        if not self._possible or not cpu.used() or not isinstance(decoder.seams, Undivided):
            return None
        # an adapter, quantised
        if any(own is not None for linear in self._maps for own in linear._modules.values()):
            return None
        layers: Layers = []
        for modules in self._modules:
            layers.append([])
            for module in modules:
                layers[-1] += (None,) if module is None else module._parameters.values()
        assert decoder.norm is not None
        assert decoder.embed_tokens is not None
        # the cache has the dtype of the last
        ends = decoder.norm.weight, decoder.embed_tokens.weight, decoder.head_weight
        weights = [*ends, *(weight for layer in layers for weight in layer if weight is not None)]
        return (
            layers
            if cpu.fits(*weights) and all(weight.is_contiguous() for weight in weights)
            else None
        )

    @torch.no_grad()
    def __call__(
        self, layers: Layers, tokens_N: Tensor, positions_N: Tensor, slots_N: Tensor, cache: KVCache
    ) -> Tensor:
        """As `Decoder.forward` with a `DecodeAttention` of the cache, for any of its slots: [N,
        d]."""
        decoder, c = self.decoder, self.decoder.config
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


def _modules(block: Block) -> list[nn.Module | None]:
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
