"""Edits of the maths that `benchmarks/mutants.py` found no other test to notice."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import get_args

import pytest
import torch
from oracles.cases import column, gradient, groups, outputs
from oracles.ragged import Row, Span

from ratchet.algorithms.advantages.common import std_by
from ratchet.algorithms.advantages.compose import mixture, pipeline
from ratchet.algorithms.advantages.group_baselines import gdpo, group_relative, remax, require_parts
from ratchet.algorithms.advantages.per_turn import compute_step_rewards, turn_returns
from ratchet.algorithms.base import Algorithm, AlgorithmTerm, AlgoState
from ratchet.algorithms.loss_aggregation import fixed_length, token_mean
from ratchet.algorithms.losses.common import row_mean, row_sum
from ratchet.algorithms.losses.distillation import Objective, divergence
from ratchet.algorithms.losses.policy import clipped_surrogate, gspo, kimi, reinforce, topr
from ratchet.algorithms.losses.preference import dpo, kto, odds_ratio, require_rewards, simpo
from ratchet.algorithms.losses.reward_model import bradley_terry, process_reward
from ratchet.batch import Batch
from ratchet.data.packing import pack
from ratchet.errors import ConfigError, DataError
from ratchet.protocols import Outputs


def one_row(ratios: list[float], advantages: list[float]) -> tuple[Outputs, Batch]:
    """A prompt token, then one token for each ratio of the live to the old policy."""
    n = len(ratios)
    live = [0.0, *(-1.0 + math.log(ratio) for ratio in ratios)]
    old = [0.0, *[-1.0] * n]
    row = Row(
        "g", 0, [0] * (n + 1), [False, *[True] * n], "scored", 1.0, logprobs=live, old_logprobs=old
    )
    batch = pack(groups([row])).fill_tokens(advantages=column([[0.0, *advantages]]))
    return outputs(batch, column([live]), [row]), batch


@pytest.mark.parametrize(
    ("ratio", "advantage", "clipped"),
    [
        (1.0, 1.0, 0.0),
        (1.5, 1.0, 1.0),
        (1.5, -1.0, 0.0),
        (0.5, 1.0, 0.0),
        (0.5, -1.0, 1.0),
        (9.0, -1.0, 1.0),
    ],
)
def test_the_surrogate_says_which_tokens_a_bound_acts_on(ratio, advantage, clipped):
    _, metrics = clipped_surrogate(
        *one_row([ratio], [advantage]), clip_low=0.2, clip_high=0.2, dual_clip=3.0
    )
    assert metrics["clipped"].tolist() == [0.0, clipped]


def test_topr_tapers_no_token_whose_advantage_is_small_and_positive():
    _, metrics = topr(*one_row([4.0, 4.0, 4.0], [0.5, 0.0, -0.5]))
    torch.testing.assert_close(metrics["clipped"], column([[0.0, 0.0, 0.0, 1.0]]))


def test_kimi_measures_the_ratio_of_the_whole_row():
    _, metrics = kimi(*one_row([2.0, 4.0], [1.0, 1.0]), tau=0.5)
    torch.testing.assert_close(metrics["ratio"], column([[8.0]]))


def test_policy_losses_measure_the_ratio_the_divergence_from_the_old_policy_and_the_samplers_gap():
    out, batch = one_row([2.0, 0.5], [1.0, 1.0])
    batch = replace(batch, rollout_logprobs_T=torch.tensor([0.0, -1.5, -0.25]))
    _, metrics = reinforce(out, batch)
    torch.testing.assert_close(metrics["ratio"], column([[1.0, 2.0, 0.5]]))
    torch.testing.assert_close(
        metrics["old_kl"], column([[0.0, 1.0 - math.log(2), -0.5 + math.log(2)]])
    )
    torch.testing.assert_close(metrics["sampler_gap"], column([[0.0, 0.5, 0.75]]))
    _, by_row = gspo(*one_row([4.0, 1.0], [1.0, 1.0]), clip_low=0.2, clip_high=0.2)
    assert {name: round(x.item(), 6) for name, x in by_row.items()} == {
        "ratio": 2.0,  # the geometric mean
        "old_kl": round((3 - math.log(4)) / 2, 6),
        "sampler_gap": 0.0,
        "clipped": 1.0,
    }


def test_no_metric_of_a_policy_loss_carries_a_gradient():
    out, batch = one_row([2.0, 0.5], [1.0, 1.0])
    live = replace(out, logprobs=out.need("logprobs").clone().requires_grad_())
    bounds = {"clip_low": 0.2, "clip_high": 0.2}
    for fn in (
        reinforce,
        partial(clipped_surrogate, **bounds),
        partial(gspo, **bounds),
        partial(kimi, tau=0.5),
        topr,
    ):
        x, metrics = fn(live, batch)
        assert x.requires_grad
        assert not any(metric.requires_grad for metric in metrics.values())


def pair() -> Batch:
    rows = [
        Row("g", attempt, [0, 0], [False, True], "scored", float(1 - attempt)) for attempt in (0, 1)
    ]
    return pack(groups(rows))


@pytest.mark.parametrize(
    ("chosen", "rejected", "accuracy"),
    [(3.0, 1.0, 1.0), (1.0, 3.0, 0.0), (1.0, 1.0, 0.5), (0.6, 0.1, 1.0)],
)
def test_the_margin_of_a_pair_is_chosen_less_rejected_and_says_which_is_ahead(
    chosen, rejected, accuracy
):
    batch = pair()
    scores_S = torch.tensor([chosen, rejected], dtype=torch.float64, requires_grad=True)
    _, metrics = bradley_terry(Outputs(sequence_sum=batch.sequence_sum, scores=scores_S), batch)
    assert [metrics["margin"].item(), metrics["accuracy"].item()] == [chosen - rejected, accuracy]

    logprobs_T = torch.tensor(
        [0.0, chosen - 4, 0.0, rejected - 4], dtype=torch.float64, requires_grad=True
    )
    out = Outputs(sequence_sum=batch.sequence_sum, logprobs=logprobs_T)
    batch = batch.fill_tokens(ref_logprobs=torch.tensor([0.0, -4.0, 0.0, -4.0]))
    _, metrics = dpo(out, batch, beta=0.5)
    assert [metrics[name].item() for name in ("chosen", "rejected", "margin", "accuracy")] == [
        *(pytest.approx(x) for x in (chosen, rejected, chosen - rejected)),
        accuracy,
    ]
    _, metrics = simpo(out, batch, beta=0.5, gamma=1.0)
    assert [metrics[name].item() for name in ("chosen", "rejected", "margin", "accuracy")] == [
        *(pytest.approx(x) for x in (chosen - 4, rejected - 4, chosen - rejected)),
        accuracy,
    ]
    odds = [x - 4 - math.log(1 - math.exp(x - 4)) for x in (chosen, rejected)]
    _, metrics = odds_ratio(out, batch)
    assert [metrics[name].item() for name in ("chosen", "rejected", "margin", "accuracy")] == [
        *(pytest.approx(x) for x in (*odds, odds[0] - odds[1])),
        accuracy,
    ]
    assert not any(metric.requires_grad for metric in metrics.values())


def test_kto_counts_a_row_as_right_where_its_logratio_has_the_labels_sign():
    ratios, rewards = (0.5, -0.5, 0.5, -0.5), (0.5, 0.5, 0.0, 0.0)
    rows = [
        Row(f"g{i}", 0, [0, 0], [False, True], "scored", reward) for i, reward in enumerate(rewards)
    ]
    batch = pack(groups(rows)).fill_tokens(ref_logprobs=column([[0.0, -2.0]] * 4))
    batch = batch.fill_sequences(kto_z0=torch.zeros(4, dtype=torch.float64))
    logprobs_T = column([[0.0, ratio - 2.0] for ratio in ratios]).requires_grad_()
    _, metrics = kto(Outputs(sequence_sum=batch.sequence_sum, logprobs=logprobs_T), batch, beta=1.0)
    assert metrics["logratio"].tolist() == list(ratios)
    assert metrics["accuracy"].tolist() == [1.0, 0.0, 0.0, 1.0]
    assert not any(metric.requires_grad for metric in metrics.values())


def test_a_step_is_right_where_score_and_label_are_on_the_same_side():
    row = Row("g", 0, [0] * 8, [False, *[True] * 7], "scored", 1.0)
    labels = [math.nan, 1.0, 1.0, 0.0, 0.0, 0.75, 0.25, math.nan]
    scores = [-1.0, 0.5, -0.5, 0.5, -0.5, 0.5, -0.5, -0.5]
    batch = replace(pack(groups([row])), turn_rewards_T=column([labels]))
    _, metrics = process_reward(
        Outputs(sequence_sum=batch.sequence_sum, token_scores=column([scores])), batch
    )
    assert metrics["accuracy"].tolist() == [0.0, 1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0]


def test_a_row_that_nobody_scored_has_no_step_rewards_whatever_its_turns_earned():
    turns = [Span(1, 2, 0.5), Span(2, 3, 0.25)]
    unjudged = Row("g", 0, [0] * 3, [False, True, True], "unjudged", turns=turns)
    scored = Row("g", 1, [0] * 3, [False, True, True], "scored", 1.0, turns=turns)
    batch = pack(groups([unjudged, scored]))
    assert batch.scored_S.tolist() == [False, True]
    assert compute_step_rewards(batch).tolist() == [0.0, 0.0, 0.0, 0.0, 0.5, 0.5]


def test_what_a_turn_earned_whose_end_does_not_train_is_paid_at_the_rows_last_step():
    turns = [Span(1, 3, 1.0), Span(3, 5)]
    row = Row("g", 0, [0] * 5, [False, True, False, True, True], "scored", 3.0, turns=turns)
    assert compute_step_rewards(pack(groups([row]))).tolist() == [0.0, 0.0, 0.0, 0.0, 3.0]


def test_a_step_that_lies_in_no_turn_has_no_return():
    row = Row("g", 0, [0] * 4, [False, True, True, True], "scored", 3.0, turns=[Span(2, 4, 1.0)])
    batch = turn_returns(pack(groups([row])), AlgoState(), gamma=0.5)
    assert batch.need("advantages").tolist() == [0.0, 0.0, 3.0, 3.0]


def test_without_any_weight_on_what_follows_a_turn_has_its_own_reward():
    turns = [Span(1, 2, 0.5), Span(2, 3, 0.25)]
    rows = [
        Row("g", attempt, [0] * 3, [False, True, True], "scored", 1.0, turns=turns)
        for attempt in (0, 1)
    ]
    batch = turn_returns(pack(groups(rows)), AlgoState(), gamma=0.0)
    assert batch.need("advantages").tolist() == [0.0, 0.5, 0.5] * 2


def test_a_row_without_a_reward_that_does_not_train_has_the_reward_0():
    rows = [
        Row("a", 0, [0, 0], [False, True], "scored", 2.0),
        Row("b", 0, [0, 0], [False, True], "unjudged", None, "reference"),
    ]
    assert require_rewards(pack(groups(rows))).tolist() == [2.0, 0.0]


def test_the_first_row_that_trains_and_that_nobody_scored_is_named():
    rows = [
        Row("a", 0, [0, 0], [False, True], "unjudged", None, "reference"),
        Row("b", 0, [0, 0], [False, True], "scored", 2.0),
        Row("c", 0, [0, 0], [False, True], "unjudged"),
        Row("d", 0, [0, 0], [False, True], "unjudged"),
    ]
    with pytest.raises(DataError, match="group c has a row without a reward"):
        require_rewards(pack(groups(rows)))


def test_weights_of_parts_that_no_reward_has_are_refused_with_the_parts_that_there_are():
    with pytest.raises(
        ConfigError,
        match="weights name form, style, but the rewards have the parts length, right: use names",
    ):
        require_parts(["length", "right"], {"style": 1.0, "right": 1.0, "form": 2.0})
    with pytest.raises(
        ConfigError, match="weights name right, but the rewards have no named parts: use names"
    ):
        require_parts([], {"right": 1.0})
    with pytest.raises(
        ConfigError, match="parts are needed, but the rewards have no named parts: use names"
    ):
        require_parts([], None)


def test_a_group_whose_parts_are_equal_has_exactly_no_signal_beside_one_whose_parts_are_not():
    # Rounding leaves the normalised (0, 0, 1) a sum of 2e-16, and the batch a mean that is not
    # quite 0.
    scores = [("a", 0.0), ("a", 0.0), ("a", 1.0), ("b", 1.0), ("b", 1.0)]
    rows = [
        Row(g, i, [0, 0], [False, True], "scored", x, parts={"right": x})
        for i, (g, x) in enumerate(scores)
    ]
    advantages = gdpo(pack(groups(rows)), AlgoState()).need("advantages")[1::2].tolist()
    assert advantages == [
        *(
            pytest.approx(x, rel=1e-5)
            for x in (-((2 / 3) ** 0.5), -((2 / 3) ** 0.5), 2 * (2 / 3) ** 0.5)
        ),
        0.0,
        0.0,
    ]


@pytest.mark.parametrize(
    ("advantages", "share"), [([], 1.0), ([2.0], 0.0), ([0.0], 1.0), ([0.0, -1.0, 0.0, 0.0], 0.75)]
)
def test_the_share_of_steps_without_an_advantage(advantages: list[float], share: float):
    n = len(advantages)
    row = Row("g", 0, [0] * (n + 1), [False, *[True] * n], "scored", 1.0)
    batch = pack(groups([row])).fill_tokens(advantages=column([[9.0, *advantages]]))
    assert pipeline(batch, AlgoState(), transforms=()).metrics["advantage/zero_share"] == share


def test_what_one_part_of_a_mixture_takes_out_has_no_advantage_of_another():
    # no baseline row
    rows = [
        Row("g", attempt, [0, 0], [False, True], "scored", float(attempt)) for attempt in (0, 1)
    ]
    batch = mixture(
        pack(groups(rows)), AlgoState(), weighted_estimators=((group_relative, 1.0), (remax, 1.0))
    )
    assert not batch.trainable_T.any()
    assert batch.need("advantages").tolist() == [0.0] * 4


def test_sums_and_means_over_a_row_leave_out_what_does_not_train():
    row = Row("g", 0, [0] * 4, [False, True, True, False], "scored", 1.0)
    batch = pack(groups([row]))
    out, x_T = Outputs(sequence_sum=batch.sequence_sum), column([[8.0, 1.0, 2.0, 16.0]])
    assert [row_sum(out, batch, x_T).tolist(), row_mean(out, batch, x_T).tolist()] == [[3.0], [1.5]]


def live(out: Outputs, batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return out.need("logprobs"), {"itself": out.need("logprobs").detach()}


@pytest.mark.parametrize(
    ("weighting", "loss"), [(token_mean, 3.0), (partial(fixed_length, length=4), 1.5)]
)
@pytest.mark.parametrize("elsewhere", [0.0, 7.0, math.inf])
def test_a_metric_is_a_weighted_mean_whatever_the_weights_sum_to(weighting, loss, elsewhere):
    """And neither it nor the loss sees a token that does not train."""
    row = Row("g", 0, [0] * 3, [False, True, True], "scored", 1.0)
    term = AlgorithmTerm("live", live, weighting, coef=2.0)
    batch = Algorithm("test", {"policy": (term,)}, "rollouts").weigh(
        pack(groups([row])), AlgoState()
    )
    out = Outputs(sequence_sum=batch.sequence_sum, logprobs=column([[elsewhere, 1.0, 2.0]]))
    found, metrics = term(out, batch)
    assert [found.item(), metrics["itself"].item()] == [pytest.approx(loss), pytest.approx(1.5)]


def test_equal_numbers_have_no_spread_at_all_though_their_mean_is_a_hair_off():
    x = torch.tensor([0.1, 0.1, 0.1, 1.0, 3.0], dtype=torch.float64)
    assert x[:3].sum() / 3 != x[0]
    assert std_by((torch.tensor([0, 0, 0, 1, 1]), 3), x).tolist() == [
        0.0,
        pytest.approx(2**0.5),
        0.0,
    ]


# --- divergences over outcomes that one of the two excludes

EXCLUDED = -math.inf
HALF, QUARTER = math.log(1 / 2), math.log(1 / 4)


def apart(teacher: list[float], student: list[float], **options) -> tuple[float, list[float]]:
    """Divergence at the second token of a row, and its gradient by the student's
    log-probabilities."""
    batch = pack(groups([Row("g", 0, [0, 0], [False, True], "unjudged")]))
    batch = batch.fill_tokens(
        teacher_topk_logprobs=torch.tensor([teacher, teacher], dtype=torch.float64)
    )
    leaf = torch.tensor([student, student], dtype=torch.float64, requires_grad=True)
    x_T, _ = divergence(
        Outputs(sequence_sum=batch.sequence_sum, topk_logprobs=leaf), batch, **options
    )
    return x_T[1].item(), gradient(x_T[1], leaf)[1].tolist()


def test_a_token_that_does_not_train_has_no_divergence():
    batch = pack(groups([Row("g", 0, [0, 0, 0], [False, True, False], "unjudged")]))
    batch = batch.fill_tokens(teacher_topk_logprobs=torch.tensor([[HALF, HALF]] * 3))
    student_TK = torch.tensor([[QUARTER, math.log(3 / 4)]] * 3)
    x_T, metrics = divergence(
        Outputs(sequence_sum=batch.sequence_sum, topk_logprobs=student_TK), batch
    )
    expected = [0.0, pytest.approx(math.log(4 / 3) / 2), 0.0]
    assert [x_T.tolist(), metrics["forward_kl"].tolist()] == [expected, expected]


def test_what_the_teacher_excludes_counts_nothing_in_the_forward_divergence():
    x, slopes = apart([HALF, HALF, EXCLUDED], [QUARTER, HALF, QUARTER], objective="forward")
    assert x == pytest.approx(math.log(2) / 2)
    assert slopes == [-0.5, -0.5, 0.0]


def test_what_the_student_excludes_counts_nothing_in_the_reverse_divergence():
    x, slopes = apart([HALF, QUARTER, QUARTER], [HALF, HALF, EXCLUDED], objective="reverse")
    assert x == pytest.approx(math.log(2) / 2)
    assert slopes == [pytest.approx(0.5), pytest.approx((1 + math.log(2)) / 2), 0.0]


@pytest.mark.parametrize("objective", get_args(Objective))
def test_an_outcome_that_both_exclude_changes_no_divergence(objective: Objective):
    teacher, student = [HALF, HALF], [QUARTER, math.log(3 / 4)]
    x, slopes = apart(teacher, student, objective=objective, mix=0.25)
    padded, padded_slopes = apart(
        [*teacher, EXCLUDED], [*student, EXCLUDED], objective=objective, mix=0.25
    )
    assert math.isfinite(x)
    assert padded == pytest.approx(x)
    assert padded_slopes == [*(pytest.approx(slope) for slope in slopes), 0.0]
