"""Rollout correction against `oracles.correction`: weights, masks and metrics at every level, by
hand, and exactly: the expectation over what the sampler draws.

T = all tokens laid end to end, S = sequences.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from oracles import categorical
from oracles import correction as oracle
from oracles.cases import column, episodes, filled, gradient, kept, leaf, outputs
from oracles.ragged import Row, Span, flat
from torch import Tensor

from ratchet.algorithms.base import AlgoState
from ratchet.algorithms.config.named_policy_gradients import GRPOConfig
from ratchet.algorithms.config.policy_losses import CorrectionConfig
from ratchet.algorithms.loss_aggregation import token_mean
from ratchet.algorithms.losses.policy import clipped_surrogate, gspo, kimi, reinforce
from ratchet.algorithms.policy_gradient import build_policy_gradient
from ratchet.algorithms.rollout_correction import apply_correction, correct
from ratchet.batch import Batch
from ratchet.data.packing import pack
from ratchet.errors import MissingColumn
from ratchet.protocols import Outputs
from ratchet.testing.builders import make_group, make_trajectory

LEVELS = ["none", "token", "turn", "sequence", "geometric"]
CAPS = st.sampled_from([(0.0, 2.0), (0.0, None), (0.5, 1.5), (0.9, 4.0)])
BOUNDS = st.sampled_from([(0.5, 2.0), (0.125, 8.0), (0.0, 1.25)])
GAPS = st.one_of(st.just(0.0), st.floats(-2, 2))
close = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-10)


@st.composite
def drifted(draw: st.DrawFn) -> list[Row]:
    """Episodes whose rollout logprobs are near the old ones; where nothing trains, both are
    arbitrary."""
    rows = draw(episodes(max_groups=2))
    rows = kept(rows, rows)
    assume(rows)
    near = []
    for row in rows:
        columns = zip(row.mask, row.rollout_logprobs, row.log_kept_mass, strict=True)
        near.append(
            replace(
                row, old_logprobs=[lp - mass + draw(GAPS) if m else -7.0 for m, lp, mass in columns]
            )
        )
    return near


def run(rows: list[Row], **options) -> Batch:
    return correct(filled(rows, "old_logprobs"), AlgoState(), **options)


def off_the_bounds(rows: list[Row], level: str, bounds: tuple[float | None, ...]) -> bool:
    """No ratio is within rounding of a bound: on which side it falls is nobody's to say."""
    if level == "none":
        return True
    edges = [math.log(bound) for bound in bounds if bound]
    gaps = [oracle.aggregate(row, d, level) for row, d in zip(rows, oracle.gaps(rows), strict=True)]
    return all(abs(gap - edge) > 1e-9 for gap in flat(gaps) for edge in edges)


