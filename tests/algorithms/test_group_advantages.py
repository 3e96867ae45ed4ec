"""The estimators with one return an attempt, besides group_relative, against `oracles.advantages`,
and by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Literal

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from oracles import advantages as oracle
from oracles.cases import by_row, column, episodes, filled, kept
from oracles.ragged import Ragged, Row, flat

from ratchet.algorithms.advantages.group_baselines import (
    Scale,
    gdpo,
    group_relative,
    opo,
    reinforce_pp,
    remax,
    rloo,
)
from ratchet.algorithms.base import AlgoState
from ratchet.algorithms.shaping import component_weights
from ratchet.batch import Batch
from ratchet.errors import ConfigError, DataError

RELATIVE = [rloo, opo, partial(reinforce_pp, baseline="group"), group_relative]


def attempts(group: str, *rewards: float | None, **fields) -> list[Row]:
    """One row a reward, of a prompt token and two trained ones; None: there was nothing to
    judge."""
    return [
        Row(
            group,
            i,
            [1, 2, 3],
            [False, True, True],
            "unjudged" if r is None else "scored",
            r,
            **fields,
        )
        for i, r in enumerate(rewards)
    ]


def longer(row: Row, trained: int) -> Row:
    return replace(row, tokens=[1] * (1 + trained), trained=[False] + [True] * trained)


def equal(
    batch: Batch, rows: list[Row], per_row: list[float], per_token: Ragged | None = None
) -> None:
    found = batch.need("advantages")
    assert found.dtype == torch.float64
    expected = oracle.on_tokens(rows, per_row) if per_token is None else per_token
    torch.testing.assert_close(found, column(kept(rows, expected)), rtol=1e-10, atol=1e-10)


# --- dense rewards are part of the return


@settings(max_examples=40)
@given(episodes(), st.sampled_from(["std", "none"]))
def test_group_relative_of_returns_equals_the_oracle(rows: list[Row], scale: Scale):
    batch = group_relative(filled(rows, "token_rewards"), AlgoState(), scale=scale, epsilon=1e-3)
    equal(batch, rows, oracle.group_relative(rows, scale=scale, epsilon=1e-3))


def test_the_dense_rewards_of_all_rows_of_an_attempt_count():
    first, other = attempts("g", 1, 1)
    rows = [
        replace(first, token_rewards=[0, 0.5, 0.25]),
        replace(first, token_rewards=[0, 0, 0.25]),
    ]
    batch = group_relative(
        filled([*rows, replace(other, token_rewards=[0, 0, 0])], "token_rewards"),
        AlgoState(),
        scale="none",
    )
    assert by_row(batch) == [0.5, 0.5, -0.5]


# --- RLOO


@settings(max_examples=60)
@given(episodes(), st.booleans())
def test_rloo_equals_the_oracle(rows: list[Row], dense: bool):
    rows = rows if dense else [replace(row, token_rewards=[]) for row in rows]
    equal(rloo(filled(rows, *["token_rewards"] * dense), AlgoState()), rows, oracle.rloo(rows))


def test_rloo_by_hand():
    # against the mean of the other three: 3 - 1/3, 1 - 1, 0 - 4/3, 0 - 4/3
    assert by_row(rloo(filled(attempts("g", 3, 1, 0, 0)), AlgoState())) == pytest.approx(
        [8 / 3, 0, -4 / 3, -4 / 3]
    )


def test_rloo_over_the_spread_by_hand():
    # mean 1, sample variance (4 + 0 + 1 + 1) / 3 = 2
    found = by_row(rloo(filled(attempts("g", 3, 1, 0, 0)), AlgoState(), scale="std", epsilon=0.5))
    spread = math.sqrt(2) + 0.5
    assert found == pytest.approx([8 / 3 / spread, 0, -4 / 3 / spread, -4 / 3 / spread])
    assert by_row(rloo(filled(attempts("g", 0.1, 0.1, 0.1)), AlgoState(), scale="std")) == [0, 0, 0]


@settings(max_examples=30)
@given(episodes())
def test_rloo_is_the_centred_return_times_n_over_n_less_one(rows: list[Row]):
    centred = by_row(group_relative(filled(rows, "token_rewards"), AlgoState(), scale="none"))
    found = by_row(rloo(filled(rows, "token_rewards"), AlgoState()))
    for row, a, b in zip(kept(rows, rows), found, centred, strict=True):
        n = len(oracle.attempt_rewards(rows, row.group))
        assert a == pytest.approx(b * n / (n - 1) if n > 1 else 0.0, abs=1e-12)


# --- OPO


@settings(max_examples=60)
@given(episodes(), st.booleans())
def test_opo_equals_the_oracle(rows: list[Row], dense: bool):
    rows = rows if dense else [replace(row, token_rewards=[]) for row in rows]
    equal(opo(filled(rows, *["token_rewards"] * dense), AlgoState()), rows, oracle.opo(rows))


def test_opo_by_hand():
    # lengths 1 and 3, rewards 4 and 0: the baseline is (1 * 4 + 3 * 0) / 4 = 1
    rows = [longer(row, n) for row, n in zip(attempts("g", 4, 0), [1, 3], strict=True)]
    assert by_row(opo(filled(rows), AlgoState())) == [3, -1]


def test_opo_of_equal_lengths_is_the_centred_reward():
    rows = filled(attempts("g", 3, 1, 0, 0))
    assert by_row(opo(rows, AlgoState())) == by_row(group_relative(rows, AlgoState(), scale="none"))


# --- ReMax


@settings(max_examples=60)
@given(episodes())
def test_remax_equals_the_oracle(rows: list[Row]):
    batch = remax(filled(rows, "token_rewards"), AlgoState())
    expected, stays = oracle.remax(rows)
    equal(batch, rows, expected)
    assert batch.train_S.tolist() == kept(rows, stays)
    mask = [[m and s for m in row.mask] for row, s in zip(rows, stays, strict=True)]
    assert batch.trainable_T.tolist() == flat(kept(rows, mask))


def test_remax_by_hand():
    greedy = replace(attempts("a", 0.25, use="baseline")[0], attempt=9)
    rows = [*attempts("a", 1, 0), greedy, *attempts("b", 1, 0)]
    batch = remax(filled(rows), AlgoState())
    assert by_row(batch) == [0.75, -0.25, 0, 0, 0]
    assert batch.train_S.tolist() == [True, True, False, False, False]


@pytest.mark.parametrize("ending", ["failed", "unjudged", "truncated"])
def test_a_greedy_answer_that_nobody_judged_is_no_baseline(ending: str):
    greedy = replace(attempts("a", None, use="baseline")[0], attempt=9, ending=ending)
    batch = remax(filled([*attempts("a", 1, 0), greedy]), AlgoState())
    assert by_row(batch)[:2] == [0, 0]
    assert not batch.trainable_T.any()


# --- REINFORCE++


@settings(max_examples=80)
@given(episodes(), st.booleans(), st.sampled_from(["none", "group"]))
def test_reinforce_pp_equals_the_oracle(
    rows: list[Row], dense: bool, baseline: Literal["none", "group"]
):
    rows = rows if dense else [replace(row, token_rewards=[]) for row in rows]
    raw = oracle.returns_to_go(rows, baseline=baseline)
    whitened = [
        raw[i][t] for i, row in enumerate(rows) if row.learns_from_reward for t in row.steps
    ]
    # numbers that are equal but for rounding are whitened into anything
    assume(not whitened or min(whitened) == max(whitened) or max(whitened) - min(whitened) > 1e-3)
    batch = reinforce_pp(filled(rows, *["token_rewards"] * dense), AlgoState(), baseline=baseline)
    equal(batch, rows, [], oracle.reinforce_pp(rows, baseline=baseline, epsilon=1e-8))


def test_reinforce_pp_by_hand():
    # rewards 1 and -1 on 3 tokens and 1: mean (3 - 1) / 4 = 1/2, variance 1 - 1/4 = 3/4 by token,
    # not by row
    rows = [longer(row, n) for row, n in zip(attempts("g", 1, -1), [3, 1], strict=True)]
    scale = math.sqrt(3) / 2
    found = reinforce_pp(filled(rows), AlgoState(), epsilon=0.0).need("advantages").tolist()
    assert found == pytest.approx([0, *[0.5 / scale] * 3, 0, -1.5 / scale])


def test_reinforce_pp_counts_dense_rewards_from_each_token_on():
    row = replace(attempts("g", 1)[0], token_rewards=[0, 2, 4])  # G = 1 + 6, 1 + 4: mean 6, std 1
    found = (
        reinforce_pp(filled([row], "token_rewards"), AlgoState(), epsilon=0.0)
        .need("advantages")
        .tolist()
    )
    assert found == pytest.approx([0, 1, -1])


def test_reinforce_pp_of_equal_dense_rewards_is_exactly_zero():
    """Sums along one row must not carry the rounding of another's."""
    rows = [replace(longer(row, 1), token_rewards=[0, 0.7]) for row in attempts("g", 0, 0, 0, 0, 0)]
    assert not reinforce_pp(filled(rows, "token_rewards"), AlgoState()).need("advantages").any()


