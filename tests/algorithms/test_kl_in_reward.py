"""The KL in the reward, exactly: its expected policy gradient, by enumeration of what the policy
can draw, is that of the reverse KL; and why k1 is the only estimator there. Then the adaptive
coefficient.

V = tokens of the categorical.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import categorical
from oracles.cases import bigram, column, gradient, groups, kept, leaf, outputs, rollouts
from oracles.ragged import Row

from ratchet.algorithms.base import AlgoState
from ratchet.algorithms.kl import adapt_kl, kl_in_reward
from ratchet.algorithms.losses.policy import reinforce
from ratchet.batch import Batch
from ratchet.config.resolve import build, resolve
from ratchet.data.packing import pack

V = 3
LOGITS = st.lists(st.floats(-2, 2), min_size=4, max_size=4)
TABLES = st.lists(st.lists(st.floats(-2, 2), min_size=V, max_size=V), min_size=V, max_size=V)


def with_columns(rows: list[Row]) -> Batch:
    old, ref = (
        column([row.old_logprobs for row in rows]),
        column([row.ref_logprobs for row in rows]),
    )
    return pack(groups(rows)).fill_tokens(old_logprobs=old, ref_logprobs=ref)


def logprobs_of(table: list[list[float]], tokens: list[int]) -> list[float]:
    return [0.0] + [categorical.log_softmax(table[a])[b] for a, b in itertools.pairwise(tokens)]


@given(table=TABLES, ref_table=TABLES, coef=st.sampled_from([0.05, 1.0]))
def test_its_policy_gradient_is_that_of_the_reverse_kl(table, ref_table, coef: float):
    """Answers of two tokens after the prompt 0, each with the probability that the policy draws it;
    every token is credited with what is rewarded from it on."""
    rows = []
    for first in range(V):
        for second in range(V):
            tokens = [0, first, second]
            old, ref = logprobs_of(table, tokens), logprobs_of(ref_table, tokens)
            row = Row(
                "g",
                len(rows),
                tokens,
                [False, True, True],
                reward=0.0,
                old_logprobs=old,
                ref_logprobs=ref,
            )
            rows.append(row)
    batch = kl_in_reward(with_columns(rows), AlgoState(), coef=coef)
    rewards_T = batch.need("token_rewards")
    to_go = [[0.0, a + b, b] for _, a, b in rewards_T.view(-1, 3).tolist()]
    batch = batch.fill_tokens(advantages=column(to_go))
    parameters = torch.tensor(table, dtype=torch.float64, requires_grad=True)
    logprobs_T, _ = bigram(parameters, rows)
    x_T, _ = reinforce(outputs(batch, logprobs_T, rows), batch)
    drawn_S = torch.tensor(
        [math.exp(math.fsum(row.old_logprobs)) for row in rows], dtype=torch.float64
    )
    found = gradient((drawn_S * batch.sequence_sum(x_T)).sum(), parameters)

    # KL(p || ref) of the answer = KL of its first token + E_p[KL of its second given the first]
    p = [categorical.log_softmax(z) for z in table]
    q = [categorical.log_softmax(z) for z in ref_table]
    expected = [[0.0] * V for _ in range(V)]
    second = [categorical.kl(p[v], q[v]) for v in range(V)]
    mean = math.fsum(math.exp(p[0][v]) * second[v] for v in range(V))
    for j, slope in enumerate(categorical.reverse_kl_gradient(p[0], q[0])):
        expected[0][j] += slope + math.exp(p[0][j]) * (second[j] - mean)
    for v in range(V):
        for j, slope in enumerate(categorical.reverse_kl_gradient(p[v], q[v])):
            expected[v][j] += math.exp(p[0][v]) * slope
    torch.testing.assert_close(found, coef * column(expected).view(V, V), rtol=1e-10, atol=1e-10)


def descent(rewards: list[float], log_p: list[float]) -> list[float]:
    """The gradient that REINFORCE descends for a reward of each token: -sum_v p_v reward_v dlog p_v
    / dz."""
    mean = math.fsum(math.exp(lp) * r for lp, r in zip(log_p, rewards, strict=True))
    return [-math.exp(lp) * (r - mean) for lp, r in zip(log_p, rewards, strict=True)]


@given(z=LOGITS, z_ref=LOGITS)
def test_a_single_token_by_the_closed_form(z: list[float], z_ref: list[float]):
    log_p, log_ref = categorical.log_softmax(z), categorical.log_softmax(z_ref)
    rows = [
        Row(
            "g",
            v,
            [0, v],
            [False, True],
            reward=0.0,
            old_logprobs=[0.0, log_p[v]],
            ref_logprobs=[0.0, log_ref[v]],
        )
        for v in range(4)
    ]
    rewards = (
        kl_in_reward(with_columns(rows), AlgoState(), coef=1.0).need("token_rewards")[1::2].tolist()
    )
    assert descent(rewards, log_p) == pytest.approx(
        categorical.reverse_kl_gradient(log_p, log_ref), rel=1e-10, abs=1e-11
    )


@given(z=LOGITS, z_ref=LOGITS)
def test_k3_as_a_reward_would_give_the_difference_of_both_kls(z: list[float], z_ref: list[float]):
    """E_p[k3 dlog p] = reverse KL's gradient less the forward KL's: the nearer to the reference,
    the nearer to nothing."""
    log_p, log_ref = categorical.log_softmax(z), categorical.log_softmax(z_ref)
    k3 = [math.exp(r - p) - 1 - (r - p) for p, r in zip(log_p, log_ref, strict=True)]
    reverse, forward = (
        categorical.reverse_kl_gradient(log_p, log_ref),
        categorical.forward_kl_gradient(log_p, log_ref),
    )
    found = descent([-k for k in k3], log_p)
    assert found == pytest.approx(
        [a - b for a, b in zip(reverse, forward, strict=True)], rel=1e-9, abs=1e-10
    )


def test_k2_as_a_reward_would_not_even_see_the_sign_of_the_gap():
    # p = (1/2, 1/4, 1/4), ref = (1/4, 1/2, 1/4): log(p / ref) = (ln 2, -ln 2, 0), k2 = (a, a, 0)
    # with a = ln(2)^2 / 2, and its mean is 3a / 4.
    log_p, log_ref = (
        [math.log(x) for x in (1 / 2, 1 / 4, 1 / 4)],
        [math.log(x) for x in (1 / 4, 1 / 2, 1 / 4)],
    )
    k2 = [(p - r) ** 2 / 2 for p, r in zip(log_p, log_ref, strict=True)]
    a, found = math.log(2) ** 2 / 2, descent([-k for k in k2], log_p)
    assert found == pytest.approx([a / 8, a / 16, -3 * a / 16])
    # The second token is rarer than in the reference, and would be made rarer still; both KLs pull
    # it up.
    assert found[1] > 0
    assert categorical.reverse_kl_gradient(log_p, log_ref)[1] < 0
    assert categorical.forward_kl_gradient(log_p, log_ref)[1] < 0


# --- the column


@given(rows=rollouts(), coef=st.sampled_from([0.0, 0.1]), data=st.data())
def test_it_adds_to_what_is_there_on_trainable_tokens_alone(
    rows: list[Row], coef: float, data: st.DataObject
):
    rows = [
        replace(row, ref_logprobs=[data.draw(st.floats(-4, 0)) for _ in row.tokens])
        for row in kept(rows, rows)
    ]
    batch = with_columns(rows)
    before = leaf([[0.25 * t for t in range(len(row.tokens))] for row in rows]).detach()
    if data.draw(st.booleans()):
        batch = batch.fill_tokens(token_rewards=before)
    else:
        before = torch.zeros_like(before)
    after = kl_in_reward(batch, AlgoState(), coef=coef).need("token_rewards")
    gaps = [
        [
            old - ref if m else 0.0
            for m, old, ref in zip(row.mask, row.old_logprobs, row.ref_logprobs, strict=True)
        ]
        for row in rows
    ]
    torch.testing.assert_close(after, before - coef * column(gaps), rtol=1e-12, atol=1e-12)
    assert after.dtype == torch.float64


def test_its_metrics_are_the_mean_gap_of_a_trainable_token_and_the_coefficient():
    row = Row("g", 0, [1, 2, 1, 2], [False, True, False, True], reward=0.0)
    row = replace(row, old_logprobs=[-9.0, -1.0, -9.0, -2.0], ref_logprobs=[0.0, -3.0, 0.0, -1.0])
    assert kl_in_reward(with_columns([row]), AlgoState(), coef=0.1).metrics == {
        "kl/kl": 0.5,
        "kl/coef": 0.1,
    }


@pytest.mark.parametrize("place", ["loss", "reward"])
def test_the_coefficient_in_use_is_measured_in_the_same_words_wherever_it_acts(place: str):
    row = Row("g", 0, [1, 2], [False, True], reward=1.0, old_logprobs=[0, -1], ref_logprobs=[0, -2])
    algorithm = build(
        resolve("algorithm", {"kind": "rloo", "kl": {"coef": 0.1, "place": place, "target": 1.0}})
    )
    assert algorithm.advantage(with_columns([row]), AlgoState()).metrics["kl/coef"] == 0.1
    assert (
        algorithm.advantage(with_columns([row]), AlgoState(numbers={"coef/kl": 0.25})).metrics[
            "kl/coef"
        ]
        == 0.25
    )


def test_an_adapted_coefficient_replaces_the_configured_one():
    row = Row(
        "g",
        0,
        [1, 2],
        [False, True],
        reward=0.0,
        old_logprobs=[0.0, -1.0],
        ref_logprobs=[0.0, -3.0],
    )
    state = AlgoState(numbers={"coef/kl": 0.5})
    assert kl_in_reward(with_columns([row]), state, coef=0.1).need("token_rewards").tolist() == [
        0.0,
        -1.0,
    ]
    assert state.numbers == {"coef/kl": 0.5}


# --- the adaptive coefficient


@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        (6.0, 0.2),  # on target: unchanged
        (6.6, 0.2 * 1.01),  # 10 % above: e = 0.1
        (5.4, 0.2 * 0.99),
        (60.0, 0.2 * 1.02),  # e never beyond 0.2
        (0.0, 0.2 * 0.98),
        (-3.0, 0.2 * 0.98),  # an estimate of a KL may be negative
    ],
)
def test_the_coefficient_moves_with_the_clipped_relative_error(kl: float, expected: float):
    assert adapt_kl(0.2, kl, target=6.0, rate=0.1) == pytest.approx(expected, rel=1e-12)


def test_a_skipped_step_of_nan_does_not_move_the_coefficient():
    """The learner skips such a step; a coefficient of NaN would make all later steps NaN."""
    config = {"kind": "grpo", "kl": {"coef": 0.1, "target": 1.0}}
    algorithm = build(resolve("algorithm", config))
    state = AlgoState()
    for kl, expected in ((math.nan, {}), (math.inf, {}), (2.0, {"coef/kl": 0.102})):
        algorithm.observe(state, {"policy/kl/kl": kl})
        assert state.numbers == pytest.approx(expected)


def test_the_rate_scales_the_move():
    assert adapt_kl(1.0, 12.0, target=6.0, rate=0.5) == pytest.approx(1.1)
    assert adapt_kl(1.0, 3.0, target=6.0, rate=0.0) == 1.0
