"""The weight of every token in each mean, against `oracles.ragged`, and by hand."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from oracles import ragged as oracle
from oracles.cases import column, episodes, groups, kept, rollouts, supervised
from oracles.ragged import Row, Span, flat, weights_of

from ratchet.algorithms.base import AlgoState
from ratchet.algorithms.loss_aggregation import (
    chosen_mean,
    fixed_length,
    labelled_turn_mean,
    positive_mean,
    prompt_mean,
    sequence_mean,
    token_mean,
    token_sum,
    valued_mean,
)
from ratchet.algorithms.shaping import copy_judged_rewards
from ratchet.data.packing import pack

PAIRS = [
    pytest.param(token_mean, oracle.token_mean, (), id="token_mean"),
    pytest.param(sequence_mean, oracle.sequence_mean, (), id="sequence_mean"),
    pytest.param(prompt_mean, oracle.prompt_mean, (), id="prompt_mean"),
    pytest.param(partial(fixed_length, length=7), oracle.fixed_length, (7,), id="fixed_length"),
    pytest.param(token_sum, oracle.token_sum, (), id="token_sum"),
    pytest.param(
        partial(positive_mean, above=0.3), oracle.positive_mean, (0.3,), id="positive_mean"
    ),
    pytest.param(chosen_mean, oracle.chosen_mean, (), id="chosen_mean"),
    pytest.param(labelled_turn_mean, oracle.labelled_turn_mean, (), id="labelled_turn_mean"),
]
EVERY = [*(pair.values[0] for pair in PAIRS)]
MEANS = [token_mean, sequence_mean, prompt_mean]


def row(
    group: str, trained: list[int], *, attempt: int = 0, ending: str = "scored", use: str = "train"
) -> Row:
    reward = 1.0 if ending == "scored" else None
    return Row(group, attempt, [1] * len(trained), [bool(t) for t in trained], ending, reward, use)


def weights(weighting, rows: list[Row]) -> list[float]:
    return weighting(copy_judged_rewards(pack(groups(rows)), AlgoState())).tolist()


@pytest.mark.parametrize(("weighting", "mean", "options"), PAIRS)
@settings(max_examples=settings.default.max_examples // 2)
@given(rows=rollouts())
def test_rollouts_equal_the_oracle(weighting, mean, options, rows: list[Row]):
    found = weighting(copy_judged_rewards(pack(groups(rows)), AlgoState()))
    assert found.dtype == torch.float64
    torch.testing.assert_close(
        found, column(kept(rows, weights_of(mean, rows, *options))), rtol=1e-10, atol=1e-14
    )


@pytest.mark.parametrize(("weighting", "mean", "options"), PAIRS)
@settings(max_examples=settings.default.max_examples // 2)
@given(rows=supervised())
def test_supervised_rows_equal_the_oracle(weighting, mean, options, rows: list[Row]):
    found = weighting(copy_judged_rewards(pack(groups(rows)), AlgoState()))
    torch.testing.assert_close(
        found, column(kept(rows, weights_of(mean, rows, *options))), rtol=1e-10, atol=1e-14
    )


@pytest.mark.parametrize(("weighting", "mean", "options"), PAIRS)
@settings(max_examples=settings.default.max_examples // 2)
@given(rows=episodes())
def test_episodes_equal_the_oracle(weighting, mean, options, rows: list[Row]):
    """With labels at the ends of turns, masked turns, and forked attempts."""
    found = weighting(copy_judged_rewards(pack(groups(rows)), AlgoState()))
    torch.testing.assert_close(
        found, column(kept(rows, weights_of(mean, rows, *options))), rtol=1e-10, atol=1e-14
    )


# a: two rows with 4 and 2 trained tokens, one of them after an environment's; b: one row with 1,
# one with none
ROWS = [
    row("a", [0, 1, 1, 1, 1]),
    row("a", [0, 1, 0, 1], attempt=1),
    row("b", [0, 1]),
    row("b", [0, 0], attempt=1),
]


def test_token_mean_by_hand():
    w = 1 / 7
    assert weights(token_mean, ROWS) == pytest.approx([0, w, w, w, w, 0, w, 0, w, 0, w, 0, 0])


def test_sequence_mean_by_hand():
    a, b, c = 1 / 3 / 4, 1 / 3 / 2, 1 / 3
    assert weights(sequence_mean, ROWS) == pytest.approx([0, a, a, a, a, 0, b, 0, b, 0, c, 0, 0])


def test_prompt_mean_by_hand():
    a, b = 1 / 2 / 6, 1 / 2
    assert weights(prompt_mean, ROWS) == pytest.approx([0, a, a, a, a, 0, a, 0, a, 0, b, 0, 0])


def test_fixed_length_by_hand():
    w = 1 / 4 / 10  # four sequences: an empty answer is one too
    assert weights(partial(fixed_length, length=10), ROWS) == pytest.approx(
        [0, w, w, w, w, 0, w, 0, w, 0, w, 0, 0]
    )


def test_token_sum_by_hand():
    w = 1 / 4  # an empty answer is a sequence too
    assert weights(token_sum, ROWS) == pytest.approx([0, w, w, w, w, 0, w, 0, w, 0, w, 0, 0])


def test_positive_mean_by_hand():
    rows = [replace(r, reward=reward) for r, reward in zip(ROWS, [0.0, 1.0, 2.0, 3.0], strict=True)]
    assert weights(positive_mean, rows) == pytest.approx(
        [0] * 6 + [1 / 3, 0, 1 / 3, 0, 1 / 3, 0, 0]
    )
    assert weights(partial(positive_mean, above=1.0), rows) == [0] * 10 + [1, 0, 0]
    assert weights(partial(positive_mean, above=9.0), rows) == [0] * 13


def test_chosen_mean_by_hand():
    w = 1 / 5
    assert weights(chosen_mean, ROWS) == pytest.approx([0, w, w, w, w, 0, 0, 0, 0, 0, w, 0, 0])


def test_labelled_turn_mean_by_hand():
    labelled = replace(ROWS[0], turns=[Span(1, 3, 1.0), Span(3, 5)])
    rows = [labelled, replace(ROWS[1], turns=[Span(1, 2, 0.0), Span(3, 4, 1.0)]), *ROWS[2:]]
    assert weights(labelled_turn_mean, rows) == pytest.approx(
        [0, 0, 1 / 3, 0, 0, 0, 1 / 3, 0, 1 / 3, 0, 0, 0, 0]
    )


@pytest.mark.parametrize("weighting", MEANS)
@given(rows=rollouts())
def test_the_weights_of_a_mean_sum_to_one_or_all_are_zero(weighting, rows: list[Row]):
    total = sum(weights(weighting, rows))
    assert total == pytest.approx(1.0 if any(any(r.mask) for r in rows) else 0.0, abs=1e-12)


@pytest.mark.parametrize("weighting", EVERY)
@pytest.mark.parametrize(
    "rows",
    [
        [row("a", [0, 0]), row("b", [0, 0, 0])],
        [row("a", [0, 1], ending="failed"), row("a", [0, 1], attempt=1, ending="cancelled")],
        [row("a", [0, 1], ending="truncated")],
        [row("a", [0, 1], use="baseline")],
    ],
    ids=["no trained token", "failed and cancelled", "truncated, not judged", "baseline"],
)
def test_a_batch_without_anything_to_train_on_weighs_exactly_nothing(weighting, rows: list[Row]):
    assert weights(weighting, rows) == [0.0] * sum(len(r.tokens) for r in rows if r.counts)


@pytest.mark.parametrize("weighting", [*MEANS, partial(fixed_length, length=7)])
@pytest.mark.parametrize(
    "dead",
    [{"ending": "failed"}, {"ending": "cancelled"}, {"use": "baseline"}, {"ending": "truncated"}],
)
def test_rows_that_take_no_part_do_not_dilute_the_others(weighting, dead: dict[str, Any]):
    """The denominator counts the final mask, as the numerator does."""
    alive = [row("a", [0, 1, 1]), row("b", [0, 1])]
    others = [row("a", [0, 1, 1, 1], attempt=1, **dead), row("c", [0, 1], **dead)]
    rows = [alive[0], others[0], alive[1], others[1]]
    expected = weights(weighting, alive)
    columns = [expected[:3], [0.0] * 4, expected[3:], [0.0] * 2]
    assert weights(weighting, rows) == pytest.approx(flat(kept(rows, columns)))


def test_a_critic_learns_from_steps_that_filters_took_out():
    batch = pack(groups(ROWS))
    batch = batch.fill_tokens(valued=batch.trainable_T)
    filtered = replace(batch, trainable_T=torch.zeros_like(batch.trainable_T))
    assert valued_mean(filtered).tolist() == token_mean(batch).tolist()
