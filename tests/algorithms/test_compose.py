"""Mixtures of estimators, and what may follow any of them, against `oracles.advantages`, and by
hand."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from oracles import advantages as oracle
from oracles import temporal
from oracles.cases import column, episodes, filled, kept
from oracles.ragged import Row

from ratchet.algorithms.advantages.compose import clip_advantages, mixture, pipeline, whiten
from ratchet.algorithms.advantages.group_baselines import group_relative, rloo
from ratchet.algorithms.advantages.per_turn import gae
from ratchet.algorithms.advantages.teacher import on_policy_distillation
from ratchet.algorithms.base import AlgoState
from ratchet.algorithms.filters import drop_truncated
from ratchet.algorithms.shaping import scale_rewards
from ratchet.batch import Batch

COLUMNS = ("token_rewards", "values", "bootstrap_values", "teacher_logprobs", "old_logprobs")


def attempts(*rewards: float | None) -> list[Row]:
    return [
        Row("g", i, [1, 2, 3], [False, True, True], "unjudged" if r is None else "scored", r)
        for i, r in enumerate(rewards)
    ]


def given_advantages(rows: list[Row], advantages: list[float]) -> Batch:
    return filled(rows).fill_tokens(advantages=torch.tensor(advantages, dtype=torch.float64))


@settings(max_examples=50)
@given(episodes(), st.sampled_from([1.0, 0.0, 0.3]), st.sampled_from([1.0, -0.5]))
def test_a_mixture_equals_the_oracle(rows: list[Row], first: float, second: float):
    parts = (
        (partial(group_relative, epsilon=1e-3), first),
        (on_policy_distillation, second),
        (partial(gae, lam=0.9), 0.5),
    )
    batch = mixture(filled(rows, *COLUMNS), AlgoState(), weighted_estimators=parts)
    relative = oracle.on_tokens(rows, oracle.group_relative(rows, scale="std", epsilon=1e-3))
    critic, _ = temporal.gae(rows, gamma=1.0, lam=0.9, value_lam=None, length_alpha=None)
    teacher = temporal.on_policy_distillation(rows)
    expected = oracle.mixture([(relative, first), (teacher, second), (critic, 0.5)])
    found = batch.need("advantages")
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, column(kept(rows, expected)), rtol=1e-10, atol=1e-10)
    assert batch.has("returns")


def test_a_mixture_by_hand():
    # RLOO: 3 and -3; centred: 1.5 and -1.5
    parts = ((rloo, 2.0), (partial(group_relative, scale="none"), -1.0))
    batch = mixture(filled(attempts(3.0, 0.0)), AlgoState(), weighted_estimators=parts)
    assert batch.need("advantages").tolist() == [0, 4.5, 4.5, 0, -4.5, -4.5]


@settings(max_examples=40)
@given(episodes(), st.sampled_from([0.0, 0.5, 1.0]))
def test_clipping_equals_the_oracle(rows: list[Row], limit: float):
    batch = on_policy_distillation(filled(rows, *COLUMNS), AlgoState())
    expected = oracle.clip(temporal.on_policy_distillation(rows), limit)
    found = clip_advantages(batch, AlgoState(), low=-limit, high=limit).need("advantages")
    torch.testing.assert_close(found, column(kept(rows, expected)), rtol=1e-10, atol=1e-10)


def test_clipping_by_hand():
    batch = given_advantages(attempts(1, 0), [0, 5, 1, 0, -2, -0.5])
    clipped = clip_advantages(batch, AlgoState(), low=-1, high=1.5).need("advantages")
    assert clipped.tolist() == [0, 1.5, 1, 0, -1, -0.5]


@settings(max_examples=60)
@given(episodes())
def test_whitening_equals_the_oracle(rows: list[Row]):
    raw = temporal.on_policy_distillation(rows)
    steps = [raw[i][t] for i, row in enumerate(rows) for t in row.steps]
    assume(len(steps) < 2 or max(steps) - min(steps) > 1e-3)
    found = whiten(on_policy_distillation(filled(rows, *COLUMNS), AlgoState()), AlgoState()).need(
        "advantages"
    )
    assert found.dtype == torch.float64
    expected = oracle.whiten(rows, raw, epsilon=1e-8)
    torch.testing.assert_close(found, column(kept(rows, expected)), rtol=1e-10, atol=1e-10)


def test_whitening_by_hand():
    # mean 2, squares 9 + 1 + 1 + 9 = 20, over 4 (not 3): std sqrt(5); what does not train is not
    # looked at
    batch = given_advantages(attempts(1, 0), [99, 5, 3, 99, 1, -1])
    a = 5**-0.5
    found = whiten(batch, AlgoState(), epsilon=0.0).need("advantages").tolist()
    assert found == pytest.approx([0, 3 * a, a, 0, -a, -3 * a])


def test_whitening_counts_rows_that_nobody_judged():
    # They train, with an advantage of 0: 1 1 0 0 has mean and std 1/2.
    batch = whiten(
        given_advantages(attempts(1.0, None), [0, 1, 1, 0, 0, 0]), AlgoState(), epsilon=0.0
    )
    assert batch.need("advantages").tolist() == [0, 1, 1, 0, -1, -1]


@pytest.mark.parametrize("value", [0.0, 0.1, 1 / 3, -0.7, 1e17])
def test_whitening_equal_advantages_gives_exactly_zero(value: float):
    for n in (1, 3, 7):
        batch = given_advantages(attempts(*[1.0] * n), [0, value, value] * n)
        assert not whiten(batch, AlgoState()).need("advantages").any()


def test_whitening_of_nothing():
    failed = [replace(row, ending="failed") for row in attempts(None)]
    assert whiten(given_advantages(failed, []), AlgoState()).need("advantages").tolist() == []


@pytest.mark.parametrize(
    ("rewards", "share"),
    [((1.0, 0.0), 0.0), ((1.0, 1.0), 1.0), ((0.1, 0.1, None), 1.0), ((None,), 1.0)],
)
def test_a_pipeline_measures_how_many_tokens_it_gives_nothing_to_learn(
    rewards: tuple[float | None, ...], share: float
):
    batch = pipeline(
        filled(attempts(*rewards)), AlgoState(), transforms=[partial(group_relative, scale="none")]
    )
    assert batch.metrics == {"advantage/zero_share": share}


def test_a_pipeline_without_a_token_to_train_teaches_nothing():
    rows = [replace(row, ending="truncated") for row in attempts(1.0, 0.0)]
    batch = pipeline(filled(rows), AlgoState(), transforms=[group_relative, drop_truncated])
    assert not batch.trainable_T.any()
    assert batch.metrics["advantage/zero_share"] == 1


def test_a_pipeline_is_one_after_the_other():
    rows = attempts(3.0, 0.0)
    rows[1] = replace(rows[1], ending="truncated")
    transforms = (
        partial(scale_rewards, factor=2.0),
        rloo,
        drop_truncated,
        partial(clip_advantages, low=-5.0, high=5.0),
    )
    batch = pipeline(filled(rows), AlgoState(), transforms=transforms)
    assert batch.need("advantages").tolist() == [0, 5, 5, 0, -5, -5]
    assert batch.train_S.tolist() == [True, False]