@pytest.mark.parametrize("mask", LEVELS)
@pytest.mark.parametrize("weight", LEVELS)
@settings(max_examples=settings.default.max_examples // 3)
@given(rows=drifted(), caps=CAPS, bounds=BOUNDS, denominator=st.sampled_from(["all", "kept"]))
def test_weights_masks_and_metrics_equal_the_oracle(
    weight: str, mask: str, rows: list[Row], caps, bounds, denominator
):
    assume(off_the_bounds(rows, weight, caps) and off_the_bounds(rows, mask, bounds))
    spec = {
        "weight_low": caps[0],
        "weight_high": caps[1],
        "mask_low": bounds[0],
        "mask_high": bounds[1],
    }
    spec |= {"mask_denominator": denominator}
    found = run(rows, weight=weight, mask=mask, **spec)
    expected = oracle.correct(rows, weight=weight, mask=mask, **spec)
    close(found.need("correction"), column(expected.token))
    assert found.trainable_T.tolist() == flat(expected.mask)
    if expected.sequence is None:
        assert not found.has("correction_S")
    else:
        close(found.need("correction_S"), torch.tensor(expected.sequence, dtype=torch.float64))
    metrics = {
        name: value for name, value in found.metrics.items() if name.startswith("correction/")
    }
    assert metrics == pytest.approx(expected.metrics, rel=1e-9, abs=1e-12)


@given(rows=drifted(), mask=st.sampled_from(LEVELS[1:]))
def test_only_the_final_mask_shrinks(rows: list[Row], mask: str):
    before = filled(rows, "old_logprobs")
    bounds = {"mask_low": 0.9, "mask_high": 1.1, "mask_denominator": "kept"}
    after = correct(before, AlgoState(), mask=mask, **bounds)  # pyright: ignore[reportArgumentType]
    assert not (after.trainable_T & ~before.trainable_T).any()
    for name in ("train_S", "scored_S", "predicted_T", "tokens_T", "lengths_S"):
        assert torch.equal(getattr(after, name), getattr(before, name))


@given(rows=drifted())
def test_without_a_gap_nothing_is_weighed_or_masked(rows: list[Row]):
    same = [
        replace(
            row,
            old_logprobs=[
                lp - mass for lp, mass in zip(row.rollout_logprobs, row.log_kept_mass, strict=True)
            ],
        )
        for row in rows
    ]
    before = filled(same, "old_logprobs")
    for level in LEVELS:
        found = correct(before, AlgoState(), weight=level, mask=level)  # pyright: ignore[reportArgumentType]
        assert torch.equal(found.trainable_T, before.trainable_T)
        assert torch.equal(found.need("correction"), before.trainable_T.double())


# --- by hand

# Two turns of two tokens with an environment's between them, of which the second turn's first does
# not train; the ratios old / rollout are 4, 1/2 | (9), 1/4: by turn 2 and 1/4, by row 1/2, their
# geometric mean (1/2)^(1/3).
RATIOS = [1.0, 4.0, 1 / 2, 1.0, 9.0, 1 / 4]
TURNS = [Span(1, 3), Span(4, 6)]
TRAINED = [False, True, True, False, False, True]


def by_hand(**options) -> Batch:
    old = [math.log(ratio) - 3.0 for ratio in RATIOS]
    row = Row(
        "g",
        0,
        [1] * 6,
        TRAINED,
        reward=1.0,
        old_logprobs=old,
        rollout_logprobs=[-3.0] * 6,
        turns=TURNS,
    )
    return run([row], **options)


@pytest.mark.parametrize(
    ("weight", "expected", "of_row"),
    [
        ("none", [1, 1, 1], 1.0),
        ("token", [4, 1 / 2, 1 / 4], None),
        ("turn", [2, 2, 1 / 4], None),
        ("sequence", [1 / 2] * 3, 1 / 2),
        ("geometric", [2 ** (-1 / 3)] * 3, 2 ** (-1 / 3)),
    ],
)
def test_the_four_levels(weight: str, expected: list[float], of_row: float | None):
    batch = by_hand(weight=weight, weight_high=None)
    assert batch.need("correction")[TRAINED].tolist() == pytest.approx(expected)
    assert batch.need("correction")[[not t for t in TRAINED]].tolist() == [0, 0, 0]
    assert batch.has("correction_S") == (of_row is not None)
    if of_row is not None:
        assert batch.need("correction_S").tolist() == pytest.approx([of_row])


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.0, 2.0, [2, 1 / 2, 1 / 4]),
        (1.0, None, [4, 1, 1]),
        (0.3, 1.0, [1, 1 / 2, 0.3]),
        (0.0, None, [4, 1 / 2, 1 / 4]),
    ],
)
def test_caps(low: float, high: float | None, expected: list[float]):
    batch = by_hand(weight="token", weight_low=low, weight_high=high)
    assert batch.need("correction")[TRAINED].tolist() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("mask", "low", "high", "stays"),
    [
        ("token", 0.4, 3.0, [0, 1, 0]),
        ("turn", 0.4, 3.0, [1, 1, 0]),
        ("turn", 0.1, 1.5, [0, 0, 1]),
        ("sequence", 0.6, 3.0, [0, 0, 0]),  # 1/2
        ("geometric", 0.6, 3.0, [1, 1, 1]),  # 0.79
        ("geometric", 0.8, 3.0, [0, 0, 0]),
        ("none", 1.0, 1.0, [1, 1, 1]),
    ],
)
def test_masks(mask: str, low: float, high: float, stays: list[int]):
    batch = by_hand(mask=mask, mask_low=low, mask_high=high, mask_denominator="kept")
    assert batch.trainable_T[TRAINED].tolist() == [bool(s) for s in stays]
    assert not batch.trainable_T[[not t for t in TRAINED]].any()
    counted = by_hand(mask=mask, mask_low=low, mask_high=high)
    assert counted.trainable_T.tolist() == TRAINED
    assert (counted.need("correction")[TRAINED] > 0).tolist() == [bool(s) for s in stays]


