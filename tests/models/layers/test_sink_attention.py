"""Attention with sinks and windows against the softmax written out, in float64."""

import pytest
import torch

from ratchet.config.model_shape.megatron_decoder import SinkAttentionShape
from ratchet.models.layers.packed_inputs import pack_inputs
from ratchet.models.layers.sink_attention import SinkAttention, add_sinks
from ratchet.models.parallel.context_parallel import ContextAttention, ContextSplit
from ratchet.models.parallel.sharding import ShardIndex

HEADS, KV_HEADS, DIM, WINDOW = 4, 2, 6, 3
SHAPE = SinkAttentionShape(WINDOW, windowed_layers=(0,))
LENGTHS = [9, 7, 4, 1, 9]


def oracle(lengths, q_THD, k_TKD, v_TKD, sinks_H, window):
    """exp(q k / sqrt(D)) v / (exp(sink) + sum exp(q k / sqrt(D))), one sequence and head at a
    time."""
    out, start = [], 0
    for n in lengths:
        distance = torch.arange(n)[:, None] - torch.arange(n)
        sees = (distance >= 0) & (distance < window)
        heads = []
        for h in range(HEADS):
            rows = slice(start, start + n)
            k, v = (x[rows, h * KV_HEADS // HEADS] for x in (k_TKD, v_TKD))
            scores = (q_THD[rows, h] @ k.T / DIM**0.5).exp() * sees
            heads.append(scores @ v / (sinks_H[h].exp() + scores.sum(1, keepdim=True)))
        out.append(torch.stack(heads, 1))
        start += n
    return torch.cat(out)


@pytest.mark.parametrize("shares_prefixes", [False, True])
@pytest.mark.parametrize(("layer", "window"), [(0, WINDOW), (1, 100)])
def test_values_and_gradients_are_those_of_the_softmax_with_a_sink(layer, window, shares_prefixes):
    generator = torch.Generator().manual_seed(0)
    # The same tokens at the start of each sequence, so that a tree has a prefix to share.
    tokens = torch.cat(
        [torch.arange(n) + (torch.arange(n) > 4) * 10 * i for i, n in enumerate(LENGTHS)]
    )
    positions = torch.cat([torch.arange(n) for n in LENGTHS])
    packed = pack_inputs(tokens, positions, LENGTHS, shares_prefixes=shares_prefixes)
    assert (len(packed.tokens_U) < len(tokens)) == shares_prefixes
    # What each token computes is a function of the token, so that shared ones have the same.
    tables = [
        torch.randn(100, heads, DIM, generator=generator, dtype=torch.float64, requires_grad=True)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]
    sinks = torch.randn(HEADS, generator=generator, dtype=torch.float64, requires_grad=True)
    inputs = (*tables, sinks)
    wanted = oracle(LENGTHS, *(table[tokens] for table in tables), sinks, window)
    attend = SinkAttention(packed.attend, SHAPE, "cpu")
    qkv = add_sinks(*(table[packed.tokens_U] for table in tables), sinks)
    found = packed.unfold(attend(layer, *qkv)[..., :DIM].flatten(1)).view_as(wanted)
    torch.testing.assert_close(found, wanted)
    factors = torch.randn(wanted.shape, generator=generator, dtype=torch.float64)
    for mine, theirs in zip(
        torch.autograd.grad((found * factors).sum(), inputs),
        torch.autograd.grad((wanted * factors).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize(("layer", "window"), [(0, WINDOW), (1, 100)])
def test_ranks_that_share_out_the_tokens_compute_the_same(layer, window, monkeypatch):
    """With the keys and values of all ranks in the order in which they are gathered."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(sum(LENGTHS), heads, DIM, generator=generator, dtype=torch.float64)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    sinks = torch.randn(HEADS, generator=generator, dtype=torch.float64)
    splits = [ContextSplit.from_lengths(LENGTHS, ShardIndex(rank, 2)) for rank in (0, 1)]
    qkv = add_sinks(q, k, v, sinks)
    gathered = [torch.cat([x[split.tokens] for split in splits]) for x in qkv[1:]]
    monkeypatch.setattr(ContextAttention, "gather", lambda *_: gathered)
    found = torch.empty_like(q)
    for split in splits:
        attend = SinkAttention(ContextAttention(split, None, "cpu"), SHAPE, "cpu")
        found[split.tokens] = attend(layer, *(x[split.tokens] for x in qkv))[..., :DIM]
    torch.testing.assert_close(found, oracle(LENGTHS, q, k, v, sinks, window))
