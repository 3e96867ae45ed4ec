"""KTO and its reference point: value and gradient against `oracles.preference`, and by hand.

T = all tokens laid end to end, S = sequences.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import preference
from oracles.cases import gradient, groups, outputs
from oracles.preference_cases import batch_of, evaluate, labelled, live, weighted_by_row
from oracles.ragged import Row

from ratchet.algorithms.base import Algorithm, AlgorithmTerm, AlgoState
from ratchet.algorithms.loss_aggregation import sequence_mean
from ratchet.algorithms.losses.preference import kto, kto_reference_point
from ratchet.data.packing import pack

LN3 = math.log(3)
BETAS = st.sampled_from([0.01, 0.1, 0.5, 2.0])
FACTORS = st.sampled_from([1.0, 0.75, 1.33])
near = partial(pytest.approx, rel=1e-10, abs=1e-10)


def referred(rows: list[Row]):
    return kto_reference_point(batch_of(rows), AlgoState())


def trained(rows: list[Row], x: list[float]) -> list[float]:
    """The entries of the rows that train: what the others hold is weighted by 0."""
    return [value for row, value in zip(rows, x, strict=True) if row.takes_part]


@given(rows=labelled())
def test_the_reference_point_equals_the_oracle(rows: list[Row]):
    z0_S = referred(rows).need("kto_z0")
    assert z0_S.dtype == torch.float64
    assert z0_S.tolist() == near([preference.kto_reference_point(rows)] * len(rows))


@given(rows=labelled(), beta=BETAS, desirable=FACTORS, undesirable=FACTORS)
def test_kto_equals_the_oracle(rows: list[Row], beta: float, desirable: float, undesirable: float):
    options = {"beta": beta, "desirable": desirable, "undesirable": undesirable}
    x, slopes = preference.kto(rows, z0=preference.kto_reference_point(rows), **options)
    found, slope_T = evaluate(partial(kto, **options), rows, referred(rows))
    assert trained(rows, found) == near(trained(rows, x))
    expected = weighted_by_row(slopes)
    masks = [m for row in rows for m in row.mask]
    assert all(math.isfinite(slope) for slope in slope_T)
    assert [s for s, m in zip(slope_T, masks, strict=True) if m] == near(
        [s for s, m in zip(expected, masks, strict=True) if m]
    )


@given(rows=labelled(), beta=BETAS, desirable=FACTORS, undesirable=FACTORS)
def test_a_term_of_kto_is_the_mean_over_labelled_rows(
    rows: list[Row], beta: float, desirable: float, undesirable: float
):
    """Rows of the reference point are no part of the mean, nor do they get a gradient."""
    options = {"beta": beta, "desirable": desirable, "undesirable": undesirable}
    x, slopes = preference.kto(rows, z0=preference.kto_reference_point(rows), **options)
    kept = [any(row.mask) for row in rows]
    share = 1 / max(sum(kept), 1)
    term = AlgorithmTerm("kto", partial(kto, **options), sequence_mean, level="sequence")
    batch, logprobs_T = (
        Algorithm("test", {"policy": (term,)}, "rows").weigh(referred(rows), AlgoState()),
        live(rows),
    )
    loss, metrics = term(outputs(batch, logprobs_T, rows), batch)
    assert loss.item() == near(
        share * math.fsum(v for v, keeps in zip(x, kept, strict=True) if keeps)
    )
    assert gradient(loss, logprobs_T).tolist() == near(
        [share * slope for row in slopes for slope in row]
    )
    assert all(not metric.requires_grad and metric.isfinite() for metric in metrics.values())


# --- by hand


def answer(group: str, gap: float, *, reward: float | None) -> Row:
    """One prompt token, and an answer of two tokens with log ratios of 1.5 gap and -0.5 gap; the
    reference's where the reward is None."""
    use, ending = ("reference", "unjudged") if reward is None else ("train", "scored")
    ref, ratios = [-7.0, -4.0, -4.0], [2.0, 1.5 * gap, -0.5 * gap]
    logprobs = [a + b for a, b in zip(ref, ratios, strict=True)]
    return Row(
        group, 0, [1, 2, 3], [False, True, True], ending, reward, use, logprobs, logprobs, ref
    )