def test_reinforce_pp_with_the_groups_mean_by_hand():
    # a: 1 0 -> 1/2 -1/2; b: 5 3 -> 1 -1; two tokens each. variance (1/4 + 1/4 + 1 + 1) / 4 = 5/8
    scale = math.sqrt(5 / 8)
    batch = reinforce_pp(
        filled(attempts("a", 1, 0) + attempts("b", 5, 3)),
        AlgoState(),
        baseline="group",
        epsilon=0.0,
    )
    found = batch.need("advantages")[batch.trainable_T].tolist()
    assert found == pytest.approx([x / scale for x in [0.5, 0.5, -0.5, -0.5, 1, 1, -1, -1]])


@pytest.mark.parametrize("baseline", ["none", "group"])
@pytest.mark.parametrize("reward", [0.0, 0.1, 1 / 3, -0.7])
def test_reinforce_pp_of_equal_rewards_is_exactly_zero(
    reward: float, baseline: Literal["none", "group"]
):
    for n in (1, 3, 7, 10):
        rows = attempts("a", *[reward] * n) + attempts("b", *[reward] * 3)
        assert (
            not reinforce_pp(filled(rows), AlgoState(), baseline=baseline).need("advantages").any()
        )


def test_reinforce_pp_with_the_groups_mean_of_groups_that_are_equal_within_is_exactly_zero():
    rows = attempts("a", 0.1, 0.1, 0.1) + attempts("b", 0.7, 0.7, 0.7) + attempts("c", 5)
    assert not reinforce_pp(filled(rows), AlgoState(), baseline="group").need("advantages").any()


