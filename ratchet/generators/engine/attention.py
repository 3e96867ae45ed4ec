"""Attention over the KV cache: prefill of whole prompts, and decoding of one token per request.

Both classes are passed to `Decoder.forward` as `attend`. They are batch-invariant (measured on CPUs
with AVX2 and AVX-512): a request's bits do not depend on the other requests in the call. A prompt
is padded to a length that depends only on its own length. A decoding step sums values in tiles that
do not depend on the longest request. With compiled kernels each request is computed by itself
(`compiled_decode` does this for a whole step).

T = tokens, N = requests, H = query heads, K = key/value heads, M = N * K, G = H / K, D = head_dim,
L = attended length (a multiple of `KVCache.stride`), B = prompts of one call.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from ratchet.generators.engine.kv_cache import KVCache
from ratchet.kernels import cpu
from ratchet.models.accelerator import attend_grouped
from ratchet.utils.transfer import upload

# Tokens of one partial sum. MKL splits longer sums into pieces that depend on the whole length
# (seen from 200 tokens on).
TILE = 128
PROMPT_STRIDE = 16  # tokens; prompts are padded to a multiple


class DecodeAttention:
    """The attention of one new token in each of the first N slots.

    It also writes the new keys and values to the cache.

    Args:
        positions_N: positions of the new tokens, int64.
        longest: number of tokens of the longest request, the new token included.
    """

    def __init__(self, cache: KVCache, positions_N: Tensor, longest: int) -> None:
        self.cache = cache
        self.n_rows = len(positions_N)
        self.positions_N = positions_N
        self.slots_N = torch.arange(self.n_rows, device=positions_N.device)
        fits_cache = self.n_rows <= cache.n_slots and longest <= cache.capacity
        are_positions_supported = positions_N.dtype is torch.int64 and cpu.has_layout(
            positions_N, self.n_rows
        )
        self.is_compiled = (
            fits_cache
            and are_positions_supported
            and cache.config.head_dim <= cpu.MAX_HEAD_DIM
            and cpu.is_supported(cache.keys[0])
        )
        if self.is_compiled:
            return
        length = min(-(-longest // cache.stride) * cache.stride, cache.capacity)
        unseen_NL = torch.arange(length, device=positions_N.device) > positions_N[:, None]
        bias_NL = torch.zeros(unseen_NL.shape, dtype=cache.dtype, device=unseen_NL.device)
        bias_NL.masked_fill_(unseen_NL, float("-inf"))
        self.bias_M1L = bias_NL.repeat_interleave(cache.config.n_kv_heads, dim=0)[:, None]
        self.cache_views = cache.get_window(self.n_rows, length)
        needs_tiles = cache.dtype.itemsize >= 4 and positions_N.device.type == "cpu"
        self.kernel = _attend_tiled if needs_tiles else _attend_fused

    def __call__(self, layer: int, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor) -> Tensor:
        if self.is_compiled:
            return cpu.decode(
                self.cache.keys[layer],
                self.cache.values[layer],
                q_NHD,
                k_NKD,
                v_NKD,
                self.positions_N,
            )
        self.cache.write(layer, self.slots_N, self.positions_N, k_NKD, v_NKD)
        k_MLD, v_MLD = self.cache_views[layer]
        q_MGD = q_NHD.reshape(len(k_MLD), -1, q_NHD.shape[2])
        return self.kernel(q_MGD, k_MLD, v_MLD, self.bias_M1L).view(q_NHD.shape)


def _attend_tiled(q_MGD: Tensor, k_MLD: Tensor, v_MLD: Tensor, bias_M1L: Tensor) -> Tensor:
    """Compute attention by matrix products in tiles: batch-invariant on a CPU (see TILE)."""
    # baddbmm would not be batch-invariant here.
    scores_MGL = torch.bmm(q_MGD * q_MGD.shape[2] ** -0.5, k_MLD.transpose(1, 2))
    weights_MGL = scores_MGL.add_(bias_M1L).softmax(-1)
    if weights_MGL.shape[2] <= TILE:
        return torch.bmm(weights_MGL, v_MLD)
    out = torch.bmm(weights_MGL[..., :TILE], v_MLD[:, :TILE])
    for start in range(TILE, weights_MGL.shape[2], TILE):
        out.baddbmm_(weights_MGL[..., start : start + TILE], v_MLD[:, start : start + TILE])
    return out


def _attend_fused(q_MGD: Tensor, k_MLD: Tensor, v_MLD: Tensor, bias_M1L: Tensor) -> Tensor:
    """Compute attention by PyTorch's fused kernel, which keeps scores in float32.

    It serves accelerators and narrow dtypes, whose scores must not be rounded.
    """
    mask = bias_M1L.expand(-1, q_MGD.shape[1], -1)
    return F.scaled_dot_product_attention(
        q_MGD[None], k_MLD[None], v_MLD[None], attn_mask=mask[None]
    )[0]


@dataclass(frozen=True)
class _Bucket:
    """The prompts that are padded to one width, as the cells of a [B, width] table."""

    n_prompts: int
    # int64 [B * width]: index of each cell's token among the T tokens. Padding repeats the prompt's
    # last token, which real tokens can't attend to, because attention is causal.
    gather_indices: Tensor
    cell_indices: Tensor  # cell of each real token
    token_indices: Tensor  # index of each real token among the T tokens


class PrefillAttention:
    """The causal attention within each of several prompts that are packed end to end.

    Keys and values of the prompts' n tokens are written to the slots `slots_n` and the positions
    `positions_n` of the cache (both int64). Tokens after them are padding; their output is 0.
    """

    def __init__(
        self, cache: KVCache, lengths: NDArray[np.int64], slots_n: Tensor, positions_n: Tensor
    ) -> None:
        self.cache = cache
        self.slots_n = slots_n
        self.positions_n = positions_n
        self.buckets = _make_buckets(lengths, slots_n.device)

    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        count = len(self.slots_n)
        self.cache.write(layer, self.slots_n, self.positions_n, k_TKD[:count], v_TKD[:count])
        out_THD = torch.zeros_like(q_THD)
        for bucket in self.buckets:
            out_THD.index_copy_(
                0, bucket.token_indices, _attend_causal(bucket, q_THD, k_TKD, v_TKD)
            )
        return out_THD


def _attend_causal(bucket: _Bucket, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
    def to_padded_rows(x: Tensor) -> Tensor:  # [T, heads, D] -> [B, heads, width, D]
        return (
            x.index_select(0, bucket.gather_indices)
            .unflatten(0, (bucket.n_prompts, -1))
            .transpose(1, 2)
        )

    q = to_padded_rows(q_THD)
    k = to_padded_rows(k_TKD)
    v = to_padded_rows(v_TKD)
    return (
        attend_grouped(q, k, v).transpose(1, 2).flatten(0, 1).index_select(0, bucket.cell_indices)
    )


def _make_buckets(lengths: NDArray[np.int64], device: torch.device) -> list[_Bucket]:
    starts = np.cumsum(lengths) - lengths
    widths = -(-lengths // PROMPT_STRIDE) * PROMPT_STRIDE
    buckets = []
    for width in np.unique(widths):
        has_width = widths == width
        offsets = np.arange(width)
        gather_indices = starts[has_width, None] + np.minimum(offsets, lengths[has_width, None] - 1)
        cell_indices = np.flatnonzero(offsets < lengths[has_width, None])
        index = (
            upload(torch.from_numpy(x), device)
            for x in (gather_indices.ravel(), cell_indices, gather_indices.ravel()[cell_indices])
        )
        buckets.append(_Bucket(int(has_width.sum()), *index))
    return buckets
