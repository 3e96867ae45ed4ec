"""A tree of beginnings computes what the sequences apart compute, in value and gradient."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ratchet.config.model_shape.decoder_config import DecoderConfig
from ratchet.models.decoder import Decoder
from ratchet.models.layers import packed_inputs
from ratchet.models.layers.packed_inputs import _share_prefixes
from ratchet.models.layers.prefix_tree import MIN_SHARED_LENGTH, PrefixTree, count_shared_prefix
from ratchet.models.policy import DecoderPolicy

CONFIG = DecoderConfig(
    vocab_size=7,
    hidden_size=16,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    head_dim=4,
    intermediate_size=24,
)
SPARSE = replace(
    CONFIG, family="qwen3_moe", n_experts=4, experts_per_token=2, expert_intermediate_size=12
)


@st.composite
def families(draw: st.DrawFn) -> list[list[int]]:
    """Rows that branch from one another at any place, some of them equal, in any order."""
    token = st.integers(0, 6)
    rows = [draw(st.lists(token, min_size=1, max_size=12))]
    for _ in range(draw(st.integers(0, 9))):
        base = draw(st.sampled_from(rows))
        row = [*base[: draw(st.integers(0, len(base)))], *draw(st.lists(token, max_size=8))]
        rows.append(row or [draw(token)])
    return draw(st.permutations(rows))


def laid(rows: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    tokens = torch.tensor([token for row in rows for token in row])
    positions = torch.cat([torch.arange(len(row)) for row in rows])
    return tokens, positions, [len(row) for row in rows]


@given(families())
def test_every_token_goes_where_its_whole_past_is_the_same(rows: list[list[int]]):
    tokens, positions, lengths = laid(rows)
    tree = PrefixTree.from_sequences(tokens.numpy(), lengths)
    assert sorted(tree.token_index_U.tolist()) == sorted(set(tree.token_index_U.tolist()))
    pasts: dict[int, tuple[int, ...]] = {}
    start = 0
    for row in rows:
        for t in range(len(row)):
            distinct = int(tree.distinct_index_T[start + t])
            assert pasts.setdefault(distinct, tuple(row[: t + 1])) == tuple(row[: t + 1])
        start += len(row)
    assert len(pasts) == len(tree.token_index_U)
    assert [int(positions[t]) for t in tree.token_index_U] == [
        len(pasts[u]) - 1 for u in range(len(tree.token_index_U))
    ]


def test_what_is_shared_by_hand():
    prompt = [1, 2, 3, 4, 5]
    rows = [[*prompt, 6], [0], [*prompt, 6, 6, 6, 6, 1], [*prompt], [*prompt, 6, 6, 6, 6, 2, 2]]
    tree = PrefixTree.from_sequences(
        np.array([token for row in rows for token in row]), [len(row) for row in rows]
    )
    # the prompt; 0; of the three answers that begin with 6, two go on is_replicated
    assert [(s.begin, s.end) for s in tree.segments] == [
        (0, 1),
        (0, 5),
        (5, 6),
        (5, 9),
        (9, 10),
        (9, 11),
    ]
    assert count_shared_prefix([np.array([1, 2]), np.array([1, 2, 3])]) == 2
    assert MIN_SHARED_LENGTH == 4


@pytest.mark.medium
@pytest.mark.parametrize("config", [CONFIG, SPARSE], ids=["dense", "sparse"])
@settings(max_examples=40, deadline=None)
@given(rows=families())
def test_a_tree_equals_the_sequences_apart(config: DecoderConfig, rows: list[list[int]]):
    net = DecoderPolicy(Decoder(config).init_weights(0).double())
    tokens, positions, lengths = laid(rows)
    weights = torch.randn(
        len(tokens),
        CONFIG.hidden_size,
        dtype=torch.float64,
        generator=torch.Generator().manual_seed(1),
    )
    tree = PrefixTree.from_sequences(tokens.numpy(), lengths)
    feed = _share_prefixes(tokens, positions, tree, tokens.device)
    found = feed.unfold(net.decoder(feed.tokens_U, feed.positions_U, feed.attend))
    slopes = torch.autograd.grad((found * weights).sum(), list(net.parameters()), allow_unused=True)
    alone = torch.cat(
        [net.hidden(row, torch.arange(len(row)), [len(row)]) for row in tokens.split(lengths)]
    )
    expected = torch.autograd.grad(
        (alone * weights).sum(), list(net.parameters()), allow_unused=True
    )
    torch.testing.assert_close(found, alone, rtol=1e-10, atol=1e-12)
    for ours, theirs in zip(slopes, expected, strict=True):
        if theirs is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_sharing_is_used_where_it_pays(monkeypatch: pytest.MonkeyPatch):
    net = DecoderPolicy(Decoder(CONFIG).init_weights(0))
    calls = []
    monkeypatch.setattr(
        packed_inputs,
        "TreeAttention",
        lambda *a, real=packed_inputs.TreeAttention: calls.append(1) or real(*a),
    )
    net.hidden(*laid([[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 0]]))
    net.hidden(*laid([[1, 2, 3, 4, 5, 6], [0, 2, 3, 4, 5, 0]]))
    assert calls == [1]


@pytest.mark.medium
@pytest.mark.parametrize("config", [CONFIG, SPARSE], ids=["dense", "sparse"])
@settings(max_examples=40, deadline=None)
@given(rows=families(), data=st.data())
def test_what_nobody_reads_is_left_out_and_changes_nothing(
    config: DecoderConfig, rows: list[list[int]], data: st.DataObject
):
    net = DecoderPolicy(Decoder(config).init_weights(0).double())
    tokens, positions, lengths = laid(rows)
    read = torch.tensor(
        data.draw(st.lists(st.booleans(), min_size=len(tokens), max_size=len(tokens)))
    )
    weights = torch.randn(
        len(tokens),
        CONFIG.hidden_size,
        dtype=torch.float64,
        generator=torch.Generator().manual_seed(1),
    )
    found, whole = (
        net.hidden(tokens, positions, lengths, output_mask_T=read),
        net.hidden(tokens, positions, lengths),
    )
    assert found.shape == whole.shape
    assert found.isfinite().all()
    torch.testing.assert_close(found[read], whole[read], rtol=1e-10, atol=1e-12)
    if read.any():
        slopes, expected = (
            torch.autograd.grad(
                (made * weights)[read].sum(),
                list(net.parameters()),
                materialize_grads=True,
                allow_unused=True,
            )
            for made in (found, whole)
        )
        for ours, theirs in zip(slopes, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_the_last_layer_computes_what_is_read(monkeypatch: pytest.MonkeyPatch):
    """Of a prompt of five tokens and two answers of nine: what predicts the answers, and nothing of
    their last tokens."""
    net = DecoderPolicy(Decoder(CONFIG).init_weights(0))
    computed = []
    for block in net.decoder.layers.values():
        block.mlp.register_forward_hook(lambda _, given, out: computed.append(len(out)))
    read = torch.tensor([False] * 4 + [True] * 9 + [False]).repeat(2)
    net.hidden(*laid([[1, 2, 3, 4, 5, *[0] * 9], [1, 2, 3, 4, 5, *[6] * 9]]), output_mask_T=read)
    assert computed == [5 + 2 * 8] * (CONFIG.n_layers - 1) + [1 + 2 * 8]
