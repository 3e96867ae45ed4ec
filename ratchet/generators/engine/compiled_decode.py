"""Run a decoding step and the prefill of short prompts as one call of a compiled kernel.

This is for plain decoders on a CPU. PyTorch needs about twenty calls a layer, and its threads
synchronise at each call. In the kernel, each thread computes its rows through all layers.

T = new tokens, d = hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ratchet.generators.engine.kv_cache import KVCache
from ratchet.kernels import bfloat16, cpu
from ratchet.models.decoder import Decoder, DecoderLayer, GatedMLP, Linear
from ratchet.models.parallel.sharding import NoTPComm

# Maximum number of matrix entries, summed over all matrices. For larger models and few rows PyTorch
# is faster, because all its threads share each matrix product.
MAX_ENTRIES = 2**24
# Maximum number of tokens of a prompt. One thread computes a prompt; PyTorch divides longer ones.
MAX_PROMPT = cpu.MAX_CHUNK_ROWS
Layers = list[list[Tensor | None]]  # by layer, in the order of the struct `Layer` in decoding.c


class CompiledDecoder:
    """Compiled decoding and prefill, which read the decoder's own weights at every call."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        blocks = list(decoder.layers.values())
        dense_blocks = [
            block
            for block in blocks
            if isinstance(block, DecoderLayer) and isinstance(block.mlp, GatedMLP)
        ]
        self._modules = [_list_modules(block) for block in dense_blocks]
        self._linears = [linear for _, linear in decoder.layer_linears]
        is_small = (
            sum(linear.in_features * linear.out_features for linear in self._linears) <= MAX_ENTRIES
        )
        self._is_supported = (
            len(dense_blocks) == len(blocks)
            and is_small
            and decoder.config.head_dim <= cpu.MAX_HEAD_DIM
        )
        # Instructions for bfloat16 multiply pairs of terms.
        self._has_even_sizes = not any(linear.in_features % 2 for linear in self._linears)

    def layers(self) -> Layers | None:
        """Return the current weights by layer; None if the kernel can't compute with them."""
        decoder = self.decoder
        if (
            not self._is_supported
            or not cpu.is_enabled()
            or not isinstance(decoder.tp_comm, NoTPComm)
        ):
            return None
        is_rounded = bfloat16.is_enabled()
        if is_rounded and not (self._has_even_sizes and cpu.has_bfloat16_step()):
            return None
        # `_modules` and `_parameters` are read directly, because attribute lookups of `nn.Module`
        # would take a noticeable part of a small model's step. A linear layer's submodule is an
        # adapter or a quantised matrix, which the kernel can't read.
        if any(child is not None for linear in self._linears for child in linear._modules.values()):
            return None
        layers: Layers = []
        for modules in self._modules:
            layers.append([])
            for module in modules:
                layers[-1] += (None,) if module is None else module._parameters.values()
        assert decoder.norm is not None
        assert decoder.embed_tokens is not None
        # The KV cache has the dtype of the head's weight.
        outer_weights = decoder.norm.weight, decoder.embed_tokens.weight, decoder.head_weight
        weights = [
            *outer_weights,
            *(weight for layer in layers for weight in layer if weight is not None),
        ]
        if not (cpu.is_supported(*weights) and all(weight.is_contiguous() for weight in weights)):
            return None
        return self._round_matrices() if is_rounded else layers

    def _round_matrices(self) -> Layers:
        """Return the current weights by layer, with the matrices in bfloat16."""
        layers: Layers = []
        for modules in self._modules:
            layers.append([])
            for module in modules:
                if isinstance(module, Linear):
                    layers[-1] += module.rounded.get(module.weight), module.bias
                else:
                    layers[-1] += (None,) if module is None else module._parameters.values()
        return layers

    @torch.no_grad()
    def __call__(
        self,
        layers: Layers,
        tokens_T: Tensor,
        positions_T: Tensor,
        slots_T: Tensor,
        cache: KVCache,
        lengths: Sequence[int] | None = None,
    ) -> Tensor:
        """Return hidden states [T, d] of new tokens, each at its position in its slot of the cache.

        This computes the same as `Decoder.forward` with a `DecodeAttention` or `PrefillAttention`.

        Args:
            layers: the result of `layers()`.
            lengths: numbers of tokens that have one slot, in order, each at most MAX_PROMPT; None:
                each token has a slot of its own.
        """
        n_tokens, threads = len(tokens_T), torch.get_num_threads()
        chunks_per_thread = -(-n_tokens // (threads * cpu.MAX_CHUNK_ROWS))
        rows = -(-n_tokens // (threads * chunks_per_thread))
        if lengths is None:
            chunk_starts = [*range(0, n_tokens, rows), n_tokens]
        else:
            chunk_starts = _divide(lengths, rows)
        decoder = self.decoder
        config = decoder.config
        assert decoder.norm is not None
        assert int(positions_T.max()) < cache.capacity
        assert int(slots_T.max()) < cache.n_slots
        x_Td = decoder.embed(tokens_T)
        layers_with_cache = [
            [*layer, *key_value_store]
            for layer, *key_value_store in zip(layers, cache.keys, cache.values, strict=True)
        ]
        sizes = (
            config.hidden_size,
            config.n_heads,
            config.n_kv_heads,
            cache.capacity,
            config.head_dim,
            config.intermediate_size,
        )
        tables = decoder.rotary(positions_T, x_Td.dtype)
        cpu.step(
            layers_with_cache,
            x_Td,
            decoder.norm.weight,
            tables,
            (positions_T, slots_T),
            sizes,
            config.norm_eps,
            chunk_starts,
        )
        return x_Td


def _divide(lengths: Sequence[int], rows: int) -> list[int]:
    """Return the first row of each chunk, and the end of the last one.

    A chunk has some whole sequences of these lengths, together about `rows`.
    """
    starts, end = [0], 0
    for length in lengths:
        chunk_rows = end - starts[-1]
        if chunk_rows and (chunk_rows >= rows or chunk_rows + length > cpu.MAX_CHUNK_ROWS):
            starts.append(end)
        end += length
    return [*starts, end]


def _list_modules(block: DecoderLayer) -> list[nn.Module | None]:
    attention, mlp = block.self_attn, block.mlp
    assert isinstance(mlp, GatedMLP)
    return [
        block.input_layernorm,
        attention.qkv_proj,
        attention.q_norm,
        attention.k_norm,
        attention.o_proj,
        block.post_attention_layernorm,
        mlp.gate_up_proj,
        mlp.down_proj,
    ]
