"""The compiled attention of packed segments against PyTorch's in float64, and what it promises:
bits that depend on no neighbour."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ratchet.kernels.attention import MAX_KEYS
from ratchet.models.layers.attention import PackedAttention, TreeAttention
from ratchet.models.layers.prefix_tree import PrefixTree

HEADS, KV_HEADS = 4, 2


@pytest.fixture(autouse=True)
def compiled(kernels):
    kernels(True)


@pytest.fixture(scope="module", autouse=True)
def several_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def qkv(tokens, size=16, heads=HEADS, kv_heads=KV_HEADS):
    return [normal(tokens, n, size, seed=n + i) for i, n in enumerate((heads, kv_heads, kv_heads))]


def uses_kernel(attend) -> bool:
    return "plan" in vars(attend)


def make_tree(rows):
    tokens = np.array([token for row in rows for token in row])
    return TreeAttention(PrefixTree.from_sequences(tokens, [len(row) for row in rows]))


def both(make, inputs, scale=1.0):
    """[(ours, in float64)] of the output and of every input's gradient."""
    found = []
    for dtype in (torch.float32, torch.float64):
        attend = make()
        own = [x.to(dtype, copy=True) for x in inputs]
        own[0].mul_(scale)
        out = attend(0, *(x.requires_grad_() for x in own))
        assert uses_kernel(attend) == (dtype == torch.float32)
        upstream = normal(*out.shape, seed=9).to(dtype)
        found.append([out.detach(), *torch.autograd.grad(out, own, upstream)])
    return zip(*found, strict=True)


def agree(pairs, near=2e-6):
    for ours, exact in pairs:
        assert ours.dtype == torch.float32
        assert (ours.double() - exact).abs().max() <= near * (1 + exact.abs().max())


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    size=st.sampled_from([16, 32, 48, 64]),
    scale=st.sampled_from([1.0, 20.0]),
)
def test_sequences(lengths, kv_heads, group, size, scale):
    """Across the ends of blocks and tiles, and with scores whose exponentials would overflow. What a
    weight is off by grows with the scores."""
    inputs = qkv(sum(lengths), size, kv_heads * group, kv_heads)
    agree(both(lambda: PackedAttention(lengths), inputs, scale), near=5e-6 * scale)


@pytest.mark.parametrize("length", [255, MAX_KEYS])
def test_a_long_sequence(length):
    agree(both(lambda: PackedAttention([length, 3]), qkv(length + 3, heads=2)), near=1e-5)


# Prompts of 5 and 20 tokens whose answers branch again, and a row that shares nothing.
PROMPTS = [[1, 2, 3, 4, 5], [*range(7, 27)]]
ANSWERS = [[], [6], [6, 6, 6, 6, 1], [*[6] * 4, *range(40)], [*range(18)]]
ROWS = [[0, 0], *(prompt + answer for prompt in PROMPTS for answer in ANSWERS)]


def test_a_prefix_tree():
    tree = make_tree(ROWS).tree
    assert len({segment.begin for segment in tree.segments}) > 3
    agree(both(lambda: make_tree(ROWS), qkv(len(tree.token_index_U))), near=5e-6)


def test_a_row_has_the_same_bits_alone_and_in_a_tree():
    attend = make_tree(ROWS)
    tree, inputs = attend.tree, qkv(len(attend.tree.token_index_U))
    out = attend(0, *inputs)
    start = 0
    for row in ROWS:
        index = torch.from_numpy(tree.distinct_index_T[start : start + len(row)])
        alone = PackedAttention([len(row)])(0, *(x[index] for x in inputs))
        assert torch.equal(out[index], alone)
        start += len(row)


def test_threads_and_gradients_change_no_bit():
    found = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        attend = make_tree(ROWS)
        # Values as they come without gradient: a part of a larger tensor.
        inputs = qkv(len(attend.tree.token_index_U), kv_heads=3)[:2]
        inputs = [inputs[0].repeat(1, 3, 1), inputs[1]]
        whole = torch.cat([inputs[1], inputs[1] + 1], dim=1)
        own = [x.requires_grad_() for x in (*inputs, whole[:, 3:])]
        out = attend(0, *own)
        with torch.no_grad():
            assert torch.equal(attend(0, *own), out)
        strange = out.detach().transpose(0, 1).contiguous().transpose(0, 1)
        found.append([out.detach(), *torch.autograd.grad(out, own, strange)])
    assert all(map(torch.equal, *found))


def test_what_is_not_finite_stays_so():
    inputs = qkv(40)
    inputs[1][30] = torch.nan
    out = PackedAttention([20, 20])(0, *inputs)
    assert out[:30].isfinite().all()
    assert out[30:].isnan().all()


@pytest.mark.parametrize(
    ("lengths", "size"), [([MAX_KEYS + 1], 16), ([4, 5], 24)], ids=["long", "other size"]
)
def test_pytorch_attends_where_the_kernel_does_not(lengths, size):
    attend = PackedAttention(lengths)
    attend(0, *qkv(sum(lengths), size))
    assert not uses_kernel(attend)
