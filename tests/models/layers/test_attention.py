import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ratchet.models.layers.attention import (
    CALL_COST_PAIRS,
    MAX_PADDING_FACTOR,
    PackedAttention,
    _group_lengths,
)

HEADS, KV_HEADS, DIM = 4, 2, 8


def qkv(tokens, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(tokens, heads, DIM, generator=generator, dtype=dtype)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]


def oracle(lengths, q, k, v):
    """softmax(q k / sqrt(D)) v, one sequence and one head at a time."""
    out, start = torch.zeros_like(q), 0
    for length in lengths:
        rows = slice(start, start + length)
        for head in range(HEADS):
            shared = head // (HEADS // KV_HEADS)
            scores = q[rows, head] @ k[rows, shared].T / math.sqrt(DIM)
            scores = scores.masked_fill(
                torch.ones(length, length, dtype=torch.bool).triu(1), -torch.inf
            )
            out[rows, head] = scores.softmax(-1) @ v[rows, shared]
        start += length
    return out


LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=8)


@given(LENGTHS)
def test_equals_separate_sequences_in_value_and_gradient(lengths):
    inputs = [x.requires_grad_() for x in qkv(sum(lengths))]
    upstream = qkv(sum(lengths), seed=1)[0]
    found, expected = PackedAttention(lengths)(0, *inputs), oracle(lengths, *inputs)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    for ours, theirs in zip(
        *(torch.autograd.grad(out, inputs, upstream) for out in (found, expected)), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@given(LENGTHS)
def test_calls_waste_little_and_keep_order(lengths):
    runs = _group_lengths(lengths)
    assert [length for run in runs for length in run] == lengths
    for run in runs:
        assert (
            len(run) * max(run) ** 2
            <= MAX_PADDING_FACTOR * sum(n * n for n in run) + CALL_COST_PAIRS
        )


def test_equal_lengths_are_one_call_without_padding():
    (bucket,) = PackedAttention([3, 3, 3]).buckets
    assert bucket.padding is None


@pytest.mark.parametrize("lengths", [[4, 4, 4], [4, 5, 5], [2, 9, 3]])
def test_a_neighbour_changes_nothing_at_all(lengths):
    tokens, own = sum(lengths), slice(lengths[0], lengths[0] + lengths[1])
    inputs = qkv(tokens, dtype=torch.float32)
    others = qkv(tokens, seed=1, dtype=torch.float32)
    for kept, changed in zip(inputs, others, strict=True):
        changed[own] = kept[own]
    before, after = (PackedAttention(lengths)(0, *x) for x in (inputs, others))
    assert torch.equal(before[own], after[own])
    assert not torch.equal(before, after)


@pytest.mark.parametrize("lengths", [[4, 4, 4], [4, 5, 5], [2, 9, 3]])
def test_a_neighbour_gets_no_gradient_at_all(lengths):
    inputs = [x.requires_grad_() for x in qkv(sum(lengths), dtype=torch.float32)]
    own = slice(lengths[0], lengths[0] + lengths[1])
    out = PackedAttention(lengths)(0, *inputs)
    for grad in torch.autograd.grad(out[own].square().sum(), inputs):
        assert grad[own].abs().sum() > 0
        grad[own] = 0
        assert not grad.any()