def test_the_reference_point_by_hand():
    # (0.6 + 0.2 - 0.2) / 3; the labelled rows' own ratios (of 5) have no part in it, nor those of
    # prompt tokens (of 2).
    rows = [answer(f"m{i}", gap, reward=None) for i, gap in enumerate((0.6, 0.2, -0.2))]
    rows.insert(1, answer("labelled", 5.0, reward=1.0))
    assert referred(rows).need("kto_z0").tolist() == pytest.approx([0.2] * 4)
    # Below 0 it is 0: a divergence is never negative.
    rows = [answer("m", -0.6, reward=None), answer("labelled", 5.0, reward=1.0)]
    assert referred(rows).need("kto_z0").tolist() == [0.0, 0.0]


def test_an_empty_mismatched_answer_counts_as_no_divergence():
    # (0.6 + 0) / 2
    empty = replace(answer("e", 0.0, reward=None), trained=[False] * 3)
    rows = [answer("m", 0.6, reward=None), empty, answer("labelled", 1.0, reward=1.0)]
    assert referred(rows).need("kto_z0").tolist() == pytest.approx([0.3] * 3)


def test_the_reference_point_is_one_number_for_every_part_of_a_batch():
    """Micro-batches take their rows with them: the point is that of the whole batch, also in a part
    without reference rows."""
    rows = [
        answer("m", 0.6, reward=None),
        answer("a", 1.0, reward=1.0),
        answer("n", 0.2, reward=None),
    ]
    assert referred(rows).take([1]).need("kto_z0").tolist() == pytest.approx([0.4])


def test_kto_by_hand():
    # z0 = 0.5, beta = 2, log ratio 0.5 + ln 3 / 2: v = ln 3, s(v) = 3/4. Desirable: 1 - 3/4, slope
    # -2 * 3/16; undesirable: 1 - s(-v) = 3/4, slope +2 * 3/16. Reward 0 is undesirable.
    good, bad = answer("good", 0.5 + LN3 / 2, reward=1.0), answer("bad", 0.5 + LN3 / 2, reward=0.0)
    rows = [good, bad, answer("m", 0.5, reward=None)]
    batch = referred(rows)
    x, slope_T = evaluate(partial(kto, beta=2.0), rows, batch)  # rows weigh 1, 2 and 3
    assert x[:2] == near([0.25, 0.75])
    assert slope_T[:6] == near([0, -0.375, -0.375, 0, 2 * 0.375, 2 * 0.375])
    # The factors scale each side by itself.
    x, slope_T = evaluate(partial(kto, beta=2.0, desirable=2.0, undesirable=0.5), rows, batch)
    assert x[:2] == near([0.5, 0.375])
    assert slope_T[:6] == near([0, -0.75, -0.75, 0, 0.375, 0.375])


@pytest.mark.parametrize("gap", [-2000.0, 2000.0])
def test_answers_far_from_the_reference_stay_finite(gap: float):
    rows = [
        answer("good", gap, reward=1.0),
        answer("bad", gap, reward=-1.0),
        answer("m", 0.5, reward=None),
    ]
    x, slope_T = evaluate(partial(kto, beta=1.0), rows, referred(rows))
    assert x[:2] == near([1.0, 0.0] if gap < 0 else [0.0, 1.0])
    assert slope_T[:6] == near([0.0] * 6)


def test_without_answers_to_other_prompts_the_reference_point_is_zero():
    """A minibatch may have lost them: the loss then compares with the reference itself."""
    row = Row("g", 0, [1, 2], [False, True], reward=1.0)
    zero = torch.zeros(2, dtype=torch.float64)
    batch = kto_reference_point(
        pack(groups([row])).fill_tokens(old_logprobs=zero + 3, ref_logprobs=zero), AlgoState()
    )
    assert batch.need("kto_z0").tolist() == [0.0]