def test_metrics_by_hand():
    ln2 = math.log(2)
    batch = by_hand(weight="token", weight_high=2.0, mask="token", mask_low=0.4, mask_high=8.0)
    assert {
        name: batch.metrics[f"correction/{name}"] for name in ("weight_mean", "weight_max")
    } == pytest.approx({"weight_mean": 2.75 / 3, "weight_max": 2.0})
    assert batch.metrics["correction/clipped_share"] == pytest.approx(1 / 3)
    assert batch.metrics["correction/masked_share"] == pytest.approx(1 / 3)
    assert batch.metrics["correction/gap_mean"] == pytest.approx(5 * ln2 / 3)
    # d: 2 ln 2, -ln 2, -2 ln 2
    assert batch.metrics["correction/kl"] == pytest.approx((4.75 - 3 + ln2) / 3)


# Log-ratios of the learner to the sampler, on policy otherwise: exp(2.5) = 12.2 is outside [0.5,
# 5].
ICEPOP = {
    "weight": "token",
    "weight_high": None,
    "mask": "token",
    "mask_low": 0.5,
    "mask_high": 5.0,
}
LOG_GAPS, ADVANTAGES = [-0.5, 2.5, -0.2], [1.0, -1.0, 2.0]


@pytest.mark.parametrize(("denominator", "tokens"), [("all", 3), ("kept", 2)])
def test_icepop_is_the_papers_objective_by_hand(denominator: str, tokens: int):
    """Weight = ratio inside the bounds, 0 outside. The mean is over all tokens: (e^-0.5 + 2 e^-0.2)
    / 3, to be maximised."""
    old = [0.0, *[-1.0] * 3]
    sampler = [0.0, *[-1.0 - gap for gap in LOG_GAPS]]
    row = Row(
        "g",
        0,
        [1] * 4,
        [False, True, True, True],
        reward=1.0,
        old_logprobs=old,
        rollout_logprobs=sampler,
    )
    batch = run([row], **ICEPOP, mask_denominator=denominator).fill_tokens(
        advantages=column([[0.0, *ADVANTAGES]])
    )
    logprobs_T = leaf([old])
    x_T, _ = apply_correction(
        outputs(batch, logprobs_T, [row]),
        batch,
        fn=partial(clipped_surrogate, clip_low=0.2, clip_high=0.2),
    )
    loss = (token_mean(batch) * x_T).sum()
    weights = [math.exp(-0.5), 0.0, math.exp(-0.2)]
    assert loss.item() == pytest.approx(-(weights[0] + 2 * weights[2]) / tokens, rel=1e-6)
    slopes = [-w * a / tokens for w, a in zip(weights, ADVANTAGES, strict=True)]
    assert gradient(loss, logprobs_T)[1:].tolist() == pytest.approx(slopes, rel=1e-6)


