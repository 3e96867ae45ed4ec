"""Micro-batches in several threads: the same sums, and the same again."""

import asyncio

import pytest
import torch
from learners.test_local import ALGORITHMS, EXPERTS, gradient, groups, learner, model, prepared

from ratchet.config.schema import OptimizerConfig
from ratchet.data.packing import pack
from ratchet.learners.config import LocalConfig
from ratchet.learners.local import LocalLearner
from ratchet.models.scalar_head import ScalarHead
from ratchet.testing.conformance import check_learner


def team(workers, **options):
    return learner(LocalConfig(micro_batch_tokens=8, workers=workers), **options)


@pytest.mark.parametrize("fields", [{}, EXPERTS], ids=["dense", "sparse"])
@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("workers", [2, 3])
def test_gradient_and_metrics_are_those_of_one(name, workers, fields):
    batch, terms = prepared(ALGORITHMS[name])
    expected, sums = gradient(team(1, net=model(**fields)), batch, terms)
    found, others = gradient(team(workers, net=model(**fields)), batch, terms)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    assert sums.keys() == others.keys()
    for key, value in sums.items():
        torch.testing.assert_close(others[key], value, rtol=1e-10, atol=1e-12)


@pytest.mark.medium
@pytest.mark.parametrize("fields", [{}, EXPERTS], ids=["dense", "sparse"])
def test_a_step_can_be_repeated_bit_by_bit_and_leaves_no_gradient_behind(fields):
    batch, terms = prepared(ALGORITHMS["grpo"])
    ends = []
    for _ in range(3):
        made = team(2, net=model(dtype=torch.float32, **fields))
        for _ in range(3):
            asyncio.run(made.update(batch, terms))
        assert all(p.grad is None for hand in made.forwards for _, p in hand.parameters())
        ends.append(torch.cat([p.detach().flatten() for p in made.model.parameters()]))
    assert torch.equal(ends[0], ends[1])
    assert torch.equal(ends[0], ends[2])


@pytest.mark.parametrize("fields", [{}, EXPERTS], ids=["dense", "sparse"])
def test_workers_share_the_weights_and_have_gradients_of_their_own(fields):
    first, second = team(2, net=model(**fields), head=ScalarHead(16).to(torch.float64)).forwards
    for (name, own), (same, twin) in zip(first.parameters(), second.parameters(), strict=True):
        assert name == same
        assert own is not twin
        assert own.data_ptr() == twin.data_ptr()
    # still tied
    assert second.model.decoder.head_weight is second.model.decoder.embed_tokens.weight


def test_scores_are_those_of_one():
    batch = pack(groups())
    wanted = ["logprobs", "entropy", "topk_ids", "topk_logprobs"]
    one, two = (asyncio.run(team(n).score(batch, wanted, top_k=3)) for n in (1, 2))
    for name in wanted:
        torch.testing.assert_close(two[name], one[name], rtol=1e-10, atol=1e-12)
        assert not two[name].requires_grad
    empty = asyncio.run(team(2).score(batch.take([]), ["logprobs"]))
    assert empty["logprobs"].shape == (0,)


def test_a_frozen_role_needs_no_twins():
    frozen = LocalLearner(LocalConfig(workers=2), model().requires_grad_(False))
    assert frozen.forwards[0] is frozen.forwards[1]


@pytest.mark.medium
def test_conformance(tmp_path):
    batch, terms = prepared(ALGORITHMS["grpo"])
    make = lambda: team(2, optimizer=OptimizerConfig(lr=1e-2))  # noqa: E731
    asyncio.run(check_learner(make, batch, terms, tmp_path))
