"""Losses on scores: value and gradient against `oracles.reward_model`, and by hand.

T = all tokens laid end to end, S = sequences, G = groups.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import reward_model
from oracles.cases import column, gradient, groups
from oracles.preference_cases import (
    REWARDS,
    SCORES,
    a_row,
    batch_of,
    check_metrics,
    counting,
    scored_pairs,
    step_groups,
    stepwise,
)
from oracles.ragged import Ragged, Row, flat, in_order, weights_of
from oracles.reward_model import Labels
from torch import Tensor

from ratchet.algorithms.base import Algorithm, AlgorithmTerm, AlgoState
from ratchet.algorithms.loss_aggregation import labelled_turn_mean, prompt_mean, sequence_mean
from ratchet.algorithms.losses.reward_model import bradley_terry, process_reward, score_regression
from ratchet.batch import Batch
from ratchet.data.packing import pack
from ratchet.errors import DataError
from ratchet.protocols import Outputs

LN3 = math.log(3)
near = partial(pytest.approx, rel=1e-10, abs=1e-10)


def leaf(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


def scored(batch: Batch, scores_S: Tensor) -> Outputs:
    return Outputs(sequence_sum=batch.sequence_sum, scores=scores_S)


def stepped(batch: Batch, scores_T: Tensor) -> Outputs:
    return Outputs(sequence_sum=batch.sequence_sum, token_scores=scores_T)


def weigh(batch: Batch, term: AlgorithmTerm) -> Batch:
    return Algorithm("test", {"policy": (term,)}, "pairs").weigh(batch, AlgoState())


# --- pairs


@given(case=scored_pairs())
def test_bradley_terry_equals_the_oracle(case: tuple[list[Row], list[float]]):
    rows, scores = case
    x, slopes = reward_model.bradley_terry(rows, scores)
    batch, scores_S = batch_of(rows), leaf(scores)
    x_G, metrics = bradley_terry(scored(batch, scores_S), batch)
    check_metrics(metrics, x_G)
    assert x_G.tolist() == near(x)
    order = in_order(rows)
    expected = [
        (order.index(row.group) + 1) * slope for row, slope in zip(rows, slopes, strict=True)
    ]
    assert gradient((x_G * counting(len(x_G))).sum(), scores_S).tolist() == near(expected)


def pair(*, group: str = "g", attempts: int = 2) -> list[Row]:
    return [Row(group, i, [1, 2], [False, True], "unjudged") for i in range(attempts)]


def test_bradley_terry_by_hand():
    # s_c - s_r = ln 3: -log s(ln 3) = ln(4/3), s(-ln 3) = 1/4; turned around ln 4 and 3/4; equal
    # scores ln 2 and 1/2.
    rows = [*pair(group="a"), *pair(group="b"), *pair(group="c")]
    batch, scores_S = pack(groups(rows)), leaf([LN3 + 1, 1.0, 1.0, LN3 + 1, -2.0, -2.0])
    x_G, _ = bradley_terry(scored(batch, scores_S), batch)
    assert x_G.tolist() == near([math.log(4 / 3), math.log(4), math.log(2)])
    assert gradient(x_G.sum(), scores_S).tolist() == near([-0.25, 0.25, -0.75, 0.75, -0.5, 0.5])


def test_bradley_terry_as_a_term_is_the_mean_over_pairs():
    rows = [*pair(group="a"), *pair(group="b")]
    term = AlgorithmTerm(
        "bt", bradley_terry, prompt_mean, level="group", needs=frozenset({"scores"})
    )
    batch, scores_S = weigh(pack(groups(rows)), term), leaf([LN3, 0.0, 0.0, 0.0])
    loss, _ = term(scored(batch, scores_S), batch)
    assert loss.item() == near((math.log(4 / 3) + math.log(2)) / 2)
    assert gradient(loss, scores_S).tolist() == near([-0.125, 0.125, -0.25, 0.25])


@pytest.mark.parametrize("gap", [-500.0, 500.0])
def test_scores_far_apart_stay_finite(gap: float):
    batch, scores_S = pack(groups(pair())), leaf([gap, 0.0])
    x_G, _ = bradley_terry(scored(batch, scores_S), batch)
    assert x_G.tolist() == near([max(-gap, 0.0)])
    assert gradient(x_G.sum(), scores_S).tolist() == near([-1.0, 1.0] if gap < 0 else [0.0, 0.0])


@pytest.mark.parametrize("attempts", [1, 3])
def test_a_group_that_is_no_pair_is_refused_by_name(attempts: int):
    batch = pack(groups([*pair(group="fine"), *pair(group="odd one", attempts=attempts)]))
    with pytest.raises(DataError, match="odd one"):
        bradley_terry(scored(batch, torch.zeros(batch.n_sequences)), batch)


# --- regression


@st.composite
def judged(draw: st.DrawFn) -> tuple[list[Row], list[float]]:
    rows = [
        replace(draw(a_row(f"g{g}", 0)), reward=draw(REWARDS))
        for g in range(draw(st.integers(1, 4)))
    ]
    return rows, draw(st.lists(SCORES, min_size=len(rows), max_size=len(rows)))


@given(case=judged())
def test_score_regression_equals_the_oracle(case: tuple[list[Row], list[float]]):
    rows, scores = case
    x, slopes = reward_model.score_regression(rows, scores)
    batch, scores_S = batch_of(rows), leaf(scores)
    x_S, metrics = score_regression(scored(batch, scores_S), batch)
    check_metrics(metrics, x_S)
    assert x_S.tolist() == near(x)
    expected = [(i + 1) * slope for i, slope in enumerate(slopes)]
    assert gradient((x_S * counting(len(x_S))).sum(), scores_S).tolist() == near(expected)


def test_score_regression_by_hand():
    # (0.5 - 2)^2, slope 2 * -1.5
    batch, scores_S = pack(groups([Row("g", 0, [1, 2], [False, True], "scored", 2.0)])), leaf([0.5])
    x_S, _ = score_regression(scored(batch, scores_S), batch)
    assert x_S.tolist() == [2.25]
    assert gradient(x_S.sum(), scores_S).tolist() == [-3.0]


# --- steps


@given(case=stepwise())
def test_process_reward_equals_the_oracle(case: tuple[list[Row], Ragged, Labels]):
    rows, scores, labels = case
    x, slopes = reward_model.process_reward(scores, labels)
    batch, scores_T = pack(step_groups(rows, labels)), leaf(flat(scores))
    x_T, metrics = process_reward(stepped(batch, scores_T), batch)
    check_metrics(metrics, x_T)
    # What tokens of rows that do not train hold, is weighted by 0.
    trains = torch.tensor(flat([[row.takes_part] * len(row.tokens) for row in rows]))
    assert x_T[trains].tolist() == near(column(x)[trains].tolist())
    found = gradient((x_T * counting(len(x_T)))[trains].sum(), scores_T)
    assert found.tolist() == near((column(slopes) * counting(len(x_T)) * trains).tolist())


@given(case=stepwise())
def test_labelled_turn_mean_equals_the_oracle(case: tuple[list[Row], Ragged, Labels]):
    rows, _, labels = case
    weights = weights_of(lambda rows, x: reward_model.labelled_turn_mean(rows, labels, x), rows)
    found = labelled_turn_mean(pack(step_groups(rows, labels)))
    assert found.dtype == torch.float64
    assert found.tolist() == near(flat(weights))


@given(case=stepwise())
def test_a_term_of_steps_is_the_mean_over_labelled_steps(case: tuple[list[Row], Ragged, Labels]):
    rows, scores, labels = case
    x, slopes = reward_model.process_reward(scores, labels)
    weights = weights_of(lambda rows, x: reward_model.labelled_turn_mean(rows, labels, x), rows)
    term = AlgorithmTerm(
        "prm", process_reward, labelled_turn_mean, needs=frozenset({"token_scores"})
    )
    batch, scores_T = weigh(pack(step_groups(rows, labels)), term), leaf(flat(scores))
    loss, _ = term(stepped(batch, scores_T), batch)
    assert loss.item() == near(reward_model.labelled_turn_mean(rows, labels, x))
    expected = [w * s for w, s in zip(flat(weights), flat(slopes), strict=True)]
    assert gradient(loss, scores_T).tolist() == near(expected)


def steps_by_hand() -> Batch:
    """One row: a prompt token, a step of two tokens, an environment's token, two steps of one
    token; labels 1, 1/4, none."""
    row = Row("g", 0, [1] * 6, [False, True, True, False, True, False], "unjudged")
    return pack(step_groups([row], [[None, None, 1.0, None, 0.25, None]]))


def test_process_reward_by_hand():
    # Score ln 3, so s = 3/4. Label 1: ln(4/3), slope 3/4 - 1. Label 1/4: -ln(3/4) / 4 - 3 ln(1/4) /
    # 4, slope 3/4 - 1/4.
    batch, scores_T = steps_by_hand(), leaf([9.0, 9.0, LN3, 9.0, LN3, 9.0])
    x_T, _ = process_reward(stepped(batch, scores_T), batch)
    half = 0.25 * math.log(4 / 3) + 0.75 * math.log(4)
    assert x_T.tolist() == near([0, 0, math.log(4 / 3), 0, half, 0])
    assert gradient(x_T.sum(), scores_T).tolist() == near([0, 0, -0.25, 0, 0.5, 0])
    assert labelled_turn_mean(batch).tolist() == [0, 0, 0.5, 0, 0.5, 0]


def test_sure_scores_stay_finite():
    # Label 1 at a score of -800 costs 800; label 1/4 at a score of 800 costs 3/4 of 800.
    batch, scores_T = steps_by_hand(), leaf([0.0, 0.0, -800.0, 0.0, 800.0, 0.0])
    x_T, _ = process_reward(stepped(batch, scores_T), batch)
    assert x_T.tolist() == near([0, 0, 800, 0, 600, 0])
    assert gradient(x_T.sum(), scores_T).tolist() == near([0, 0, -1, 0, 0.75, 0])


def test_rows_without_a_reward_that_do_not_train_leave_regression_alone():
    """A reference row has no reward: its NaN must reach neither the loss nor the gradient."""
    rows = [
        Row("g", 0, [1, 2], [False, True], "scored", 2.0),
        Row("g", 1, [1, 2], [False, True], "unjudged", None, "reference"),
    ]
    term = AlgorithmTerm(
        "mse", score_regression, sequence_mean, level="sequence", needs=frozenset({"scores"})
    )
    batch, scores_S = weigh(pack(groups(rows)), term), leaf([0.5, 1.0])
    loss, metrics = term(scored(batch, scores_S), batch)
    assert loss.item() == near(2.25)
    assert gradient(loss, scores_S).tolist() == near([-3.0, 0.0])
    assert all(metric.isfinite() for metric in metrics.values())


@pytest.mark.parametrize("label", [-0.5, 1.5])
def test_a_label_that_is_no_probability_is_refused(label: float):
    """Cross entropy with such a label has no minimum: the score would run away without end."""
    row = Row("odd one", 0, [1, 2], [False, True], "unjudged")
    batch = pack(step_groups([row], [[None, label]]))
    with pytest.raises(DataError, match="odd one"):
        process_reward(stepped(batch, torch.zeros(2, dtype=torch.float64)), batch)