def test_a_masked_sequence_has_the_weight_zero_and_stays_counted():
    # the row's ratio is 1/2
    batch = by_hand(weight="none", mask="sequence", mask_low=0.6, mask_high=3.0)
    assert batch.need("correction_S").tolist() == [0.0]
    assert batch.trainable_T.tolist() == TRAINED


def test_a_batch_in_which_nothing_trains():
    row = Row("g", 0, [1, 2], [False, False], reward=1.0, old_logprobs=[0.0, 0.0])
    for level in LEVELS:
        batch = run([row], weight=level, mask=level)
        assert batch.need("correction").tolist() == [0.0, 0.0]
        assert all(math.isfinite(value) for value in batch.metrics.values())


# --- exactly, in expectation


def drawn(
    log_p: list[float], log_q: list[float], kept_tokens: list[int]
) -> tuple[list[Row], list[float]]:
    """One row for each token that a sampler with the distribution q, cut to some tokens, can draw;
    and its probability."""
    mass = math.log(math.fsum(math.exp(log_q[v]) for v in kept_tokens))
    rows = []
    for v in kept_tokens:
        row = Row("g", v, [0, v], [False, True], reward=0.0, old_logprobs=[0.0, log_p[v]])
        rows.append(replace(row, rollout_logprobs=[0.0, log_q[v]], log_kept_mass=[0.0, mass]))
    return rows, [math.exp(log_q[v] - mass) for v in kept_tokens]


LOGITS = st.lists(st.floats(-2, 2), min_size=4, max_size=4)


@given(z=LOGITS, z_sampler=LOGITS, rewards=st.lists(st.floats(-1, 1), min_size=4, max_size=4))
@pytest.mark.parametrize("cut", [[0, 1, 2, 3], [0, 2]])
def test_uncapped_weights_make_the_expectation_the_old_policys(
    cut: list[int], z, z_sampler, rewards: list[float]
):
    """E_sampler[w A dlog p] is the policy gradient of what the sampler could draw at all. Its
    distribution is the cut one: without the kept mass, every weight would be too large by the same
    factor."""
    log_p = categorical.log_softmax(z)
    rows, probabilities = drawn(log_p, categorical.log_softmax(z_sampler), cut)
    sampler = {
        f"{name}_T": column([getattr(row, name) for row in rows])
        for name in ("rollout_logprobs", "log_kept_mass")
    }
    batch = replace(filled(rows, "old_logprobs"), **sampler)  # as float64, to be exact
    batch = correct(batch, AlgoState(), weight="token", weight_high=None)
    batch = batch.fill_tokens(advantages=column([[0.0, rewards[v]] for v in cut]))
    logits = torch.tensor(z, dtype=torch.float64, requires_grad=True)
    log_p_V = torch.log_softmax(logits, 0)[cut]
    logprobs_T = torch.stack([torch.zeros_like(log_p_V), log_p_V], dim=1).flatten()
    x_T, _ = apply_correction(outputs(batch, logprobs_T, rows), batch, fn=reinforce)
    found = gradient((torch.tensor(probabilities, dtype=torch.float64) * x_T[1::2]).sum(), logits)
    expected = [0.0] * 4
    for v in cut:
        for j in range(4):
            expected[j] -= math.exp(log_p[v]) * rewards[v] * ((j == v) - math.exp(log_p[j]))
    assert found.tolist() == pytest.approx(expected, abs=1e-10)


# --- the wrapper


def wrapped(
    rows: list[Row], advantages: Tensor, live: list[list[float]], fn, *, level: str, weight: str
):
    batch = run(rows, weight=weight, weight_high=3.0).fill_tokens(advantages=advantages)
    logprobs_T = leaf(live)
    out = outputs(batch, logprobs_T, rows)
    plain, plain_metrics = fn(out, batch)
    found, metrics = apply_correction(out, batch, fn=fn, level=level)  # pyright: ignore[reportArgumentType]
    factor = batch.need("correction" if level == "token" else "correction_S")
    assert not factor.requires_grad
    assert set(metrics) == set(plain_metrics)
    weights = torch.linspace(0.5, 2, len(plain), dtype=torch.float64)
    if level == "token":
        weights = weights * batch.trainable_T
    close(found * weights.sign(), plain * factor * weights.sign())
    close(
        gradient((weights * found).sum(), logprobs_T),
        gradient((weights * factor * plain).sum(), logprobs_T),
    )
    return factor


