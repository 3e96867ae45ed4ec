"""The compiled kernels against the formulas in float64, and what they promise: bits that depend on
no neighbour."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

from ratchet.config.model_shape.decoder_config import DecoderConfig
from ratchet.generators.engine.attention import DecodeAttention
from ratchet.generators.engine.batch_invariance import measure_stable_rows
from ratchet.generators.engine.kv_cache import KVCache
from ratchet.kernels import cpu
from ratchet.models.decoder import Decoder
from ratchet.models.layers.attention import PackedAttention
from ratchet.models.ops import linear, rms_norm, split_heads, swiglu
from ratchet.observe.tracing.profiler import read_events

EPS = 1e-5
SIZES = st.sampled_from([2, 6, 16, 31, 32, 48, 64, 100, 128, 384])


@pytest.fixture(autouse=True)
def compiled(kernels):
    kernels(True)


@pytest.fixture(scope="module", autouse=True)
def several_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def normal(*shape, seed=0, scale=1.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def both(formula, exact, *inputs, seed=9):
    """[(ours, in float64)] of the outputs and of every input's gradient, under a random gradient of
    each output."""
    found = []
    for function, dtype in ((formula, torch.float32), (exact, torch.float64)):
        own = [None if x is None else x.to(dtype, copy=True).requires_grad_() for x in inputs]
        outs = function(*own)
        outs = outs if isinstance(outs, tuple) else (outs,)
        given_ = [normal(*out.shape, seed=seed + i).to(dtype) for i, out in enumerate(outs)]
        grads = torch.autograd.grad(outs, [x for x in own if x is not None], given_)
        found.append([*(out.detach() for out in outs), *grads])
    return list(zip(*found, strict=True))


def agree(pairs):
    for ours, exact in pairs:
        assert ours.dtype == torch.float32
        scale = exact.abs().max().item()
        torch.testing.assert_close(ours.double(), exact, rtol=2e-6, atol=2e-6 * max(scale, 1e-30))


def normed_exactly(x, weight):
    return weight * x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()


@given(rows=st.integers(0, 40), size=SIZES, scale=st.sampled_from([1e-3, 1.0, 1e3]))
def test_rms_norm(rows, size, scale):
    x, weight = normal(rows, size, scale=scale), normal(size, seed=1) + 1
    if not rows:
        assert rms_norm(x, weight, EPS).shape == (0, size)
        return
    agree(both(lambda x, w: rms_norm(x, w, EPS), normed_exactly, x, weight))


@given(rows=st.integers(1, 40), size=SIZES, scale=st.sampled_from([0.1, 1.0, 30.0]))
def test_swiglu(rows, size, scale):
    agree(
        both(
            swiglu, lambda x: F.silu(x[:, :size]) * x[:, size:], normal(rows, 2 * size, scale=scale)
        )
    )


def test_the_gate_at_its_ends():
    """silu is 0 far below 0, x far above, and neither overflows; what is not finite stays so."""
    gate = torch.tensor([[-1e4, -100.0, 0.0, 100.0, 1e4, math.nan, math.inf]])
    out = swiglu(torch.cat([gate, torch.ones_like(gate)], dim=1))[0]
    torch.testing.assert_close(
        out[:5], torch.tensor([0.0, 0.0, 0.0, 100.0, 1e4]), rtol=1e-6, atol=1e-30
    )
    assert out[5].isnan()
    assert out[6] == math.inf


def turned(x, cos, sin):
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


@given(
    rows=st.integers(1, 30),
    kv=st.integers(1, 3),
    group=st.integers(1, 3),
    half=st.sampled_from([1, 3, 16, 32, 50]),
    normed=st.booleans(),
)
def test_heads(rows, kv, group, half, normed):
    n_heads, size = kv * group, 2 * half
    angles = normal(rows, 1, half)
    tables = torch.cat([angles.cos()] * 2, dim=-1), angles.sin()
    norms = (normal(size, seed=1) + 1, normal(size, seed=2) + 1) if normed else (None, None)

    def exact(qkv, q_weight, k_weight):
        def part(x, weight):
            x = x if weight is None else normed_exactly(x, weight)
            return turned(x, angles.double().cos(), angles.double().sin())

        q, k, v = qkv.split([n_heads, kv, kv], dim=1)
        return part(q, q_weight), part(k, k_weight), v

    def ours(qkv, q_weight, k_weight):
        return split_heads(qkv, (q_weight, k_weight), *tables, (n_heads, kv), EPS)

    agree(both(ours, exact, normal(rows, n_heads + 2 * kv, size), *norms))


@pytest.mark.parametrize("normed", [False, True])
def test_heads_are_the_same_with_and_without_gradient_and_take_any_layout_of_it(normed):
    angles, norms = (
        normal(5, 1, 8),
        (normal(16, seed=1), normal(16, seed=2)) if normed else (None, None),
    )
    tables = torch.cat([angles.cos()] * 2, dim=-1), angles.sin()
    qkv = normal(5, 8, 16).requires_grad_()
    outs = split_heads(qkv, norms, *tables, (4, 2), EPS)
    with torch.no_grad():
        for out, alone in zip(outs, split_heads(qkv, norms, *tables, (4, 2), EPS), strict=True):
            assert torch.equal(out, alone)
    grads = [normal(*out.shape, seed=i) for i, out in enumerate(outs)]
    strange = [g.transpose(0, 1).contiguous().transpose(0, 1) for g in grads]
    first, second = (
        torch.autograd.grad(outs, qkv, g, retain_graph=True)[0] for g in (grads, strange)
    )
    assert torch.equal(first, second)


@given(
    rows=st.integers(1, 9),
    kv=st.integers(1, 3),
    group=st.integers(1, 3),
    size=st.sampled_from([2, 24, 32, 64, 128, 130]),
    longest=st.sampled_from([1, 5, 255, 256, 257, 600]),
    scale=st.sampled_from([1.0, 20.0]),
)
def test_decode(rows, kv, group, size, longest, scale):
    """Across the ends of tiles, and with scores whose exponentials would overflow. What a weight is
    off by grows with the scores."""
    near = 1e-5 + 2e-6 * scale
    capacity = longest + 3
    keys, values = (
        normal(rows + 1, kv, capacity, size),
        normal(rows + 1, kv, capacity, size, seed=1),
    )
    positions = (torch.arange(rows) * 7919) % longest
    q, k, v = (
        normal(rows, kv * group, size, seed=2, scale=scale),
        normal(rows, kv, size, seed=3),
        normal(rows, kv, size, seed=4),
    )
    stored = keys.clone(), values.clone()
    out = cpu.decode(*stored, q, k, v, positions)
    for n, position in enumerate(positions.tolist()):
        keys[n, :, position], values[n, :, position] = k[n], v[n]
        own_k, own_v = (
            x[n, :, : position + 1].double().repeat_interleave(group, dim=0) for x in (keys, values)
        )
        weights = (own_k @ q[n].double()[..., None] * size**-0.5).softmax(1)
        torch.testing.assert_close(out[n].double(), (weights * own_v).sum(1), rtol=near, atol=near)
    for now, expected in zip(stored, (keys, values), strict=True):  # nothing else is written
        assert torch.equal(now, expected)


def test_a_rows_bits_depend_on_no_neighbour_and_no_thread():
    keys, values = normal(6, 2, 300, 32), normal(6, 2, 300, 32, seed=1)
    q, k, v = normal(6, 4, 32, seed=2), normal(6, 2, 32, seed=3), normal(6, 2, 32, seed=4)
    positions = torch.tensor([299, 0, 17, 256, 255, 31])
    together = cpu.decode(keys, values, q, k, v, positions)
    torch.set_num_threads(1)
    for n in range(6):
        one = slice(n, n + 1)
        assert torch.equal(
            cpu.decode(keys[one], values[one], q[one], k[one], v[one], positions[one])[0],
            together[n],
        )
    x, weight = normal(3000, 64), normal(64, seed=5)
    alone = [f.requires_grad_() for f in (x.clone(), weight.clone())]
    grads = torch.autograd.grad(rms_norm(*alone, EPS).square().sum(), alone)
    torch.set_num_threads(3)
    for one, more in zip(
        grads, torch.autograd.grad(rms_norm(*alone, EPS).square().sum(), alone), strict=True
    ):
        assert torch.equal(one, more)


@pytest.mark.parametrize("broken", ["query", "key", "value"])
def test_what_is_not_a_number_shows(broken):
    tensors = {
        "query": normal(1, 2, 32),
        "key": normal(1, 1, 32, seed=1),
        "value": normal(1, 1, 32, seed=2),
    }
    tensors[broken][0, 0, 3] = math.nan
    out = cpu.decode(
        torch.zeros(1, 1, 4, 32), torch.zeros(1, 1, 4, 32), *tensors.values(), torch.tensor([2])
    )
    assert out.isnan().any()


@pytest.mark.parametrize("bias", [False, True])
def test_products_by_onednn(bias, monkeypatch):
    """Whatever the vendor: the library is part of PyTorch. Of small matrices MKL keeps the
    products."""
    monkeypatch.setattr(cpu, "_onednn", True)
    x, weight, added = (
        normal(37, 256),
        normal(512, 256, seed=1, scale=0.1),
        normal(512, seed=2) if bias else None,
    )
    calls = []
    monkeypatch.setattr(cpu, "product", lambda *a, then=cpu.product: calls.append(a) or then(*a))
    if bias:
        agree(both(linear, lambda x, w, b: x @ w.T + b, x, weight, added))
    else:
        agree(both(linear, lambda x, w: x @ w.T, x, weight))
    assert len(calls) == 1
    assert torch.equal(linear(x, weight[:256]), F.linear(x, weight[:256]))
    assert len(calls) == 1
    frozen = x.clone().requires_grad_()
    linear(frozen, weight).sum().backward()
    torch.testing.assert_close(frozen.grad, weight.sum(0).expand(37, -1), rtol=1e-4, atol=1e-4)


SHAPE = DecoderConfig(
    vocab_size=40,
    hidden_size=64,
    intermediate_size=96,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    head_dim=16,
    max_positions=64,
)


@pytest.mark.parametrize("qk_norm", [False, True])
def test_a_whole_decoder_computes_what_pytorchs_operations_do(qk_norm, kernels):
    decoder = Decoder(replace(SHAPE, qk_norm=qk_norm)).init_weights(0)
    tokens, positions = torch.arange(24) % 40, torch.cat([torch.arange(10), torch.arange(14)])
    found = []
    for compiled in (True, False):
        kernels(compiled)
        decoder.zero_grad()
        hidden = decoder(tokens, positions, PackedAttention([10, 14]))
        (hidden * normal(24, 64)).sum().backward()
        found.append(
            [hidden.detach(), *(p.grad.clone() for p in decoder.parameters() if p.grad is not None)]
        )
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5 * theirs.abs().max().item())


def test_what_lies_elsewhere_is_left_to_pytorch():
    """The C would read between, or behind, what is there."""
    x, weight = normal(3, 8), normal(16, seed=1)
    torch.testing.assert_close(rms_norm(x, weight[::2], EPS), normed_exactly(x, weight[::2]))
    with pytest.raises(RuntimeError, match="size"):
        rms_norm(x, weight[:4], EPS)
    with pytest.raises(RuntimeError):
        swiglu(normal(3, 7))
    angles = normal(6, 1, 4)
    cos, sin, qkv = torch.cat([angles.cos()] * 2, dim=-1), angles.sin(), normal(6, 4, 8)
    found = split_heads(
        qkv, (weight[::2], weight[::2]), cos.expand(6, 1, 8).clone(), sin, (2, 1), EPS
    )
    expected = split_heads(qkv, (weight[::2].clone(),) * 2, cos, sin, (2, 1), EPS)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    for tables in ((cos[:3], sin[:3]), (cos, sin[:3]), (cos[..., :4], sin)):
        with pytest.raises(RuntimeError, match="size"):
            split_heads(qkv, (None, None), *tables, (2, 1), EPS)


def test_positions_that_the_kernel_cant_read_are_left_to_pytorch():
    q, k, v = normal(2, 4, 16), normal(2, 2, 16, seed=1), normal(2, 2, 16, seed=2)

    def attended(positions, longest=6):
        cache = KVCache(SHAPE, max_rounded_slots=2, dtype=torch.float32, device=torch.device("cpu"))
        cache.reserve(2, 32)
        return DecodeAttention(cache, positions, longest)(0, q, k, v)

    expected = attended(torch.tensor([3, 5]))
    for positions in (torch.tensor([3, 0, 5, 0])[::2], torch.tensor([3, 5], dtype=torch.int32)):
        torch.testing.assert_close(attended(positions), expected)
    with pytest.raises((IndexError, RuntimeError)):  # behind the end of a slot
        attended(torch.tensor([3, 32]), longest=33)


def test_rows_are_counted_out_for_either_library(monkeypatch):
    """Layers' maps are oneDNN's; the head, experts and adapters stay MKL's, which may need more
    rows."""
    decoder = Decoder(replace(SHAPE, vocab_size=2048)).init_weights(0)
    monkeypatch.setattr(cpu, "_onednn", True)
    then = F.linear
    monkeypatch.setattr(
        F, "linear", lambda x, w, b=None: then(x, w, b) + (len(x) < 60 and len(w) == 2048)
    )
    assert measure_stable_rows(decoder) == 64


def test_a_profile_counts_products_by_onednn(monkeypatch):
    monkeypatch.setattr(cpu, "_onednn", True)
    weight = normal(512, 256).requires_grad_()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, with_flops=True) as taken:
        linear(normal(37, 256).requires_grad_(), weight).sum().backward()
    assert sum(event.flop for event in read_events(taken)) == 3 * 2 * 37 * 256 * 512


def test_other_tensors_are_left_to_pytorch():
    assert cpu.is_supported(torch.ones(2))
    for other in (
        torch.ones(2, dtype=torch.float64),
        torch.ones(2, dtype=torch.bfloat16),
        torch.ones(2, device="meta"),
    ):
        assert not cpu.is_supported(torch.ones(2), other)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not cpu.is_supported(torch.ones(2))
    cpu.set_enabled(False)
    assert not cpu.is_supported(torch.ones(2))
