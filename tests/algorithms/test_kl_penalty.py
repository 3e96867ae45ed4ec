"""The KL terms, exactly: every token of a small categorical, weighted by the probability that the
old policy draws it.

The promise is about the *expected gradient*: it is that of the named objective, also where the live
policy has moved away from the one that drew the tokens. An estimator of a KL's value,
differentiated as it stands, does not keep it: the mean gradient of k1 is 0, that of k3 is the
gradient of the other KL. V = tokens of the categorical, each the single trained token of its own
sequence.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import categorical
from oracles.cases import column, gradient, groups, outputs
from oracles.ragged import Row
from torch import Tensor

from ratchet.algorithms.kl import kl_penalty
from ratchet.data.packing import pack
from ratchet.errors import ConfigError

LOGITS = st.lists(st.floats(-2, 2), min_size=4, max_size=4)
PROMISED = [("reverse", "k1"), ("reverse", "k2"), ("reverse", "k3"), ("forward", "k3")]
EXACT_VALUE = [("reverse", "k1"), ("reverse", "k3")]


def expected(
    z: list[float], z_old: list[float], z_ref: list[float], **spec
) -> tuple[Tensor, Tensor]:
    """(E_old[x], its gradient by the live policy's logits [V]), by enumeration."""
    return enumerated(z, z_old, z_ref, **spec)[:2]


def enumerated(
    z: list[float], z_old: list[float], z_ref: list[float], **spec
) -> tuple[Tensor, Tensor, Tensor]:
    """The same, and E_old of the metric."""
    log_old, log_ref = categorical.log_softmax(z_old), categorical.log_softmax(z_ref)
    rows = [
        Row("g", v, [0, v], [False, True], reward=0.0, old_logprobs=[0.0, log_old[v]])
        for v in range(len(z))
    ]
    batch = pack(groups(rows)).fill_tokens(ref_logprobs=column([[0.0, lp] for lp in log_ref]))
    logits = torch.tensor(z, dtype=torch.float64, requires_grad=True)
    log_p = torch.log_softmax(logits, 0)
    logprobs_T = torch.stack([torch.zeros_like(log_p), log_p], dim=1).flatten()
    x_T, metrics = kl_penalty(outputs(batch, logprobs_T, rows), batch, **spec)
    assert x_T.shape == (batch.n_tokens,)
    assert all(m.shape == x_T.shape and not m.requires_grad for m in metrics.values())
    drawn_V = torch.tensor([math.exp(lp) for lp in log_old], dtype=torch.float64)
    value = (drawn_V * x_T[1::2]).sum()
    return value, gradient(value, logits), (drawn_V * metrics["kl"][1::2]).sum()


def exact(objective: str, z: list[float], z_ref: list[float]) -> tuple[float, list[float]]:
    log_p, log_ref = categorical.log_softmax(z), categorical.log_softmax(z_ref)
    if objective == "reverse":
        return categorical.kl(log_p, log_ref), categorical.reverse_kl_gradient(log_p, log_ref)
    return categorical.kl(log_ref, log_p), categorical.forward_kl_gradient(log_p, log_ref)


@pytest.mark.parametrize(("objective", "estimator"), PROMISED)
@given(z=LOGITS, z_ref=LOGITS)
def test_gradient_on_policy(objective: str, estimator: str, z: list[float], z_ref: list[float]):
    _, found = expected(z, z, z_ref, objective=objective, estimator=estimator)
    assert found.tolist() == pytest.approx(exact(objective, z, z_ref)[1], rel=1e-10, abs=1e-11)


@pytest.mark.parametrize(("objective", "estimator"), PROMISED)
@given(z=LOGITS, z_old=LOGITS, z_ref=LOGITS)
def test_gradient_off_policy(
    objective: str, estimator: str, z: list[float], z_old: list[float], z_ref: list[float]
):
    _, found = expected(z, z_old, z_ref, objective=objective, estimator=estimator)
    assert found.tolist() == pytest.approx(exact(objective, z, z_ref)[1], rel=1e-10, abs=1e-11)


@pytest.mark.parametrize(("objective", "estimator"), EXACT_VALUE)
@given(z=LOGITS, z_old=LOGITS, z_ref=LOGITS)
def test_value_is_the_kl(
    objective: str, estimator: str, z: list[float], z_old: list[float], z_ref: list[float]
):
    for drawn in (z, z_old):
        value, _ = expected(z, drawn, z_ref, objective=objective, estimator=estimator)
        assert value.item() == pytest.approx(exact(objective, z, z_ref)[0], rel=1e-10, abs=1e-12)


@pytest.mark.parametrize(("objective", "estimator"), PROMISED)
@given(z=LOGITS, z_old=LOGITS, z_ref=LOGITS)
def test_the_metric_is_the_reverse_kl_of_the_live_policy_whatever_the_estimator(
    objective: str, estimator: str, z, z_old, z_ref
):
    _, _, metric = enumerated(z, z_old, z_ref, objective=objective, estimator=estimator)
    assert metric.item() == pytest.approx(exact("reverse", z, z_ref)[0], rel=1e-10, abs=1e-12)


def test_k2_is_near_the_kl_where_the_policies_are_near():
    z, z_ref = [0.3, -0.2, 0.5, 0.0], [0.32, -0.21, 0.47, 0.03]
    value, _ = expected(z, z, z_ref, objective="reverse", estimator="k2")
    assert value.item() == pytest.approx(exact("reverse", z, z_ref)[0], rel=0.02)


@pytest.mark.parametrize(("objective", "estimator"), PROMISED)
def test_at_the_reference_there_is_neither_penalty_nor_pull(objective: str, estimator: str):
    z = [0.3, -1.0, 2.0, 0.0]
    for z_old in (z, [1.0, 0.0, -1.0, 0.5]):
        value, found = expected(z, z_old, z, objective=objective, estimator=estimator)
        assert value.item() == pytest.approx(0, abs=1e-15)
        assert found.tolist() == pytest.approx([0] * 4, abs=1e-15)


@pytest.mark.parametrize(("objective", "estimator"), PROMISED)
def test_far_from_the_reference_the_gradient_is_still_there(objective: str, estimator: str):
    """A log ratio of 14: an estimator clamped for safety would lose it silently."""
    z, z_ref = [14.0, 0.0], [0.0, 14.0]
    _, found = expected(z, z, z_ref, objective=objective, estimator=estimator)
    slope = exact(objective, z, z_ref)[1]
    assert slope[0] > 1e-5
    assert found.tolist() == pytest.approx(slope, rel=1e-8)


def test_the_two_objectives_differ_by_hand():
    # p = (1/2, 1/2), reference (1/4, 3/4). Forward: p - ref. Reverse: p (log p / ref - KL) with KL
    # = ln(4/3) / 2, so its first entry is (ln 2 - KL) / 2 = ln 3 / 4.
    z, z_ref = [0.0, 0.0], [0.0, math.log(3)]
    _, forward = expected(z, z, z_ref, objective="forward", estimator="k3")
    assert forward.tolist() == pytest.approx([0.25, -0.25])
    for estimator in ("k1", "k2", "k3"):
        value, reverse = expected(z, z, z_ref, objective="reverse", estimator=estimator)
        assert reverse.tolist() == pytest.approx([math.log(3) / 4, -math.log(3) / 4])
        if estimator != "k2":
            assert value.item() == pytest.approx(math.log(4 / 3) / 2)


@pytest.mark.parametrize("estimator", ["k1", "k2"])
def test_forward_is_refused_where_its_gradient_would_be_another(estimator: str):
    z, z_old, z_ref = [0.3, -1.0, 2.0, 0.0], [1.0, 0.0, -1.0, 0.5], [0.0, 0.1, 0.2, 0.3]
    with pytest.raises(ConfigError, match="k3"):
        expected(z, z_old, z_ref, objective="forward", estimator=estimator)


@given(z=LOGITS, z_old=LOGITS, z_ref=LOGITS)
def test_without_the_weight_it_is_grpos_published_term(
    z: list[float], z_old: list[float], z_ref: list[float]
):
    """E_old of exp(-d) - 1 + d, d = log(policy / reference), differentiated as it stands
    (arXiv:2402.03300, eq. 3 and 4)."""
    value, found = expected(
        z, z_old, z_ref, objective="forward", estimator="k3", importance_weight=False
    )
    log_p, log_old, log_ref = (categorical.log_softmax(logits) for logits in (z, z_old, z_ref))
    drawn, gaps = (
        [math.exp(lp) for lp in log_old],
        [p - ref for p, ref in zip(log_p, log_ref, strict=True)],
    )
    assert value.item() == pytest.approx(
        sum(w * (math.exp(-d) - 1 + d) for w, d in zip(drawn, gaps, strict=True)), abs=1e-10
    )
    slopes = [w * (1 - math.exp(-d)) for w, d in zip(drawn, gaps, strict=True)]
    total = sum(slopes)
    by_hand = [slope - math.exp(lp) * total for slope, lp in zip(slopes, log_p, strict=True)]
    assert found.tolist() == pytest.approx(by_hand, rel=1e-9, abs=1e-10)


def test_a_gradient_that_the_weight_carries_is_not_left_without_it():
    with pytest.raises(ConfigError, match="importance_weight=false removes"):
        expected(
            [0.1, 0.2],
            [0.1, 0.2],
            [0.0, 0.0],
            objective="reverse",
            estimator="k3",
            importance_weight=False,
        )