TOKEN_LOSSES = [reinforce, partial(clipped_surrogate, clip_low=0.2, clip_high=0.3)]
SEQUENCE_LOSSES = [partial(gspo, clip_low=0.2, clip_high=0.3), partial(kimi, tau=0.2)]


@given(rows=drifted(), data=st.data())
def test_corrected_multiplies_x_and_its_gradient(rows: list[Row], data: st.DataObject):
    rows = [
        replace(
            row,
            old_logprobs=[
                old if m else 0.0 for m, old in zip(row.mask, row.old_logprobs, strict=True)
            ],
        )
        for row in rows
    ]
    live = [
        [
            old + data.draw(GAPS) if m else 0.0
            for m, old in zip(row.mask, row.old_logprobs, strict=True)
        ]
        for row in rows
    ]
    advantages = column(
        [[data.draw(st.floats(-2, 2)) if m else 0.0 for m in row.mask] for row in rows]
    )
    for fn in TOKEN_LOSSES:
        wrapped(
            rows, advantages, live, fn, level="token", weight=data.draw(st.sampled_from(LEVELS))
        )
    for fn in SEQUENCE_LOSSES:
        weight = data.draw(st.sampled_from(["none", "sequence", "geometric"]))
        wrapped(rows, advantages, live, fn, level="sequence", weight=weight)


def test_a_sequence_loss_has_no_weight_that_differs_within_a_row():
    batch = by_hand(weight="token").fill_tokens(advantages=torch.ones(6, dtype=torch.float64))
    row = Row("g", 0, [1] * 6, TRAINED, reward=1.0, old_logprobs=[0.0] * 6)
    with pytest.raises(MissingColumn, match="correction_S"):
        apply_correction(
            outputs(batch, leaf([[0.0] * 6]), [row]), batch, fn=SEQUENCE_LOSSES[0], level="sequence"
        )


@pytest.mark.parametrize("term", ["entropy", "positive_nll"])
def test_a_masked_token_trains_in_no_term(term: str):
    """Tokens 2 and 3 of the one row are masked, and their predictions get no gradient from any
    term."""
    mask = CorrectionConfig(weight="none", mask="token", mask_low=0.5, mask_high=2.0)
    config = GRPOConfig(correction=mask, entropy_coef=0.1, positive_nll_coef=0.1)
    terms = {item.name: item for item in build_policy_gradient(config).losses["policy"]}
    row = make_trajectory([1], [2, 3, 4], reward=1.0, logprobs=[-1.0, -9.0, 0.0])
    old_T = torch.tensor([0.0, -1.0, -1.0, -1.0], dtype=torch.float64)
    batch = (
        pack([make_group("g", [row])])
        .fill_tokens(old_logprobs=old_T)
        .fill_sequences(judged_rewards=torch.ones(1).double())
    )
    batch = build_policy_gradient(config).weigh(
        correct(batch, AlgoState(), weight="none", mask="token"), AlgoState()
    )
    live = {
        "logprobs": old_T.clone().requires_grad_(),
        "entropy": torch.ones(4).double().requires_grad_(),
    }
    loss, metrics = terms[term](Outputs(batch.sequence_sum, **live), batch)
    loss.backward()
    slope_T = live["entropy" if term == "entropy" else "logprobs"].grad
    assert slope_T is not None
    close(slope_T, torch.tensor([0.0, -0.1 / 3, 0.0, 0.0], dtype=torch.float64))
    if term == "entropy":
        assert float(metrics["entropy"]) == pytest.approx(1.0)  # measured over all that was sampled
