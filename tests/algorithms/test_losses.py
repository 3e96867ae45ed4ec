"""Supervised and surrogate losses: value and gradient against `oracles.losses`, and by hand. The KL
terms are in `test_kl_penalty.py`, the other policy losses in `test_policy_losses.py`, the critic's
in `test_value_loss.py`.

T = all tokens laid end to end.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import advantages, categorical, losses
from oracles import ragged as oracle
from oracles.cases import (
    VOCAB,
    bigram,
    column,
    gradient,
    groups,
    kept,
    leaf,
    outputs,
    rollouts,
    supervised,
)
from oracles.ragged import Ragged, Row, weights_of
from torch import Tensor

from ratchet.algorithms.advantages.group_baselines import group_relative
from ratchet.algorithms.base import Algorithm, AlgorithmTerm, AlgoState
from ratchet.algorithms.loss_aggregation import fixed_length, prompt_mean, sequence_mean, token_mean
from ratchet.algorithms.losses.common import entropy_bonus, nll
from ratchet.algorithms.losses.policy import clipped_surrogate
from ratchet.batch import Batch
from ratchet.data.packing import pack

CLIPS = st.sampled_from([(0.2, 0.2), (0.2, 0.28), (0.05, 0.6)])
DUAL = st.sampled_from([None, 1.2, 3.0])
TABLES = st.lists(
    st.lists(st.floats(-2, 2), min_size=VOCAB, max_size=VOCAB), min_size=VOCAB, max_size=VOCAB
)
MEANS = [
    (token_mean, oracle.token_mean, ()),
    (sequence_mean, oracle.sequence_mean, ()),
    (prompt_mean, oracle.prompt_mean, ()),
    (partial(fixed_length, length=7), oracle.fixed_length, (7,)),
]
close = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-10)


def weigh(batch: Batch, *terms: AlgorithmTerm) -> Batch:
    return Algorithm("test", {"policy": terms}, "rollouts").weigh(batch, AlgoState())


def times(a: Ragged, b: Ragged) -> Ragged:
    return [
        [x * y for x, y in zip(a_row, b_row, strict=True)]
        for a_row, b_row in zip(a, b, strict=True)
    ]


def live(rows: list[Row]) -> Ragged:
    return [row.logprobs for row in rows]


def assert_metrics(metrics: dict[str, Tensor], shape: torch.Size) -> None:
    for name, value in metrics.items():
        assert value.shape == shape, name
        assert not value.requires_grad, name


# --- negative log-likelihood


@pytest.mark.parametrize(("weighting", "mean", "options"), MEANS)
@given(rows=supervised())
def test_nll_equals_the_oracle(weighting, mean, options, rows: list[Row]):
    term = AlgorithmTerm("nll", nll, weighting)
    batch, logprobs_T = weigh(pack(groups(rows)), term), leaf(live(rows))
    loss, _ = term(outputs(batch, logprobs_T, rows), batch)
    x, slope = losses.nll(rows)
    assert loss.item() == pytest.approx(mean(rows, x, *options), rel=1e-10, abs=1e-12)
    close(gradient(loss, logprobs_T), column(times(weights_of(mean, rows, *options), slope)))


@given(rows=supervised(), table=TABLES)
def test_nll_through_a_model(rows: list[Row], table: list[list[float]]):
    term = AlgorithmTerm("nll", nll, token_mean)
    batch, parameters = (
        weigh(pack(groups(rows)), term),
        torch.tensor(table, dtype=torch.float64, requires_grad=True),
    )
    loss, _ = term(outputs(batch, bigram(parameters, rows)[0], rows), batch)
    rows = [
        replace(r, logprobs=lp)
        for r, lp in zip(rows, categorical.bigram_logprobs(table, rows), strict=True)
    ]
    x, slope = losses.nll(rows)
    assert loss.item() == pytest.approx(oracle.token_mean(rows, x), rel=1e-10, abs=1e-12)
    by_logprob = times(weights_of(oracle.token_mean, rows), slope)
    close(
        gradient(loss, parameters),
        column(categorical.bigram_gradient(table, rows, by_logprob)).view_as(parameters),
    )


def test_nll_trains_exactly_the_trainable_tokens():
    # Three trained tokens of probability 1/2, 1/4 and 1/8, an environment's between them: (1 + 2 +
    # 3) ln 2 / 3.
    ln2 = math.log(2)
    logprobs = [-9, -ln2, -9, -2 * ln2, -3 * ln2]
    row = Row(
        "g",
        0,
        [1, 2, 3, 1, 2],
        [False, True, False, True, True],
        "unjudged",
        logprobs=logprobs,
        old_logprobs=logprobs,
    )
    term = AlgorithmTerm("nll", nll, token_mean)
    batch, logprobs_T = weigh(pack(groups([row])), term), leaf([row.logprobs])
    loss, _ = term(outputs(batch, logprobs_T, [row]), batch)
    assert loss.item() == pytest.approx(2 * ln2)
    assert gradient(loss, logprobs_T).tolist() == pytest.approx([0, -1 / 3, 0, -1 / 3, -1 / 3])


# --- clipped surrogate


@pytest.mark.parametrize(("weighting", "mean", "options"), MEANS)
@given(rows=rollouts(), clip=CLIPS, dual=DUAL, scale=st.sampled_from(["std", "none"]))
def test_grpo_equals_the_oracle(weighting, mean, options, rows: list[Row], clip, dual, scale: str):
    """Advantage, clipping and weighting together, from ragged rows to one number and its
    gradient."""
    spec = {"clip_low": clip[0], "clip_high": clip[1], "dual_clip": dual}
    a = advantages.on_tokens(rows, advantages.group_relative(rows, scale=scale, epsilon=1e-6))
    x, slope = losses.clipped_surrogate(rows, a, **spec)
    expected = column(kept(rows, times(weights_of(mean, rows, *options), slope)))
    value = mean(rows, x, *options)

    rows = kept(rows, rows)
    term = AlgorithmTerm("pg", partial(clipped_surrogate, **spec), weighting)
    batch = weigh(group_relative(pack(groups(rows)), AlgoState(), scale=scale), term)  # pyright: ignore[reportArgumentType]
    logprobs_T = leaf(live(rows))
    loss, metrics = term(outputs(batch, logprobs_T, rows), batch)
    assert loss.item() == pytest.approx(value, rel=1e-10, abs=1e-12)
    close(gradient(loss, logprobs_T), expected)
    assert all(not metric.requires_grad and metric.isfinite() for metric in metrics.values())


@given(rows=rollouts(), table=TABLES, clip=CLIPS, dual=DUAL)
def test_grpo_through_a_model(rows: list[Row], table: list[list[float]], clip, dual):
    spec = {"clip_low": clip[0], "clip_high": clip[1], "dual_clip": dual}
    rows = [
        replace(r, logprobs=lp)
        for r, lp in zip(rows, categorical.bigram_logprobs(table, rows), strict=True)
    ]
    a = advantages.on_tokens(rows, advantages.group_relative(rows, scale="std", epsilon=1e-6))
    x, slope = losses.clipped_surrogate(rows, a, **spec)
    by_logprob = times(weights_of(oracle.sequence_mean, rows), slope)
    expected = column(categorical.bigram_gradient(table, rows, by_logprob))
    value = oracle.sequence_mean(rows, x)

    rows = kept(rows, rows)
    if not rows:
        return
    term = AlgorithmTerm("pg", partial(clipped_surrogate, **spec), sequence_mean)
    batch = weigh(group_relative(pack(groups(rows)), AlgoState()), term)
    parameters = torch.tensor(table, dtype=torch.float64, requires_grad=True)
    loss, _ = term(outputs(batch, bigram(parameters, rows)[0], rows), batch)
    assert loss.item() == pytest.approx(value, rel=1e-10, abs=1e-12)
    close(gradient(loss, parameters), expected.view_as(parameters), atol=1e-9)


def surrogate_of_one_token(
    ratio: float, advantage: float, **spec
) -> tuple[float, float, dict[str, float]]:
    """(x, dx/dlogprob, metrics) of the second of two tokens."""
    row = Row("g", 0, [1, 2], [False, True], reward=1.0, old_logprobs=[0.0, -1.0])
    batch = pack(groups([row])).fill_tokens(
        advantages=torch.tensor([0.0, advantage], dtype=torch.float64)
    )
    logprobs_T = leaf([[0.0, -1.0 + math.log(ratio)]])
    x_T, metrics = clipped_surrogate(outputs(batch, logprobs_T, [row]), batch, **spec)
    assert_metrics(metrics, x_T.shape)
    return (
        x_T[1].item(),
        gradient(x_T[1], logprobs_T)[1].item(),
        {k: v[1].item() for k, v in metrics.items()},
    )


@pytest.mark.parametrize(
    ("advantage", "ratio", "x", "slope"),
    [
        # A > 0: only the upper bound stops the gradient
        (2.0, 1.5, -2.4, 0.0),  # -min(1.5 * 2, 1.2 * 2)
        (2.0, 1.1, -2.2, -2.2),  # inside
        (2.0, 0.5, -1.0, -1.0),  # below: a good token that became rarer may still be pulled up
        # A < 0: only the lower bound does
        (-2.0, 0.5, 1.6, 0.0),  # -min(-1, 0.8 * -2)
        (-2.0, 0.9, 1.8, 1.8),  # inside
        (-2.0, 1.5, 3.0, 3.0),  # above: a bad token that became likelier may still be pushed down
        # A = 0
        (0.0, 1.5, 0.0, 0.0),
        (0.0, 0.5, 0.0, 0.0),
    ],
)
def test_sign_table_of_clipping(advantage: float, ratio: float, x: float, slope: float):
    found = surrogate_of_one_token(ratio, advantage, clip_low=0.2, clip_high=0.2)
    assert found[:2] == pytest.approx((x, slope), abs=1e-12)


@pytest.mark.parametrize(
    ("advantage", "ratio", "x", "slope"),
    [
        (1.0, 1.3, -1.28, 0.0),
        (1.0, 1.25, -1.25, -1.25),
        (-1.0, 0.85, 0.9, 0.0),
        (-1.0, 0.95, 0.95, 0.95),
    ],
)
def test_the_two_widths_are_their_own(advantage: float, ratio: float, x: float, slope: float):
    found = surrogate_of_one_token(ratio, advantage, clip_low=0.1, clip_high=0.28)
    assert found[:2] == pytest.approx((x, slope), abs=1e-12)


@pytest.mark.parametrize(
    ("advantage", "ratio", "x", "slope"),
    [
        (-2.0, 5.0, 6.0, 0.0),  # 5 * 2 is cut at c * 2
        (-2.0, 2.5, 5.0, 5.0),  # below c: untouched
        (-2.0, 0.5, 1.6, 0.0),  # the ordinary clip goes on acting
        (2.0, 5.0, -2.4, 0.0),  # never for A > 0
        (2.0, 0.1, -0.2, -0.2),
    ],
)
def test_dual_clip_acts_for_negative_advantages_alone(
    advantage: float, ratio: float, x: float, slope: float
):
    found = surrogate_of_one_token(ratio, advantage, clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    assert found[:2] == pytest.approx((x, slope), abs=1e-12)


@pytest.mark.parametrize(("weighting", "mean", "options"), MEANS)
@given(rows=rollouts(), clip=CLIPS, dual=DUAL)
def test_on_policy_it_is_the_plain_policy_gradient(
    weighting, mean, options, rows: list[Row], clip, dual
):
    """At policy = old: the ratio is 1, the loss is -mean A, and the gradient -weight * A, whatever
    the clip."""
    a = advantages.on_tokens(rows, advantages.group_relative(rows, scale="std", epsilon=1e-6))
    minus_a = [[-v for v in r] for r in a]
    value, expected = (
        mean(rows, minus_a, *options),
        kept(rows, times(weights_of(mean, rows, *options), minus_a)),
    )
    rows = [replace(row, old_logprobs=row.logprobs) for row in rows if row.counts]
    term = AlgorithmTerm(
        "pg",
        partial(clipped_surrogate, clip_low=clip[0], clip_high=clip[1], dual_clip=dual),
        weighting,
    )
    batch, logprobs_T = (
        weigh(group_relative(pack(groups(rows)), AlgoState()), term),
        leaf(live(rows)),
    )
    loss, _ = term(outputs(batch, logprobs_T, rows), batch)
    assert loss.item() == pytest.approx(value, rel=1e-10, abs=1e-12)
    close(gradient(loss, logprobs_T), column(expected))


def test_extreme_ratios_stay_finite():
    for log_ratio in (-60.0, 60.0):
        for advantage in (-1.0, 1.0):
            ratio = math.exp(log_ratio)
            x, slope, metrics = surrogate_of_one_token(
                ratio, advantage, clip_low=0.2, clip_high=0.2, dual_clip=3.0
            )
            assert all(math.isfinite(v) for v in (x, slope, *metrics.values()))


# --- entropy bonus


@given(rows=rollouts())
def test_entropy_bonus_is_minus_the_mean_entropy(rows: list[Row]):
    rows = kept(rows, rows)
    term = AlgorithmTerm(
        "entropy", entropy_bonus, token_mean, needs=frozenset({"entropy"}), coef=0.1
    )
    batch, entropy_T = weigh(pack(groups(rows)), term), leaf([row.entropy for row in rows])
    loss, metrics = term(outputs(batch, column(live(rows)), rows, entropy_T), batch)
    assert loss.item() == pytest.approx(
        -0.1 * oracle.token_mean(rows, [row.entropy for row in rows]), rel=1e-10, abs=1e-12
    )
    close(
        gradient(loss, entropy_T),
        column([[-0.1 * w for w in r] for r in weights_of(oracle.token_mean, rows)]),
    )
    assert all(not metric.requires_grad for metric in metrics.values())


@given(rows=rollouts(), table=TABLES)
def test_entropy_bonus_through_a_model(rows: list[Row], table: list[list[float]]):
    rows = kept(rows, rows)
    if not rows:
        return
    term = AlgorithmTerm("entropy", entropy_bonus, token_mean, needs=frozenset({"entropy"}))
    batch, parameters = (
        weigh(pack(groups(rows)), term),
        torch.tensor(table, dtype=torch.float64, requires_grad=True),
    )
    logprobs_T, entropy_T = bigram(parameters, rows)
    loss, _ = term(outputs(batch, logprobs_T, rows, entropy_T), batch)
    assert loss.item() == pytest.approx(
        -oracle.token_mean(rows, categorical.bigram_entropy(table, rows)), rel=1e-10, abs=1e-12
    )
    by_entropy = [[-w for w in r] for r in weights_of(oracle.token_mean, rows)]
    close(
        gradient(loss, parameters),
        column(categorical.bigram_entropy_gradient(table, rows, by_entropy)).view_as(parameters),
    )
