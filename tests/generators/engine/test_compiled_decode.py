"""A decoding step, or the prefill of short prompts, as one call: what PyTorch's operations give, to
rounding, and bits that depend on no neighbour."""

import copy
import platform
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from ratchet.config.model_shape.decoder_config import DecoderConfig
from ratchet.generators.engine.attention import DecodeAttention, PrefillAttention
from ratchet.generators.engine.compiled_decode import MAX_PROMPT, CompiledDecoder
from ratchet.generators.engine.kv_cache import KVCache
from ratchet.kernels import bfloat16, build, cpu
from ratchet.models.decoder import Decoder
from ratchet.observe.tracing.profiler import EMBEDDING, read_events

pytestmark = pytest.mark.needs("cc")
SHAPE = DecoderConfig(67, 64, 3, 4, 2, 32, 200, max_positions=600, init_std=0.2)
SHAPES = {
    "plain": SHAPE,
    "biases, no norms of heads": replace(
        SHAPE, qk_norm=False, qkv_bias=True, out_bias=True, mlp_bias=True
    ),
    "untied": replace(SHAPE, tied=False),
    "tiny": replace(SHAPE, hidden_size=5, head_dim=4, intermediate_size=3),
    "odd sizes": replace(SHAPE, hidden_size=52, head_dim=6, intermediate_size=37),
    "long sums": replace(SHAPE, hidden_size=300, intermediate_size=700, n_layers=1),
    "wide heads": replace(SHAPE, head_dim=512, n_heads=2, n_kv_heads=1, n_layers=1),
}


@pytest.fixture(autouse=True)
def compiled(kernels):
    kernels(True)


def decoder_of(shape):
    made = Decoder(shape).init_weights(0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in made.parameters():
            weight.add_(0.05 * torch.randn(weight.shape, generator=generator))
    return made


def cache_of(shape, rows=80, tokens=300):
    cache = KVCache(shape, max_rounded_slots=rows, dtype=torch.float32, device=torch.device("cpu"))
    cache.reserve(rows, tokens)
    generator = torch.Generator().manual_seed(2)
    for store in (*cache.keys, *cache.values):
        store.normal_(generator=generator)
    return cache


def step(decoder, tokens, positions, cache, slots=None):
    ours = CompiledDecoder(decoder)
    return ours(
        ours.layers(),
        tokens,
        positions,
        torch.arange(len(tokens)) if slots is None else slots,
        cache,
    )


def fed(rows, longest=299):
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, 67, (rows,), generator=generator), torch.randint(
        0, longest, (rows,), generator=generator
    )


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_it_is_the_decoders_forward(shape, threads):
    decoder, (tokens, positions) = decoder_of(shape), fed(75)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        caches = cache_of(shape), cache_of(shape)
        expected = decoder(tokens, positions, DecodeAttention(caches[0], positions, 300))
        found = step(decoder, tokens, positions, caches[1])
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5)
    for one, other in zip(
        (*caches[0].keys, *caches[0].values), (*caches[1].keys, *caches[1].values), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-5)


def prompts_of(lengths):
    """Return tokens, positions and slots of prompts laid end to end, in the last slots first."""
    tokens, _ = fed(sum(lengths))
    positions = torch.cat([torch.arange(length) for length in lengths])
    slots = torch.from_numpy(np.repeat(79 - np.arange(len(lengths)), lengths))
    return tokens, positions, slots


def prefill(decoder, prompts, lengths, cache):
    ours = CompiledDecoder(decoder)
    return ours(ours.layers(), *prompts, cache, lengths)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_prefill_is_the_decoders_forward(shape, threads):
    lengths = [1, MAX_PROMPT, 3, 17, 40, 5]
    decoder, prompts = decoder_of(shape), prompts_of(lengths)
    tokens, positions, slots = prompts
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        caches = cache_of(shape, tokens=80), cache_of(shape, tokens=80)
        attend = PrefillAttention(caches[0], np.array(lengths), slots, positions)
        expected = decoder(tokens, positions, attend)
        found = prefill(decoder, prompts, lengths, caches[1])
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5)
    for one, other in zip(
        (*caches[0].keys, *caches[0].values), (*caches[1].keys, *caches[1].values), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-5)
    for i, end in enumerate(np.cumsum(lengths).tolist()):  # each alone has the same bits
        rows = slice(end - lengths[i], end)
        alone = prefill(decoder, [part[rows] for part in prompts], lengths[i : i + 1], caches[0])
        assert torch.equal(alone, found[rows])


@pytest.mark.medium
@pytest.mark.skipif(platform.machine() != "x86_64", reason="other processors have one width")
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_it_is_for_processors_without_avx512(shape, kernels, monkeypatch):
    # A compiler that tunes for such a processor does not merge each product with its sum.
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-mno-avx512f", "-mtune=znver2"))
    monkeypatch.setattr(cpu, "load_library", build.load_library.__wrapped__)
    kernels(True)
    decoder, (tokens, positions) = decoder_of(shape), fed(75)
    expected = decoder(tokens, positions, DecodeAttention(cache_of(shape), positions, 300))
    found = step(decoder, tokens, positions, cache_of(shape))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5)
    for rows in (7, 9):  # one vector and two
        alone = step(decoder, tokens[:rows], positions[:rows], cache_of(shape))
        assert torch.equal(alone, found[:rows])


