from dataclasses import replace

import pytest
import torch

from ratchet.config.model_shape.decoder_config import DecoderConfig
from ratchet.generators.engine.kv_cache import MIN_MULTIPLICATIONS, STRIDE, KVCache

CONFIG = DecoderConfig(10, 64, 2, 4, 2, 32, 64)


def make_cache(max_rounded_slots=48):
    return KVCache(
        CONFIG, max_rounded_slots=max_rounded_slots, dtype=torch.float32, device=torch.device("cpu")
    )


def test_it_grows_by_doubling_up_to_the_slots_allowed_and_keeps_what_it_holds():
    cache = make_cache()
    cache.reserve(16, 10)
    assert (cache.n_slots, cache.capacity) == (16, cache.stride)
    k, v = torch.randn(2, 2, 32), torch.randn(2, 2, 32)
    cache.write(1, torch.tensor([3, 15]), torch.tensor([0, 9]), k, v)
    cache.reserve(17, cache.stride + 1)
    assert (cache.n_slots, cache.capacity) == (32, 2 * cache.stride)
    cache.reserve(40, 1)
    assert (cache.n_slots, cache.capacity) == (48, 2 * cache.stride)
    torch.testing.assert_close(cache.keys[1][[3, 15], :, [0, 9]], k)
    torch.testing.assert_close(cache.values[1][[3, 15], :, [0, 9]], v)
    assert int((cache.keys[1] != 0).any(-1).sum()) == 4
    assert not cache.keys[0].any()


def test_its_size_is_told_before_it_is_taken():
    cache = make_cache()
    told = cache.get_bytes(20, 100)
    assert cache.n_slots == 0
    cache.reserve(20, 100)
    assert told == sum(x.numel() * 4 for x in (*cache.keys, *cache.values)) == cache.get_bytes(1, 1)


def test_moving_slots_copies_what_is_used():
    cache = make_cache()
    cache.reserve(4, 8)
    for store in (*cache.keys, *cache.values):
        store.copy_(torch.arange(4.0)[:, None, None, None].expand_as(store))
    cache.copy_slots(torch.tensor([3, 2]), torch.tensor([0, 1]), 5)
    for store in (*cache.keys, *cache.values):
        assert store[:, 0, 4, 0].tolist() == [3, 2, 2, 3]
        assert store[:, 0, 5, 0].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("head_dim", "stride"), [(8, 64), (16, 32), (24, 32), (32, 16), (64, 16), (256, 16)]
)
def test_small_heads_get_a_stride_that_keeps_every_product_in_blas(head_dim, stride):
    cache = KVCache(
        replace(CONFIG, head_dim=head_dim),
        max_rounded_slots=1,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    assert cache.stride == stride
    assert stride * head_dim >= MIN_MULTIPLICATIONS
    assert stride % STRIDE == 0


def test_a_window_shows_what_is_stored_also_after_the_cache_has_grown():
    cache = make_cache()
    cache.reserve(4, 8)
    before = cache.get_window(2, 8)
    assert cache.get_window(2, 8) is before
    for capacity in (8, 100):
        cache.reserve(4, capacity)
        cache.values[1][1, 1, 7] = capacity
        for keys, values in cache.get_window(2, 8):
            assert keys.shape == values.shape == (2 * CONFIG.n_kv_heads, 8, CONFIG.head_dim)
        assert cache.get_window(2, 8)[1][1][CONFIG.n_kv_heads + 1, 7].eq(capacity).all()
    assert cache.get_window(2, 8) is not before
