"""Attention over the cache against a float64 softmax written out. N = requests, L = tokens."""

import numpy as np
import pytest
import torch

from ratchet.config.model_shape.decoder_config import DecoderConfig
from ratchet.generators.engine import attention
from ratchet.generators.engine.attention import DecodeAttention, PrefillAttention
from ratchet.generators.engine.kv_cache import KVCache

CONFIG = DecoderConfig(10, 64, 1, 6, 2, 32, 64)


def filled_cache(lengths, seed=0):
    cache = KVCache(CONFIG, max_rounded_slots=64, dtype=torch.float32, device=torch.device("cpu"))
    cache.reserve(len(lengths), max(lengths))
    generator = torch.Generator().manual_seed(seed)
    for store in (cache.keys[0], cache.values[0]):
        store.copy_(torch.randn(store.shape, generator=generator))
    return cache


def oracle(q_HD, k_KLD, v_KLD):
    k, v = (x.double().repeat_interleave(3, dim=0) for x in (k_KLD, v_KLD))
    weights = (q_HD.double()[:, None] @ k.transpose(1, 2) / 32**0.5).softmax(-1)
    return (weights @ v)[:, 0]


@pytest.mark.parametrize("kernel", ["_attend_tiled", "_attend_fused"])
def test_a_decode_step_sees_its_own_slot_up_to_its_own_token(kernel):
    lengths = [1, 5, 300, 17, 128, 129]
    cache = filled_cache(lengths)
    q, k, v = (
        torch.randn(6, heads, 32, generator=torch.Generator().manual_seed(7)) for heads in (6, 2, 2)
    )
    attend = DecodeAttention(cache, torch.tensor(lengths) - 1, max(lengths))
    attend.kernel = getattr(attention, kernel)
    out = attend(0, q, k, v)
    for row, length in enumerate(lengths):
        keys, values = cache.keys[0][row, :, :length], cache.values[0][row, :, :length]
        torch.testing.assert_close(keys[:, -1], k[row])
        torch.testing.assert_close(values[:, -1], v[row])
        torch.testing.assert_close(
            out[row].double(), oracle(q[row], keys, values), atol=1e-5, rtol=1e-5
        )


def test_a_longer_neighbour_changes_no_bit_of_a_decode_step():
    q, k, v = (
        torch.randn(16, heads, 32, generator=torch.Generator().manual_seed(7))
        for heads in (6, 2, 2)
    )
    outs = []
    for longest in (200, 250, 400, 512, 1000):
        cache = filled_cache([1000] * 16)
        lengths = torch.tensor([200] * 15 + [longest])
        outs.append(DecodeAttention(cache, lengths - 1, longest)(0, q, k, v)[:15])
    assert all(torch.equal(out, outs[0]) for out in outs)


def test_prompts_are_causal_alone_and_land_in_their_slots():
    lengths = np.array([3, 17, 16, 1])
    total = int(lengths.sum())
    cache = filled_cache([32] * 5)
    q, k, v = (
        torch.randn(total + 3, heads, 32, generator=torch.Generator().manual_seed(7))
        for heads in (6, 2, 2)
    )
    starts = np.cumsum(lengths) - lengths
    slots = [4, 1, 2, 0]
    rows = torch.from_numpy(np.repeat(slots, lengths))
    positions = torch.cat([torch.arange(length) for length in lengths])
    out = PrefillAttention(cache, lengths, rows, positions)(0, q, k, v)
    assert not out[total:].any()
    for prompt, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
        for i in range(length):
            seen = slice(start, start + i + 1)
            expected = oracle(q[start + i], k[seen].transpose(0, 1), v[seen].transpose(0, 1))
            torch.testing.assert_close(out[start + i].double(), expected, atol=1e-5, rtol=1e-5)
        for stored, written in ((cache.keys[0], k), (cache.values[0], v)):
            expected = written[start : start + length].transpose(0, 1)
            torch.testing.assert_close(stored[slots[prompt], :, :length], expected)