@pytest.mark.medium
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_rows_bits_depend_on_no_other(shape):
    decoder, (tokens, positions) = decoder_of(shape), fed(75)
    whole = step(decoder, tokens, positions, cache_of(shape))
    for rows in (1, 7, 16, 17, 33, 64):
        assert torch.equal(
            step(decoder, tokens[:rows], positions[:rows], cache_of(shape)), whole[:rows]
        )
    some = torch.tensor([70, 3, 4, 41])
    assert torch.equal(
        step(decoder, tokens[some], positions[some], cache_of(shape), slots=some), whole[some]
    )


@pytest.mark.skipif(
    not build.has_bfloat16_instructions(), reason="the processor does not multiply in bfloat16"
)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_in_bfloat16_it_rounds_where_the_forward_does(shape):
    bfloat16.set_enabled(True)
    decoder, (tokens, positions) = decoder_of(shape), fed(75)
    if any(linear.in_features % 2 for _, linear in decoder.layer_linears):
        assert CompiledDecoder(decoder).layers() is None  # the instructions multiply pairs
        return
    whole = step(decoder, tokens, positions, cache_of(shape))
    for rows in (1, 7, 16, 17, 33, 64):
        assert torch.equal(
            step(decoder, tokens[:rows], positions[:rows], cache_of(shape)), whole[:rows]
        )
    expected = decoder(tokens, positions, DecodeAttention(cache_of(shape), positions, 300))
    bfloat16.set_enabled(False)
    unrounded = step(decoder, tokens, positions, cache_of(shape))
    error = (whole - expected).abs().mean()
    assert error < 3e-4
    assert error < (unrounded - expected).abs().mean() / 10


def test_changed_weights_are_seen():
    """Also where nothing says so: PyTorch's fused optimizers, say, count no version."""
    decoder, (tokens, positions) = decoder_of(SHAPE), fed(5)
    before = step(decoder, tokens, positions, cache_of(SHAPE))
    decoder.layers["1"].mlp.down_proj.weight.data.mul_(2)
    changed = step(decoder, tokens, positions, cache_of(SHAPE))
    expected = decoder(tokens, positions, DecodeAttention(cache_of(SHAPE), positions, 300))
    assert not torch.equal(before, changed)
    torch.testing.assert_close(changed, expected, rtol=1e-4, atol=2e-5)


def test_a_profile_counts_its_products():
    decoder, (tokens, positions) = decoder_of(SHAPE), fed(5)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, with_flops=True) as taken:
        step(decoder, tokens, positions, cache_of(SHAPE))
    events = read_events(taken)
    assert sum(event.flop for event in events) == 2 * 5 * sum(
        linear.weight.numel() for _, linear in decoder.layer_linears
    )
    assert [event.shapes[1] for event in events if event.name == EMBEDDING] == [[5]]


def test_broken_weights_show():
    decoder, (tokens, positions) = decoder_of(SHAPE), fed(5)
    with torch.no_grad():
        decoder.layers["1"].self_attn.o_proj.weight[3, 3] = torch.nan
    assert step(decoder, tokens, positions, cache_of(SHAPE)).isnan().any()


def test_nothing_is_differentiated_through_it():
    decoder, (tokens, positions) = decoder_of(SHAPE), fed(3)
    assert not step(decoder, tokens, positions, cache_of(SHAPE)).requires_grad


def of_another_dtype(decoder):
    decoder.norm.weight.data = decoder.norm.weight.data.double()


def strided(decoder):
    decoder.layers["0"].self_attn.o_proj.weight.data = torch.zeros(64, 256)[:, ::2]


def with_an_adapter(decoder):
    decoder.layers["0"].self_attn.o_proj.adapter = nn.Identity()


def divided(decoder):
    decoder.set_tp_comm(object())


def quantised(decoder):
    decoder.layers["2"].mlp.down_proj.quantise("float8")


@pytest.mark.parametrize(
    "change",
    [of_another_dtype, strided, with_an_adapter, divided, quantised],
    ids=lambda f: f.__name__,
)
def test_what_a_decoder_may_become_that_it_is_not_for(change):
    decoder = decoder_of(SHAPE)
    ours = CompiledDecoder(decoder)
    assert ours.layers()
    change(decoder)
    assert ours.layers() is None


SPARSE = replace(
    SHAPE, family="qwen3_moe", n_experts=4, experts_per_token=2, expert_intermediate_size=32
)


@pytest.mark.parametrize(
    "other", [replace(SHAPE, head_dim=514), replace(SHAPE, intermediate_size=30_000), SPARSE]
)
def test_what_it_is_not_for(other):
    assert CompiledDecoder(Decoder(other)).layers() is None


def test_a_copy_is_computed_alike(kernels):
    copied = CompiledDecoder(copy.deepcopy(decoder_of(SHAPE)))
    assert copied.layers()
    kernels(False)
    assert copied.layers() is None