# --- GDPO


@settings(max_examples=60)
@given(episodes(), st.sampled_from([None, {"right": 1.0}, {"right": 2.0, "form": -0.5}]))
def test_gdpo_equals_the_oracle(rows: list[Row], weights: dict[str, float] | None):
    known = {name for row in kept(rows, rows) for name in row.parts}
    assume(known and set(weights or {}) <= known)
    # epsilon is large enough that parts which cancel but for rounding stay at 0
    batch = gdpo(filled(rows), AlgoState(), weights=weights, epsilon=1e-3)
    equal(batch, rows, oracle.gdpo(rows, weights=weights, epsilon=1e-3))


def test_gdpo_by_hand():
    # right: 1 0 -> +-1/sqrt(2) (std is 1/sqrt(2), so 1/2 over it); form: 0 0 -> 0. b: form 10 0 ->
    # +-1/sqrt(2) as well. The scale of a part is gone: the batch holds +-1/sqrt(2) twice, whose std
    # is sqrt(4 * 1/2 / 3).
    parts = [
        {"right": 1.0, "form": 0.0},
        {"right": 0.0, "form": 0.0},
        {"right": 3.0, "form": 10.0},
        {"right": 3.0, "form": 0.0},
    ]
    rows = [
        replace(row, parts=own)
        for row, own in zip(attempts("a", 9, 9) + attempts("b", 9, 9), parts, strict=True)
    ]
    a = math.sqrt(3) / 2
    assert by_row(gdpo(filled(rows), AlgoState(), epsilon=0.0)) == pytest.approx([a, -a, a, -a])
    # form twice: 1 1 2 2 -> squares 1/2 (1 + 1 + 4 + 4) / 3 = 5/3
    b = math.sqrt(0.5) / math.sqrt(5 / 3)
    found = by_row(
        gdpo(filled(rows), AlgoState(), weights={"right": 1.0, "form": 2.0}, epsilon=0.0)
    )
    assert found == pytest.approx([b, -b, 2 * b, -2 * b])


