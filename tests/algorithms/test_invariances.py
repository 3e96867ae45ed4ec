"""What takes no part leaves everything alone. How a batch is cut, packed and ordered:
`tests/testing/test_algorithms.py`.

T = all tokens laid end to end.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles.cases import column, gradient, groups, leaf, outputs, rollouts
from oracles.ragged import Row, flat
from torch import Tensor

from ratchet.algorithms.advantages.group_baselines import group_relative
from ratchet.algorithms.base import Algorithm, AlgorithmTerm, AlgoState
from ratchet.algorithms.kl import kl_penalty
from ratchet.algorithms.loss_aggregation import fixed_length, prompt_mean, sequence_mean, token_mean
from ratchet.algorithms.losses.common import entropy_bonus
from ratchet.algorithms.losses.policy import clipped_surrogate
from ratchet.batch import Batch
from ratchet.config.registry import KINDS
from ratchet.data.packing import pack
from ratchet.testing.check_command import build_builtin
from ratchet.testing.synthetic import Draw, TinyRole
from ratchet.testing.synthetic_update import Update, differentiate, require_equal

WEIGHTINGS = st.sampled_from(
    [token_mean, sequence_mean, prompt_mean, partial(fixed_length, length=7)]
)
COLUMNS = ("logprobs", "old_logprobs", "ref_logprobs", "entropy")


def algorithm(weighting) -> Algorithm:
    surrogate = partial(clipped_surrogate, clip_low=0.2, clip_high=0.28, dual_clip=3.0)
    penalty = partial(kl_penalty, objective="reverse", estimator="k3")
    terms = (
        AlgorithmTerm("pg", surrogate, weighting, needs=frozenset({"logprobs", "old_logprobs"})),
        AlgorithmTerm(
            "kl", penalty, weighting, needs=frozenset({"logprobs", "old_logprobs"}), coef=0.1
        ),
        AlgorithmTerm(
            "entropy", entropy_bonus, token_mean, needs=frozenset({"entropy"}), coef=0.01
        ),
    )
    return Algorithm("test", {"policy": terms}, "rollouts", advantage=group_relative)


def with_references(rows: list[Row]) -> list[Row]:
    return [
        replace(r, ref_logprobs=[0.9 * lp - 0.05 if lp else 0.0 for lp in r.old_logprobs])
        for r in rows
        if r.counts
    ]


def prepare(rows: list[Row], algo: Algorithm) -> Batch:
    batch = pack(groups(rows)).fill_tokens(ref_logprobs=column([row.ref_logprobs for row in rows]))
    return algo.weigh(algo.advantage(batch, AlgoState()), AlgoState())


def loss_and_slopes(batch: Batch, rows: list[Row], algo: Algorithm) -> tuple[Tensor, Tensor]:
    """(loss, d loss / d logprob [T]) of all terms together."""
    logprobs_T, entropy_T = (
        leaf([row.logprobs for row in rows]),
        column([row.entropy for row in rows]),
    )
    out = outputs(batch, logprobs_T, rows, entropy_T)
    loss = torch.zeros((), dtype=torch.float64)
    for term in algo.losses["policy"]:
        loss = loss + term(out, batch)[0]
    return loss.detach(), gradient(loss, logprobs_T)


def by_row(values_T: Tensor, rows: list[Row]) -> dict[int, list[float]]:
    """Per-token values by the identity of their row."""
    parts = values_T.split([len(row.tokens) for row in rows])
    return {id(row): part.tolist() for row, part in zip(rows, parts, strict=True)}


def assert_same(found: dict[int, list[float]], expected: dict[int, list[float]]) -> None:
    assert found.keys() == expected.keys()
    for key in expected:
        assert found[key] == pytest.approx(expected[key], rel=1e-10, abs=1e-13)


def noise(row: Row, numbers: list[float]) -> list[float]:
    """The row's numbers at the tokens that train, others elsewhere."""
    return [
        x if trains else 1.7 * t - 3
        for t, (trains, x) in enumerate(zip(row.mask, numbers, strict=True))
    ]


