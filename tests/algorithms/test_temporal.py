"""Estimators that look along a row, against `oracles.temporal`, and by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import temporal as oracle
from oracles.advantages import group_relative as episode_oracle
from oracles.advantages import on_tokens
from oracles.cases import column, episodes, filled, kept
from oracles.ragged import Ragged, Row, Span, flat

from ratchet.algorithms.advantages.group_baselines import Scale, group_relative
from ratchet.algorithms.advantages.per_turn import (
    compute_step_rewards,
    gae,
    gigpo,
    penalise_malformed_turns,
    turn_returns,
)
from ratchet.algorithms.advantages.teacher import on_policy_distillation
from ratchet.algorithms.base import AlgoState
from ratchet.batch import Batch
from ratchet.data.packing import pack
from ratchet.errors import MissingColumn
from ratchet.types import Group, Scored, Task, Trajectory, Turn

GAMMAS = st.sampled_from([1.0, 0.9, 0.5])


def equal(batch: Batch, rows: list[Row], expected: Ragged, name: str = "advantages") -> None:
    """On every trained token; and an advantage is 0 on all others."""
    found, wanted = batch.need(name), column(kept(rows, expected))
    assert found.dtype == torch.float64
    if name != "advantages":
        found, wanted = found[batch.trainable_T], wanted[batch.trainable_T]
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


def agent(
    *turns: tuple[int, float | None, str], attempt: int = 0, reward: float = 0.0, **fields
) -> Row:
    """A prompt token, then turns of (tokens, own reward, state), with one token of the environment
    between two."""
    trained, spans = [False], []
    for i, (length, own, state) in enumerate(turns):
        trained += [False] * (i > 0)
        spans.append(Span(len(trained), len(trained) + length, own, state))
        trained += [True] * length
    return Row(
        "g",
        attempt,
        [1] * len(trained),
        trained,
        fields.pop("ending", "scored"),
        reward,
        turns=spans,
        **fields,
    )


def critic(rows: list[Row], **options) -> Batch:
    return gae(filled(rows, "values", "token_rewards", "bootstrap_values"), AlgoState(), **options)


# --- generalised advantage estimation


@settings(max_examples=60)
@given(episodes(), GAMMAS, st.sampled_from([1.0, 0.95, 0.0]), st.sampled_from([None, 1.0, 0.5]))
def test_gae_equals_the_oracle(rows: list[Row], gamma: float, lam: float, value_lam: float | None):
    options = {"gamma": gamma, "lam": lam, "value_lam": value_lam, "length_alpha": None}
    batch = critic(rows, **options)
    advantages, returns = oracle.gae(rows, **options)
    equal(batch, rows, advantages)
    equal(batch, rows, returns, "returns")


@settings(max_examples=40)
@given(episodes(), GAMMAS, st.sampled_from([None, 0.9]), st.sampled_from([0.05, 0.7, 2.0]))
def test_gae_with_a_lambda_by_length_equals_the_oracle(
    rows: list[Row], gamma: float, value_lam: float | None, length_alpha: float
):
    options = {"gamma": gamma, "lam": 0.95, "value_lam": value_lam, "length_alpha": length_alpha}
    batch = critic(rows, **options)
    advantages, returns = oracle.gae(rows, **options)
    equal(batch, rows, advantages)
    equal(batch, rows, returns, "returns")


def test_gae_of_two_steps_by_hand():
    # V = 1 then 2, reward 10 at the end: deltas 1/2 * 2 - 1 = 0 and 10 - 2 = 8; A_0 = 0 + 1/2 * 1/4
    # * 8 = 1
    row = agent((2, None, ""), reward=10.0, values=[7, 1, 2])
    batch = gae(filled([row], "values", "bootstrap_values"), AlgoState(), gamma=0.5, lam=0.25)
    assert batch.need("advantages").tolist() == [0, 1, 8]
    assert batch.need("returns").tolist()[1:] == [2, 10]


def test_the_share_of_the_returns_spread_that_the_critic_explains():
    # Returns 2 and 10 (variance 16), values 1 and 2: left are 1 and 8 (variance 49/4).
    row = agent((2, None, ""), reward=10.0, values=[7, 1, 2])
    batch = gae(filled([row], "values", "bootstrap_values"), AlgoState(), gamma=0.5, lam=0.25)
    assert batch.metrics["value/explained_variance"] == pytest.approx(1 - 49 / 64)
    unjudged = replace(row, attempt=1, ending="unjudged", reward=None, values=[0, 1000, 0])
    same = gae(
        filled([row, unjudged], "values", "bootstrap_values"), AlgoState(), gamma=0.5, lam=0.25
    )
    assert same.metrics == batch.metrics


@pytest.mark.parametrize("values", [[1 / 3, 2 / 7, 3], [0, 2 / 7, 3]])
@pytest.mark.parametrize("factor", [1.0, -1.0, 1e6])
def test_where_returns_are_all_equal_there_is_no_spread_to_explain(
    values: list[float], factor: float
):
    # The returns are 0.1 but for rounding.
    row = agent(
        (3, None, ""), reward=factor * 0.1, values=[0, *(factor * value for value in values)]
    )
    for rows in ([row], [replace(row, ending="unjudged", reward=None)]):
        batch = gae(filled(rows, "values", "bootstrap_values"), AlgoState(), value_lam=1.0)
        assert "value/explained_variance" not in batch.metrics


def test_observations_between_steps_are_no_steps():
    together = agent((2, None, ""), reward=10.0, values=[0, 1, 2])
    apart = agent((1, None, ""), (1, None, ""), reward=10.0, values=[0, 1, 99, 2])
    found = [
        gae(filled([row], "values", "bootstrap_values"), AlgoState(), gamma=0.5, lam=0.25)
        for row in (together, apart)
    ]
    assert [batch.need("advantages")[batch.trainable_T].tolist() for batch in found] == [[1, 8]] * 2


def test_a_truncated_row_goes_on_and_a_finished_one_ends():
    rows = [
        agent((1, None, ""), attempt=i, reward=1.0, values=[0, 3], bootstrap=8.0) for i in range(2)
    ]
    rows[1] = replace(rows[1], ending="truncated")
    batch = gae(filled(rows, "values", "bootstrap_values"), AlgoState(), gamma=0.5)
    assert batch.need("advantages").tolist() == [0, 1 - 3, 0, 1 + 4 - 3]
    over = gae(filled(rows, "values", "bootstrap_values"), AlgoState(), gamma=0.5, bootstrap=False)
    assert over.need("advantages").tolist() == [0, 1 - 3, 0, 1 - 3]


def test_the_last_step_pays_what_the_turns_have_not():
    # The row's reward is 3, of which its first turn was paid 1: 1 at the first turn's last step, 2
    # at the row's.
    row = agent((2, 1.0, ""), (1, None, ""), reward=3.0, values=[0] * 5)
    batch = gae(filled([row], "values", "bootstrap_values"), AlgoState(), lam=0.0)
    assert batch.need("advantages").tolist() == [0, 0, 1, 0, 2]


def test_a_forked_attempt_is_one_episode_whatever_its_rows():
    # Reward 3, of which the first row's turn was paid 1: the rest, 2, lands once, on the last step
    # of the last row.
    whole = agent(
        (2, 1.0, ""),
        (1, None, ""),
        reward=3.0,
        ending="truncated",
        values=[0, 4, 5, 0, 6],
        bootstrap=8.0,
    )
    first = agent((2, 1.0, ""), reward=3.0, ending="truncated", values=[0, 4, 5], bootstrap=99.0)
    last = agent((1, None, ""), reward=3.0, ending="truncated", values=[0, 6], bootstrap=8.0)
    other = agent((1, None, ""), attempt=1, reward=0.0, values=[0, 1])
    forked = [first, other, last]
    assert compute_step_rewards(filled(forked)).tolist() == [0, 0, 1, 0, 0, 0, 2]
    options = {"gamma": 0.5, "lam": 0.5, "length_alpha": 0.5}
    for name in ("advantages", "returns"):
        batch, split = (
            gae(filled(r, "values", "bootstrap_values"), AlgoState(), **options)
            for r in ([whole, other], forked)
        )
        expected = batch.need(name)[batch.trainable_T]
        assert split.need(name)[split.trainable_T].tolist() == expected[[0, 1, 3, 2]].tolist()
    batch, split = (
        turn_returns(filled([whole]), AlgoState(), gamma=0.5),
        turn_returns(filled([first, last]), AlgoState(), gamma=0.5),
    )
    assert (
        split.need("advantages")[split.trainable_T].tolist()
        == batch.need("advantages")[batch.trainable_T].tolist()
    )
    assert split.need("advantages").tolist() == [0, 2, 2, 0, 2]  # 1 + 2 / 2, then 2
    thrice = [agent((1, paid, ""), reward=3.0) for paid in (1.0, None, None)]
    assert turn_returns(filled(thrice), AlgoState(), gamma=0.5).need("advantages").tolist() == [
        0,
        1 + 2 / 4,
        0,
        2 / 2,
        0,
        2,
    ]


def test_rewards_of_tokens_that_do_not_train_are_no_step_rewards():
    row = Row("g", 0, [1, 2, 3], [False, True, False], reward=1.0, token_rewards=[0, 0.5, 0])
    batch = filled([row]).fill_tokens(
        token_rewards=torch.tensor([3.0, 0.5, 7.0], dtype=torch.float64)
    )
    assert compute_step_rewards(batch).tolist() == [0, 1.5, 0]


def test_decoupled_lambdas():
    # deltas 0, 0, 4. Policy: 1 - 1 / (1/2 * 3) = 1/3; critic: 1. Below a length of 1 / alpha the
    # policy's is 0, not negative.
    row = agent((3, None, ""), reward=4.0, values=[0] * 4)
    batch = gae(
        filled([row], "values", "bootstrap_values"), AlgoState(), value_lam=1.0, length_alpha=0.5
    )
    assert batch.need("advantages").tolist() == pytest.approx([0, 4 / 9, 4 / 3, 4])
    assert batch.need("returns").tolist()[1:] == [4, 4, 4]
    short = gae(
        filled([row], "values", "bootstrap_values"), AlgoState(), value_lam=1.0, length_alpha=0.1
    )
    assert short.need("advantages").tolist() == [0, 0, 0, 4]


@settings(max_examples=40)
@given(episodes())
def test_without_a_critic_or_discount_the_first_step_is_worth_all_rewards(rows: list[Row]):
    rows = [replace(row, values=[0.0] * len(row.tokens), bootstrap=0.0) for row in rows]
    found = critic(rows, gamma=1.0, lam=1.0).need("advantages")
    rows = kept(rows, rows)
    parts = found.split([len(row.tokens) for row in rows])
    for attempt in oracle.attempts(rows):
        steps = [(i, t) for i in attempt for t in rows[i].steps]
        if rows[attempt[0]].learns_from_reward and steps:
            i, t = steps[0]
            dense = sum(sum(rows[i].token_rewards) for i in attempt)
            assert float(parts[i][t]) == pytest.approx(rows[i].reward + dense, abs=1e-10)


def test_a_row_that_nobody_judged_teaches_neither_policy_nor_critic():
    row = replace(agent((2, None, ""), values=[0, 1.5, 2.5]), ending="unjudged", reward=None)
    batch = gae(filled([row], "values", "bootstrap_values"), AlgoState())
    assert batch.need("advantages").tolist() == [0, 0, 0]
    assert batch.need("returns").tolist()[1:] == [1.5, 2.5]
    assert batch.need("valued").tolist() == [False, False, False]


def test_the_critic_learns_at_the_steps_of_rows_that_were_judged():
    batch = gae(
        filled([agent((1, None, ""), (2, None, ""), values=[0] * 5)], "values", "bootstrap_values"),
        AlgoState(),
    )
    assert batch.need("valued").tolist() == [False, True, False, True, True]


@pytest.mark.parametrize("missing", ["values", "bootstrap_values"])
def test_gae_without_a_critic_says_so(missing: str):
    rows = [agent((1, None, ""), ending="truncated", values=[0, 1])]
    batch = filled(rows, *({"values", "bootstrap_values"} - {missing}))
    with pytest.raises(MissingColumn, match=missing):
        gae(batch, AlgoState())


# --- returns by turn


@settings(max_examples=60)
@given(episodes(), GAMMAS, st.sampled_from(["none", "group"]))
def test_turn_returns_equal_the_oracle(
    rows: list[Row], gamma: float, baseline: Literal["none", "group"]
):
    batch = turn_returns(filled(rows, "token_rewards"), AlgoState(), gamma=gamma, baseline=baseline)
    equal(batch, rows, oracle.turn_returns(rows, gamma=gamma, baseline=baseline))


def test_turn_returns_by_hand():
    # paid 1, 0 and the rest of 7, which is 6: G = 1 + 0/2 + 6/4, 0 + 6/2, 6
    row = agent((2, 1.0, ""), (1, 0.0, ""), (1, None, ""), reward=7.0)
    batch = turn_returns(filled([row]), AlgoState(), gamma=0.5)
    assert batch.need("advantages").tolist() == [0, 2.5, 2.5, 0, 3, 0, 6]


def test_a_turn_that_does_not_train_takes_its_discount_all_the_same():
    row = agent((1, None, ""), (1, None, ""), (1, None, ""), reward=4.0)
    masked = replace(
        row, trained=[trains and t != row.spans[1].start for t, trains in enumerate(row.trained)]
    )
    batch = turn_returns(filled([masked]), AlgoState(), gamma=0.5)
    assert batch.need("advantages")[batch.trainable_T].tolist() == [1, 4]


def test_the_groups_baseline_counts_turns():
    rows = [
        agent((1, None, ""), (3, None, ""), reward=6.0),
        agent((1, None, ""), attempt=1, reward=0.0),
    ]
    batch = turn_returns(filled(rows), AlgoState(), baseline="group")
    assert batch.need("advantages").tolist() == [0, 2, 0, 2, 2, 2, 0, -4]  # (6 + 6 + 0) / 3 = 4


# --- GiGPO


@settings(max_examples=60)
@given(episodes(), GAMMAS, st.sampled_from([1.0, 0.3]), st.sampled_from(["std", "none"]))
def test_gigpo_equals_the_oracle(rows: list[Row], gamma: float, step_weight: float, scale: Scale):
    options = {"gamma": gamma, "step_weight": step_weight, "scale": scale}
    batch = gigpo(filled(rows, "token_rewards"), AlgoState(), epsilon=1e-3, **options)
    equal(batch, rows, oracle.gigpo(rows, epsilon=1e-3, **options))


def test_gigpo_by_hand():
    # Attempts 0 and 1 both stand in "door" at first; only attempt 0 sees "key". Episodes: 4 and 2,
    # mean 3. Door: G = 4/2 = 2 and 2, equal: 0 for both. With gamma 1: 4 and 2, mean 3.
    rows = [
        agent((1, None, "door"), (1, None, "key"), reward=4.0),
        agent((2, None, "door"), attempt=1, reward=2.0),
    ]
    half = gigpo(filled(rows), AlgoState(), gamma=0.5, scale="none")
    assert half.need("advantages").tolist() == [0, 1, 0, 1, 0, -1, -1]
    whole = gigpo(filled(rows), AlgoState(), gamma=1.0, scale="none", step_weight=2.0)
    assert whole.need("advantages").tolist() == [0, 3, 0, 1, 0, -3, -3]


def test_gigpo_divides_by_the_spread_of_a_state():
    # Both spreads are that of 4 and 2: sqrt(2), so every advantage is 1 / sqrt(2), twice.
    rows = [agent((1, None, "door"), attempt=i, reward=r) for i, r in enumerate([4.0, 2.0])]
    batch = gigpo(filled(rows), AlgoState(), epsilon=0.0)
    assert batch.need("advantages").tolist() == pytest.approx([0, 2**0.5, 0, -(2**0.5)])


def test_states_of_the_same_name_in_two_groups_are_two_states():
    rows = [
        agent((1, None, "door"), reward=4.0),
        replace(agent((1, None, "door"), reward=2.0), group="h"),
    ]
    assert gigpo(filled(rows), AlgoState()).need("advantages").tolist() == [0] * 4


@settings(max_examples=30)
@given(episodes(), st.sampled_from(["std", "none"]))
def test_without_states_gigpo_is_group_relative(rows: list[Row], scale: Scale):
    rows = [replace(row, turns=[replace(span, state="") for span in row.spans]) for row in rows]
    batch = gigpo(filled(rows, "token_rewards"), AlgoState(), scale=scale)
    other = group_relative(filled(rows, "token_rewards"), AlgoState(), scale=scale)
    assert torch.equal(batch.need("advantages"), other.need("advantages"))
    equal(batch, rows, on_tokens(rows, episode_oracle(rows, scale=scale, epsilon=1e-6)))


@pytest.mark.parametrize("reward", [0.1, 1 / 3, -0.7])
def test_equal_turns_in_one_state_give_exactly_zero(reward: float):
    rows = [agent((2, None, "door"), attempt=i, reward=reward) for i in range(7)]
    assert gigpo(filled(rows), AlgoState()).need("advantages").tolist() == [0.0] * 21


# --- a teacher's logprobs


@settings(max_examples=40)
@given(episodes())
def test_distillation_equals_the_oracle(rows: list[Row]):
    batch = on_policy_distillation(filled(rows, "teacher_logprobs", "old_logprobs"), AlgoState())
    equal(batch, rows, oracle.on_policy_distillation(rows))


def test_rows_that_nobody_judged_are_distilled_too():
    row = Row(
        "g",
        0,
        [1, 2, 3],
        [False, True, True],
        "unjudged",
        teacher_logprobs=[0, -1, -3],
        old_logprobs=[0, -2, -2],
    )
    batch = on_policy_distillation(filled([row], "teacher_logprobs", "old_logprobs"), AlgoState())
    assert batch.need("advantages").tolist() == [0, 1, -1]


# --- all of them


@settings(max_examples=30)
@given(episodes(), st.sampled_from(["gae", "turns", "group turns", "gigpo"]))
def test_another_group_changes_nothing(rows: list[Row], name: str):
    def run(some: list[Row]) -> list[float]:
        batch = filled(some, "token_rewards", "values", "bootstrap_values")
        if name == "gae":
            return gae(batch, AlgoState()).need("advantages").tolist()
        if name == "gigpo":
            return gigpo(batch, AlgoState()).need("advantages").tolist()
        return (
            turn_returns(batch, AlgoState(), baseline="group" if name == "group turns" else "none")
            .need("advantages")
            .tolist()
        )

    first = [row for row in rows if row.group == "g0"]
    length = len(flat(kept(first, [row.tokens for row in first])))
    if length:
        assert run(rows)[:length] == pytest.approx(run(first), abs=1e-12)


# --- a teacher of other tokens


def taught(spans: list[int], teacher: list[float], *, trained: list[list[bool]]) -> list[float]:
    """Rows of given masks; the policy's log-probability is -1 everywhere, at tokens that don't
    train too."""
    rows = [Row(f"g{i}", 0, [1] * len(mask), mask, reward=1.0) for i, mask in enumerate(trained)]
    batch = filled(rows)
    columns = {"teacher_logprobs": teacher, "old_logprobs": [-1.0] * len(teacher)}
    batch = batch.fill_tokens(
        **{name: torch.tensor(values, dtype=torch.float64) for name, values in columns.items()}
    )
    if spans:
        batch = batch.fill_tokens(teacher_spans=torch.tensor(spans))
    found = on_policy_distillation(batch, AlgoState())
    assert found.metrics.get("teacher/uncovered_share") == (0.25 if spans else None)
    return found.need("advantages").tolist()


MASKS = [[False, True, True], [False, True, False, True]]


def test_tokens_that_do_not_train_are_not_taught():
    assert taught([], [-5, -3, -2, -5, -3, -5, -2], trained=MASKS) == [0, -2, -1, 0, -2, 0, -1]


def test_a_span_is_one_action_and_two_rows_may_number_theirs_alike():
    # row 0: both tokens are span 0: (-3 + 1) + (-2 + 1); row 1: its own span 0 is one token, a
    # masked one is in it too; the last token is in no span
    spans = [-1, 0, 0, -1, 0, 0, -1]
    assert taught(spans, [-5, -3, -2, -5, -4, -9, -2], trained=MASKS) == [0, -3, -3, 0, -3, 0, 0]
    assert taught(spans, [-5, -3, -2, -5, -9, -9, -2], trained=MASKS) == [0, -3, -3, 0, -8, 0, 0]


# --- malformed turns


def test_only_the_tokens_of_malformed_turns_get_the_penalty():
    """A prompt token, then turns of two tokens with one of the environment between: one that is
    well-formed, one with each fault, one with both; the first token of the last is not trained."""
    turns = (
        Turn(1, 3),
        Turn(4, 6, malformed_call=True),
        Turn(7, 9, malformed_thinking=True, malformed_call=False),
        Turn(10, 12, malformed_call=True, malformed_thinking=True),
    )
    policy = np.isin(np.arange(12), [1, 2, 4, 5, 7, 8, 11])
    row = replace(
        Trajectory.supervised(list(range(12)), policy.tolist()), turns=turns, outcome=Scored(1.0)
    )
    batch = pack([Group("g", Task("t", ()), (row, replace(row, attempt=1, turns=turns[:1])))])
    estimated_T = torch.arange(24, dtype=torch.float64) * batch.trainable_T
    filled_batch = batch.fill_tokens(advantages=estimated_T)

    def penalised(**values: float | None) -> Batch:
        return penalise_malformed_turns(filled_batch, AlgoState(), **values)

    both = penalised(calls=-5.0, thinking=-7.0)
    expected_T = estimated_T.clone()
    expected_T[[4, 5, 11]] = -5.0
    expected_T[[7, 8]] = -7.0
    assert both.need("advantages").equal(expected_T)
    assert both.metrics == {"advantage/malformed_share": 5 / 14}
    thinking = penalised(calls=None, thinking=-7.0).need("advantages")
    assert (thinking != estimated_T).nonzero()[:, 0].tolist() == [7, 8, 11]


def test_a_batch_without_malformed_turns_keeps_its_advantages():
    batch = filled([agent((2, None, ""))]).fill_tokens(
        advantages=torch.tensor([0.0, 2.0, 2.0], dtype=torch.float64)
    )
    penalised = penalise_malformed_turns(batch, AlgoState(), calls=-5.0, thinking=-5.0)
    assert penalised.need("advantages").tolist() == [0.0, 2.0, 2.0]
    assert penalised.metrics == {"advantage/malformed_share": 0.0}
