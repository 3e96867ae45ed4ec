"""Losses on pairs: value and gradient against `oracles.preference`, and by hand.

T = all tokens laid end to end, G = groups (pairs).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import categorical, preference
from oracles import ragged as oracle
from oracles.cases import VOCAB, bigram, column, gradient, groups, outputs
from oracles.preference_cases import a_row, batch_of, evaluate, live, pairs, weighted_by_group
from oracles.ragged import Row, weights_of

from ratchet.algorithms.base import Algorithm, AlgorithmTerm, AlgoState
from ratchet.algorithms.loss_aggregation import chosen_mean, prompt_mean
from ratchet.algorithms.losses.common import nll
from ratchet.algorithms.losses.preference import Normalize, dpo, ipo, odds_ratio, rpo, simpo
from ratchet.batch import Batch
from ratchet.data.packing import pack
from ratchet.errors import DataError

LN2, LN3 = math.log(2), math.log(3)
BETAS = st.sampled_from([0.01, 0.1, 0.5, 2.0])
NORMALIZE = st.sampled_from(["sum", "mean"])
TABLES = st.lists(
    st.lists(st.floats(-2, 2), min_size=VOCAB, max_size=VOCAB), min_size=VOCAB, max_size=VOCAB
)
ALL = [
    partial(dpo, beta=0.1),
    partial(ipo, beta=0.1),
    partial(simpo, beta=2.0, gamma=1.0),
    odds_ratio,
    partial(rpo, beta=0.1, eta=1.0),
]
near = partial(pytest.approx, rel=1e-10, abs=1e-10)


def name(fn: Callable) -> str:
    return getattr(fn, "func", fn).__name__


def weigh(batch: Batch, *terms: AlgorithmTerm) -> Batch:
    return Algorithm("test", {"policy": terms}, "pairs").weigh(batch, AlgoState())


def assert_equals_the_oracle(
    product: Callable, expected: Callable, rows: list[Row], **options
) -> None:
    x, slopes = expected(rows, **options)
    found, slope_T = evaluate(partial(product, **options), rows)
    assert found == near(x)
    assert slope_T == near(weighted_by_group(rows, slopes))


@given(
    rows=pairs(), beta=BETAS, label_smoothing=st.sampled_from([0.0, 0.1, 0.5]), normalize=NORMALIZE
)
def test_dpo_equals_the_oracle(
    rows: list[Row], beta: float, label_smoothing: float, normalize: Normalize
):
    assert_equals_the_oracle(
        dpo, preference.dpo, rows, beta=beta, label_smoothing=label_smoothing, normalize=normalize
    )


@given(rows=pairs(), beta=BETAS, normalize=NORMALIZE)
def test_ipo_equals_the_oracle(rows: list[Row], beta: float, normalize: Normalize):
    assert_equals_the_oracle(ipo, preference.ipo, rows, beta=beta, normalize=normalize)


@given(rows=pairs(), beta=BETAS, gamma=st.sampled_from([0.0, 0.5, 1.6]))
def test_simpo_equals_the_oracle(rows: list[Row], beta: float, gamma: float):
    assert_equals_the_oracle(simpo, preference.simpo, rows, beta=beta, gamma=gamma)


@given(rows=pairs(empty=False))
def test_the_odds_ratio_equals_the_oracle(rows: list[Row]):
    assert_equals_the_oracle(odds_ratio, preference.odds_ratio, rows)


@given(rows=pairs(), beta=BETAS, eta=st.sampled_from([0.0, 0.5, 2.0]), normalize=NORMALIZE)
def test_rpo_equals_the_oracle(rows: list[Row], beta: float, eta: float, normalize: Normalize):
    assert_equals_the_oracle(rpo, preference.rpo, rows, beta=beta, eta=eta, normalize=normalize)


@given(rows=pairs(), normalize=NORMALIZE)
def test_a_term_of_pairs_is_the_mean_over_pairs(rows: list[Row], normalize: Normalize):
    """Token weights fold into one number a pair; a pair without any trained token is not a pair to
    average over."""
    x, slopes = preference.dpo(rows, beta=0.1, normalize=normalize)
    order = oracle.in_order(rows)
    kept = [any(any(row.mask) for row in rows if row.group == group) for group in order]
    share = 1 / max(sum(kept), 1)
    term = AlgorithmTerm(
        "dpo", partial(dpo, beta=0.1, normalize=normalize), prompt_mean, level="group", coef=0.5
    )
    batch, logprobs_T = weigh(batch_of(rows), term), live(rows)
    loss, metrics = term(outputs(batch, logprobs_T, rows), batch)
    assert loss.item() == near(
        0.5 * share * math.fsum(v for v, keeps in zip(x, kept, strict=True) if keeps)
    )
    # the slopes of an empty pair are 0 already
    expected = [0.5 * share * slope for row in slopes for slope in row]
    assert gradient(loss, logprobs_T).tolist() == near(expected)
    assert all(not metric.requires_grad and metric.isfinite() for metric in metrics.values())


@given(rows=pairs(empty=False), table=TABLES)
def test_dpo_through_a_model(rows: list[Row], table: list[list[float]]):
    rows = [
        replace(r, logprobs=lp)
        for r, lp in zip(rows, categorical.bigram_logprobs(table, rows), strict=True)
    ]
    x, slopes = preference.dpo(rows, beta=0.5)
    parameters = torch.tensor(table, dtype=torch.float64, requires_grad=True)
    batch = batch_of(rows)
    x_G, _ = dpo(outputs(batch, bigram(parameters, rows)[0], rows), batch, beta=0.5)
    assert x_G.tolist() == near(x)
    expected = categorical.bigram_gradient(table, rows, slopes)
    torch.testing.assert_close(
        gradient(x_G.sum(), parameters),
        column(expected).view_as(parameters),
        rtol=1e-10,
        atol=1e-10,
    )


# --- ORPO's other term


@given(rows=pairs())
def test_chosen_mean_is_the_token_mean_over_chosen_rows(rows: list[Row]):
    assert chosen_mean(batch_of(rows)).tolist() == near(
        [w for row in weights_of(preference.chosen_mean, rows) for w in row]
    )


@given(rows=pairs(empty=False), coef=st.sampled_from([0.1, 1.0]))
def test_orpo_is_the_likelihood_of_the_chosen_and_the_odds_ratio(rows: list[Row], coef: float):
    terms = (
        AlgorithmTerm("nll", nll, chosen_mean),
        AlgorithmTerm("odds", odds_ratio, prompt_mean, level="group", coef=coef),
    )
    batch, logprobs_T = weigh(batch_of(rows), *terms), live(rows)
    out = outputs(batch, logprobs_T, rows)
    loss = terms[0](out, batch)[0] + terms[1](out, batch)[0]
    x, slopes = preference.odds_ratio(rows)
    likelihood = preference.chosen_mean(rows, [[-lp for lp in row.logprobs] for row in rows])
    assert loss.item() == near(likelihood + coef * math.fsum(x) / len(x))
    weights = weights_of(preference.chosen_mean, rows)
    expected = [
        coef * slope / len(x) - weight
        for s_row, w_row in zip(slopes, weights, strict=True)
        for slope, weight in zip(s_row, w_row, strict=True)
    ]
    assert gradient(loss, logprobs_T).tolist() == near(expected)


# --- by hand


def a_pair(
    chosen: list[float],
    rejected: list[float],
    *,
    ref: tuple[list[float], list[float]] | None = None,
    **fields,
):
    """Two rows of one prompt token each, and an answer's logprobs; without `ref` the reference is
    the live policy."""
    rows = []
    for attempt, (logprobs, refs) in enumerate(
        zip((chosen, rejected), ref or (chosen, rejected), strict=True)
    ):
        n = len(logprobs)
        values = {name: pair[attempt] for name, pair in fields.items()}
        row = Row(
            "pair",
            attempt,
            [1] * (n + 1),
            [False] + [True] * n,
            "scored",
            values.pop("rewards", 0.0),
            "train",
        )
        rows.append(
            replace(
                row,
                logprobs=[-9.0, *logprobs],
                old_logprobs=[0.0] * (n + 1),
                ref_logprobs=[-7.0, *refs],
            )
        )
    return rows


def by_hand(fn: Callable, rows: list[Row]) -> tuple[float, list[list[float]]]:
    """(x, the slopes of the chosen row's answer and of the rejected row's)."""
    (x,), slope_T = evaluate(fn, rows)
    n = len(rows[0].tokens)
    assert slope_T[0] == slope_T[n] == 0
    return x, [slope_T[1:n], slope_T[n + 1 :]]


@pytest.mark.parametrize("beta", [0.1, 0.5])
def test_dpo_at_the_reference_is_ln_2_and_pulls_apart_by_half_of_beta(beta: float):
    rows = a_pair([-1.0, -2.0], [-0.5, -1.5, -3.0])
    x, slopes = by_hand(partial(dpo, beta=beta), rows)
    assert x == pytest.approx(LN2, rel=1e-14)
    assert slopes == [near([-beta / 2] * 2), near([beta / 2] * 3)]


@given(rows=pairs(empty=False), table=TABLES, beta=BETAS)
def test_at_the_reference_dpos_gradient_is_that_of_the_log_likelihoods(
    rows: list[Row], table: list[list[float]], beta: float
):
    """-beta / 2 (grad log pi(chosen) - grad log pi(rejected)), through a model."""
    rows = [
        replace(r, logprobs=lp, ref_logprobs=lp)
        for r, lp in zip(rows, categorical.bigram_logprobs(table, rows), strict=True)
    ]
    sign = [[0.0] * len(row.tokens) for row in rows]
    for c, r in preference.pairs(rows):
        sign[c], sign[r] = [1.0] * len(rows[c].tokens), [-1.0] * len(rows[r].tokens)
    difference = column(categorical.bigram_gradient(table, rows, sign)).view(VOCAB, VOCAB)
    parameters = torch.tensor(table, dtype=torch.float64, requires_grad=True)
    batch = batch_of(rows)
    x_G, _ = dpo(outputs(batch, bigram(parameters, rows)[0], rows), batch, beta=beta)
    assert x_G.tolist() == near([LN2] * len(x_G))
    torch.testing.assert_close(
        gradient(x_G.sum(), parameters), -beta / 2 * difference, rtol=1e-10, atol=1e-10
    )


def test_dpo_by_hand():
    # Log ratios: chosen (-1 + 2) + (-1 + 1) = 1, rejected -3 + 2 = -1. D = 2, beta D = ln 3: -log
    # s(ln 3) = ln(4/3), and s(-ln 3) = 1/4. Label smoothing 0.1: 0.9 ln(4/3) + 0.1 ln 4, slope by
    # beta D -0.9 / 4 + 0.1 * 3/4 = -0.15.
    rows, beta = a_pair([-1.0, -1.0], [-3.0], ref=([-2.0, -1.0], [-2.0])), LN3 / 2
    x, slopes = by_hand(partial(dpo, beta=beta), rows)
    assert (x, *slopes) == (near(math.log(4 / 3)), near([-beta / 4] * 2), near([beta / 4]))
    x, slopes = by_hand(partial(dpo, beta=beta, label_smoothing=0.1), rows)
    assert (x, *slopes) == (
        near(0.9 * math.log(4 / 3) + 0.1 * math.log(4)),
        near([-0.15 * beta] * 2),
        near([0.15 * beta]),
    )
    # By token: D = 1/2 + 1 = 3/2, and each of the two chosen tokens moves it by half.
    beta = LN3 / 1.5
    x, slopes = by_hand(partial(dpo, beta=beta, normalize="mean"), rows)
    assert (x, *slopes) == (near(math.log(4 / 3)), near([-beta / 8] * 2), near([beta / 4]))


def test_dpo_reads_the_order_of_rows_as_the_preference():
    # The pair of above turned around: beta D = -ln 3, -log s(-ln 3) = ln 4, and s(ln 3) = 3/4.
    rows, beta = a_pair([-3.0], [-1.0, -1.0], ref=([-2.0], [-2.0, -1.0])), LN3 / 2
    x, slopes = by_hand(partial(dpo, beta=beta), rows)
    assert (x, *slopes) == (near(math.log(4)), near([-0.75 * beta]), near([0.75 * beta] * 2))


def test_ipo_by_hand():
    # D = 2 as above, 1 / (2 beta) = 3/2: (1/2)^2, slope 2 * 1/2. It is pulled back once D is past
    # its target.
    rows = a_pair([-1.0, -1.0], [-3.0], ref=([-2.0, -1.0], [-2.0]))
    x, slopes = by_hand(partial(ipo, beta=1 / 3, normalize="sum"), rows)
    assert (x, *slopes) == (near(0.25), near([1.0, 1.0]), near([-1.0]))
    # By token, as its authors have it: D = 3/2 is the target itself.
    x, slopes = by_hand(partial(ipo, beta=1 / 3), rows)
    assert (x, *slopes) == (near(0.0), near([0.0, 0.0]), near([0.0]))


def test_simpo_by_hand():
    # Mean logprobs: chosen -ln 3, rejected -2 ln 3. 2 (ln 3) - ln 3 = ln 3: ln(4/3). Slope by each
    # mean 2/4, and each of the two chosen tokens is half of its mean. The reference is not read.
    rows = a_pair([-0.5 * LN3, -1.5 * LN3], [-2 * LN3], ref=([-8.0, -8.0], [-0.1]))
    x, slopes = by_hand(partial(simpo, beta=2.0, gamma=LN3), rows)
    assert (x, *slopes) == (near(math.log(4 / 3)), near([-0.25, -0.25]), near([0.5]))


def test_orpo_by_hand():
    # Mean probabilities 3/4 (odds 3) and 1/2 (odds 1): -log s(ln 3) = ln(4/3), s(-ln 3) = 1/4. By
    # the chosen mean: -(1/4) / (1 - 3/4) = -1, half of it a token; by the rejected: (1/4) / (1 -
    # 1/2) = 1/2.
    ln34 = math.log(3 / 4)
    rows = a_pair([0.5 * ln34, 1.5 * ln34], [-LN2])
    x, slopes = by_hand(odds_ratio, rows)
    assert (x, *slopes) == (near(-ln34), near([-0.5, -0.5]), near([0.5]))
    # With the chosen answer's likelihood: -ln(3/4) + 0.1 ln(4/3); another -1/2 on each chosen
    # token.
    terms = (
        AlgorithmTerm("nll", nll, chosen_mean),
        AlgorithmTerm("odds", odds_ratio, prompt_mean, level="group", coef=0.1),
    )
    batch, logprobs_T = weigh(batch_of(rows), *terms), live(rows)
    out = outputs(batch, logprobs_T, rows)
    loss = terms[0](out, batch)[0] + terms[1](out, batch)[0]
    assert loss.item() == near(1.1 * math.log(4 / 3))
    assert gradient(loss, logprobs_T).tolist() == near([0, -0.55, -0.55, 0, 0.05])


def test_rpo_by_hand():
    # Rewards 2 and 1, eta = ln 3: b = 3/4. At the reference a = 1/2: 3/4 ln(3/2) + 1/4 ln(1/2),
    # slope beta (1/2 - 3/4).
    rows = a_pair([-1.0, -1.0], [-3.0], rewards=(2.0, 1.0))
    x, slopes = by_hand(partial(rpo, beta=0.4, eta=LN3), rows)
    assert (x, *slopes) == (
        near(0.75 * math.log(1.5) - 0.25 * LN2),
        near([-0.1, -0.1]),
        near([0.1]),
    )
    # Where beta D = eta (r_c - r_r) there is nothing left to learn: D = 2 as above, beta = ln 3 /
    # 2.
    rows = a_pair([-1.0, -1.0], [-3.0], ref=([-2.0, -1.0], [-2.0]), rewards=(2.0, 1.0))
    x, slopes = by_hand(partial(rpo, beta=LN3 / 2, eta=LN3), rows)
    assert (x, *slopes) == (near(0.0), near([0.0, 0.0]), near([0.0]))


# --- edges


@pytest.mark.parametrize("fn", ALL, ids=name)
@pytest.mark.parametrize("gap", [-400.0, 400.0])
def test_answers_far_apart_stay_finite(fn: Callable, gap: float):
    """A margin of hundreds of nats is what a long answer has; no loss may overflow there."""
    rows = a_pair(
        [min(gap, 0.0) - 1.0] * 3,
        [min(-gap, 0.0) - 1.0] * 3,
        ref=([-1.0] * 3, [-1.0] * 3),
        rewards=(60.0, -60.0),
    )
    x, slopes = by_hand(fn, rows)
    assert math.isfinite(x)
    assert all(math.isfinite(slope) for row in slopes for slope in row)


def test_an_answer_of_probability_one_has_finite_odds():
    """Rounding gives a confident model a logprob of exactly 0; neither its value nor its gradient
    may be infinite."""
    for rows in (a_pair([0.0, 0.0], [-1.0]), a_pair([-1.0], [0.0])):
        x, slopes = by_hand(odds_ratio, rows)
        assert math.isfinite(x)
        assert all(math.isfinite(slope) for row in slopes for slope in row)


def test_an_empty_answer_has_finite_odds():
    rows = a_pair([-1.0, -2.0], [])
    x, slopes = by_hand(odds_ratio, rows)
    assert math.isfinite(x)
    assert all(math.isfinite(slope) for row in slopes for slope in row)


def single(group: str, attempt: int, use: str = "train", ending: str = "scored") -> Row:
    column = [-1.0, -1.0]
    reward = 1.0 if ending == "scored" else None
    return Row(group, attempt, [1, 2], [False, True], ending, reward, use, column, column, column)


@pytest.mark.parametrize("fn", ALL, ids=name)
@pytest.mark.parametrize(
    "lone",
    [
        [single("odd one", 0)],
        [single("odd one", 0), single("odd one", 1), single("odd one", 2)],
        [single("odd one", 0), single("odd one", 1, use="reference")],
        [single("odd one", 0), single("odd one", 1), single("odd one", 2, use="reference")],
        [single("odd one", 0), single("odd one", 1, ending="failed")],
    ],
    ids=[
        "one row",
        "three rows",
        "one row and a reference",
        "a pair and a reference",
        "one row and a failure",
    ],
)
def test_a_group_that_is_no_pair_is_refused_by_name(fn: Callable, lone: list[Row]):
    rows = [single("fine", 0), single("fine", 1), *lone]
    batch = pack(groups(rows))
    rows = [row for row in rows if row.counts]
    columns = column([row.ref_logprobs for row in rows])
    batch = batch.fill_tokens(ref_logprobs=columns, old_logprobs=columns)
    with pytest.raises(DataError, match="odd one"):
        fn(outputs(batch, live(rows), rows), batch)


@pytest.mark.parametrize("fn", ALL, ids=name)
def test_a_batch_of_no_pairs_at_all_gives_no_numbers(fn: Callable):
    batch = pack([])
    empty = column([])
    batch = batch.fill_tokens(ref_logprobs=empty, old_logprobs=empty)
    x_G, _ = fn(outputs(batch, live([]), []), batch)
    assert x_G.shape == (0,)


@given(row=a_row("g", 0))
def test_equal_answers_give_no_gradient_to_a_shared_model(row: Row):
    """The same answer on both sides: whatever the loss, the two halves of the gradient cancel token
    by token."""
    rows = [row, replace(row, attempt=1)]
    for fn in ALL:
        if name(fn) == "odds_ratio" and not any(row.mask):
            continue
        _, slope_T = evaluate(fn, rows)
        n = len(row.tokens)
        assert slope_T[:n] == near([-slope for slope in slope_T[n:]])
