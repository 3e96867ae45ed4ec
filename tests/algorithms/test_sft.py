"""Supervised fine-tuning as built from its configuration, against the likelihood written out as a
loop."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from oracles import losses
from oracles import ragged as oracle
from oracles.cases import column, gradient, groups, leaf, outputs, supervised
from oracles.ragged import Row, weights_of

from ratchet.algorithms.base import AlgoState
from ratchet.algorithms.config.sft import SFTConfig
from ratchet.algorithms.sft import build_sft
from ratchet.data.packing import pack

MEANS = [("token_mean", oracle.token_mean), ("sequence_mean", oracle.sequence_mean)]


@pytest.mark.parametrize(("weighting", "mean"), MEANS)
@given(rows=supervised())
def test_negative_log_likelihood_of_the_trained_tokens(weighting, mean, rows: list[Row]):
    algo = build_sft(SFTConfig(weighting=weighting))
    (term,) = algo.losses["policy"]
    batch = algo.weigh(algo.advantage(pack(groups(rows)), AlgoState()), AlgoState())
    logprobs_T = leaf([row.logprobs for row in rows])
    loss, _ = term(outputs(batch, logprobs_T, rows), batch)
    assert loss.item() == pytest.approx(mean(rows, losses.nll(rows)[0]), rel=1e-10, abs=1e-12)
    expected = column([[-w for w in row] for row in weights_of(mean, rows)])
    torch.testing.assert_close(gradient(loss, logprobs_T), expected, rtol=1e-10, atol=1e-12)


def test_it_learns_from_rows_without_a_pass():
    algo = build_sft(SFTConfig())
    assert algo.source == "rows"
    assert algo.passes == ()
