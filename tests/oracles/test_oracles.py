"""The oracles against each other, against autograd and finite differences, and against numbers
worked by hand."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import advantages, categorical, losses
from oracles.cases import rollouts
from oracles.ragged import Row, fixed_length, prompt_mean, sequence_mean, token_mean, weights_of

LOGITS = st.lists(st.floats(-3, 3), min_size=4, max_size=4)


def row(group: str, trained: list[int], **fields) -> Row:
    return Row(
        group,
        fields.pop("attempt", 0),
        [0] * len(trained),
        [bool(t) for t in trained],
        reward=1.0,
        **fields,
    )


def test_the_four_means_of_one_small_batch():
    rows = [row("a", [0, 1, 1, 1, 1]), row("a", [0, 1, 0, 1]), row("b", [0, 1]), row("b", [0, 0])]
    x = [[9, 1, 1, 1, 1.0], [9, 2, 9, 4], [9, 8], [9, 9]]
    # kept: a: 1 1 1 1 | 2 4, b: 8 | nothing
    assert token_mean(rows, x) == float(Fraction(18, 7))
    assert sequence_mean(rows, x) == float(Fraction(1 + 3 + 8, 3))
    assert prompt_mean(rows, x) == pytest.approx(float((Fraction(10, 6) + 8) / 2))
    assert fixed_length(rows, x, 10) == pytest.approx(18 / 40)
    assert weights_of(sequence_mean, rows)[1] == pytest.approx([0, 1 / 6, 0, 1 / 6])


@given(rollouts())
def test_a_mean_is_the_sum_of_its_weights_times_x(rows: list[Row]):
    x = [[math.sin(i + 3 * t) for t in range(len(r.tokens))] for i, r in enumerate(rows)]
    for mean, options in (
        (token_mean, ()),
        (sequence_mean, ()),
        (prompt_mean, ()),
        (fixed_length, (7,)),
    ):
        weights = weights_of(mean, rows, *options)
        total = sum(
            w * v
            for w_row, x_row in zip(weights, x, strict=True)
            for w, v in zip(w_row, x_row, strict=True)
        )
        assert total == pytest.approx(mean(rows, x, *options), abs=1e-12)


def test_group_relative_by_hand():
    rows = [row("a", [0, 1], attempt=i) for i in range(4)]
    rows = [
        Row(r.group, r.attempt, r.tokens, r.trained, reward=reward)
        for r, reward in zip(rows, [1, 0, 0, 1], strict=True)
    ]
    assert advantages.group_relative(rows, scale="std", epsilon=0.0) == pytest.approx(
        [math.sqrt(3) / 2, -math.sqrt(3) / 2, -math.sqrt(3) / 2, math.sqrt(3) / 2]
    )
    assert advantages.group_relative(rows, scale="none", epsilon=0.0) == [0.5, -0.5, -0.5, 0.5]


@given(
    st.floats(-2, 2),
    st.sampled_from([-1.5, -0.2, 0.0, 0.3, 2.0]),
    st.sampled_from([(0.2, 0.2), (0.2, 0.28), (0.1, 0.4)]),
    st.sampled_from([None, 1.5, 3.0]),
)
def test_surrogate_slope_is_its_finite_difference(
    shift: float, advantage: float, clip: tuple[float, float], dual
):
    low, high = clip
    kinks = [math.log(1 - low), math.log(1 + high)] + ([math.log(dual)] if dual else [])
    if any(abs(shift - kink) < 1e-4 for kink in kinks):
        return

    def value(lp: float) -> float:
        return losses.clipped_surrogate_token(
            lp, -1.0, advantage, clip_low=low, clip_high=high, dual_clip=dual
        )[0]

    lp, h = -1.0 + shift, 1e-6
    _, slope = losses.clipped_surrogate_token(
        lp, -1.0, advantage, clip_low=low, clip_high=high, dual_clip=dual
    )
    assert slope == pytest.approx((value(lp + h) - value(lp - h)) / (2 * h), abs=1e-6)


@given(LOGITS, LOGITS)
def test_closed_form_gradients_are_autograds(z: list[float], z_ref: list[float]):
    logits = torch.tensor(z, dtype=torch.float64, requires_grad=True)
    live = torch.log_softmax(logits, 0)
    ref = torch.log_softmax(torch.tensor(z_ref, dtype=torch.float64), 0)
    log_p, log_q = categorical.log_softmax(z), categorical.log_softmax(z_ref)
    for value, by_hand, slope in (
        (
            (live.exp() * (live - ref)).sum(),
            categorical.kl(log_p, log_q),
            categorical.reverse_kl_gradient(log_p, log_q),
        ),
        (
            (ref.exp() * (ref - live)).sum(),
            categorical.kl(log_q, log_p),
            categorical.forward_kl_gradient(log_p, log_q),
        ),
        (
            -(live.exp() * live).sum(),
            categorical.entropy(log_p),
            categorical.entropy_gradient(log_p),
        ),
    ):
        assert value.item() == pytest.approx(by_hand, abs=1e-12)
        assert torch.autograd.grad(value, logits, retain_graph=True)[0].tolist() == pytest.approx(
            slope, abs=1e-12
        )


def test_kl_and_entropy_by_hand():
    half, quarter = [math.log(0.5)] * 2, [math.log(0.25), math.log(0.75)]
    # .5 ln 2 + .5 ln 2/3
    assert categorical.kl(half, quarter) == pytest.approx(0.5 * math.log(4 / 3))
    assert categorical.entropy(half) == pytest.approx(math.log(2))
    assert categorical.forward_kl_gradient(half, quarter) == pytest.approx([0.25, -0.25])