@given(rows=rollouts(), weighting=WEIGHTINGS)
def test_tokens_that_do_not_train_reach_nothing(rows: list[Row], weighting):
    """Prompt, environment and baseline tokens may hold any numbers in any column."""
    rows, algo = with_references(rows), algorithm(weighting)
    noisy = [
        replace(row, **{name: noise(row, getattr(row, name)) for name in COLUMNS}) for row in rows
    ]
    loss, slopes = loss_and_slopes(prepare(rows, algo), rows, algo)
    noisy_loss, noisy_slopes = loss_and_slopes(prepare(noisy, algo), noisy, algo)
    assert torch.equal(noisy_loss, loss)
    assert torch.equal(noisy_slopes, slopes)
    assert not slopes[~torch.tensor(flat([row.mask for row in rows]), dtype=torch.bool)].any()


@given(rows=rollouts(), weighting=WEIGHTINGS)
def test_rows_that_take_no_part_leave_the_rest_alone(rows: list[Row], weighting):
    """Baseline rows, taken out beforehand, change no loss and no gradient."""
    algo = algorithm(weighting)
    rows = with_references(rows)  # failures are not even packed
    alone = [row for row in rows if row.takes_part]
    loss, slopes = loss_and_slopes(prepare(rows, algo), rows, algo)
    expected_loss, expected = loss_and_slopes(prepare(alone, algo), alone, algo)
    assert loss.item() == pytest.approx(expected_loss.item(), rel=1e-10, abs=1e-13)
    found = by_row(slopes, rows)
    assert_same({id(row): found[id(row)] for row in alone}, by_row(expected, alone))


@given(rows=rollouts())
def test_zero_advantage_rows_still_feel_the_kl(rows: list[Row]):
    """A group of equal rewards has no policy gradient, and the penalty pulls it all the same."""
    rows = [replace(row, reward=1.0, ending="scored") for row in with_references(rows)]
    algo = algorithm(token_mean)
    batch = prepare(rows, algo)
    for term, moves in zip(algo.losses["policy"][:2], (False, True), strict=True):
        logprobs_T = leaf([row.logprobs for row in rows])
        slopes_T = gradient(term(outputs(batch, logprobs_T, rows), batch)[0], logprobs_T)
        trains = torch.tensor(flat([row.mask for row in rows]), dtype=torch.bool)
        assert bool(slopes_T.any()) == (moves and bool(trains.any()))


class Noisy(TinyRole):
    """Says anything where nothing trains, as far as it is asked about predictions."""

    def outputs(self, batch: Batch, needs: Collection[str]) -> dict[str, Tensor]:
        columns = super().outputs(batch, needs).items()
        return {
            n: column if n in ("scores", "token_scores") else anything(batch, column)
            for n, column in columns
        }


def anything(batch: Batch, column: Tensor) -> Tensor:
    mask = batch.trainable_T.reshape(-1, *[1] * (column.dim() - 1))
    return torch.where(mask, column, -3.7) if column.is_floating_point() else column


@pytest.mark.parametrize("kind", KINDS["algorithm"])
def test_no_loss_reads_what_does_not_train(kind: str):
    """Of any built-in algorithm, after the estimators."""
    algo = build_builtin(kind)
    update = Update.from_groups(algo, Draw(seed=5).groups(algo))
    noisy_columns = {
        name: anything(update.batch, column) for name, column in update.batch.token_columns.items()
    }
    models = {name: Noisy(name, drift=0.1) for name in algo.losses}
    noisy = replace(update, models=models, batch=update.batch.fill_tokens(**noisy_columns))
    for role in algo.losses:
        rows = range(update.batch.n_sequences)
        require_equal(
            differentiate(noisy, role, rows),
            differentiate(update, role, rows),
            "with noise where nothing trains",
        )