def test_gdpo_leaves_an_attempt_without_a_part_out_of_its_statistics():
    parts = [{"right": 1.0}, {"right": 0.0}, {}]
    rows = [replace(row, parts=own) for row, own in zip(attempts("a", 9, 9, 9), parts, strict=True)]
    # +-1/sqrt(2) and 0 over their std, 1/sqrt(2)
    assert by_row(gdpo(filled(rows), AlgoState(), epsilon=0.0)) == pytest.approx([1, -1, 0])


@pytest.mark.parametrize("part", [0.1, 1 / 3, -0.7])
def test_gdpo_of_equal_parts_is_exactly_zero(part: float):
    rows = [
        replace(row, parts={"right": part, "form": 1.0})
        for row in attempts("a", *[1.0] * 7) + attempts("b", 1.0, 1.0)
    ]
    assert by_row(gdpo(filled(rows), AlgoState())) == [0.0] * 9


@pytest.mark.parametrize("weigh", [gdpo, component_weights])
def test_a_part_that_an_earlier_batch_had_may_be_absent(weigh):
    """Each kind of task may have parts of its own, and a small batch lacks a kind."""
    weights, state = {"maths": 1.0, "code": 2.0}, AlgoState()
    batches = [
        filled([replace(row, parts=own[row.attempt]) for row in attempts("a", 1, 0)])
        for own in ([{"maths": 1.0}, {"code": 0.5}], [{"maths": 1.0}, {"maths": 0.0}])
    ]
    with pytest.raises(ConfigError, match="weights name code"):
        weigh(batches[1], AlgoState(), weights=weights)
    weigh(batches[0], state, weights=weights)
    later, alone = (
        weigh(batches[1], state_of, weights=kept)
        for state_of, kept in ((state, weights), (AlgoState(), {"maths": 1.0}))
    )
    assert later.rewards_S.tolist() == alone.rewards_S.tolist()
    assert later.token_columns.keys() == alone.token_columns.keys()
    assert all(x.equal(alone.need(name)) for name, x in later.token_columns.items())


def test_gdpo_refuses_a_part_that_no_reward_has():
    rows = [replace(row, parts={"right": 1.0}) for row in attempts("a", 1, 0)]
    with pytest.raises(ConfigError, match="form"):
        gdpo(filled(rows), AlgoState(), weights={"form": 1.0})
    with pytest.raises(ConfigError, match="parts"):
        gdpo(filled(attempts("a", 1, 0)), AlgoState())


# --- all of them


@pytest.mark.parametrize("estimator", RELATIVE)
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 1 / 3, 1e17, -0.7])
def test_equal_rewards_give_exactly_zero(estimator: Callable[..., Batch], reward: float):
    for n in (1, 2, 3, 7, 10):
        rows = [longer(row, 1 + i % 3) for i, row in enumerate(attempts("g", *[reward] * n))]
        assert not estimator(filled(rows), AlgoState()).need("advantages").any()


@pytest.mark.parametrize("estimator", [*RELATIVE, reinforce_pp, remax])
def test_what_nobody_judged_has_no_advantage_and_moves_none(estimator: Callable[..., Batch]):
    greedy = replace(attempts("g", 0.5, use="baseline")[0], attempt=9)
    rows = [*attempts("g", 1, 0, 0), greedy]
    unjudged = [replace(row, attempt=20 + i) for i, row in enumerate(attempts("g", None, None))]
    alone = estimator(filled(rows), AlgoState()).need("advantages").tolist()
    assert estimator(filled([*rows, *unjudged]), AlgoState()).need("advantages").tolist() == [
        *alone,
        *[0.0] * 6,
    ]


@pytest.mark.parametrize("estimator", [*RELATIVE, reinforce_pp, remax])
def test_an_attempt_with_two_rewards_is_refused(estimator: Callable[..., Batch]):
    first, other = attempts("g", 1, 0)
    with pytest.raises(DataError, match="attempt 0"):
        estimator(filled([first, replace(first, reward=0.5), other]), AlgoState())


@pytest.mark.parametrize("estimator", [*RELATIVE, reinforce_pp, remax])
def test_a_batch_that_lost_all_its_rows_goes_through(estimator: Callable[..., Batch]):
    failed = [replace(row, ending="failed") for row in attempts("g", None)]
    assert estimator(filled(failed), AlgoState()).need("advantages").tolist() == []
