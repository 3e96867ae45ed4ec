"""Normalise once, then only sum: no split, order or neighbour changes a loss or a gradient.

T = all tokens laid end to end.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles.cases import column, gradient, groups, leaf, outputs, rollouts
from oracles.ragged import Row, flat, in_order
from torch import Tensor

from ratchet.algorithms.advantages import group_relative
from ratchet.algorithms.base import Algorithm, AlgoState, Term
from ratchet.algorithms.losses import clipped_surrogate, entropy_bonus, kl_penalty
from ratchet.algorithms.weightings import fixed_length, prompt_mean, sequence_mean, token_mean
from ratchet.batch import Batch
from ratchet.data.packing import pack

WEIGHTINGS = st.sampled_from([token_mean, sequence_mean, prompt_mean, partial(fixed_length, length=7)])
COLUMNS = ("logprobs", "old_logprobs", "ref_logprobs", "entropy")


def algorithm(weighting) -> Algorithm:
    surrogate = partial(clipped_surrogate, clip_low=0.2, clip_high=0.28, dual_clip=3.0)
    penalty = partial(kl_penalty, objective="reverse", estimator="k3")
    terms = (
        Term("pg", surrogate, weighting, needs=frozenset({"logprobs", "old_logprobs"})),
        Term("kl", penalty, weighting, needs=frozenset({"logprobs", "old_logprobs"}), coef=0.1),
        Term("entropy", entropy_bonus, token_mean, needs=frozenset({"entropy"}), coef=0.01),
    )
    return Algorithm("test", {"policy": terms}, "rollouts", advantage=group_relative)


def with_references(rows: list[Row]) -> list[Row]:
    return [replace(r, ref_logprobs=[0.9 * lp - 0.05 if lp else 0.0 for lp in r.old_logprobs]) for r in rows if r.counts]


def prepare(rows: list[Row], algo: Algorithm) -> Batch:
    batch = pack(groups(rows)).fill_tokens(ref_logprobs=column([row.ref_logprobs for row in rows]))
    return algo.weigh(algo.advantage(batch, AlgoState()))


def loss_and_slopes(batch: Batch, rows: list[Row], algo: Algorithm) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """(loss, d loss / d logprob [T], metrics), the loss of all terms summed."""
    logprobs_T, entropy_T = leaf([row.logprobs for row in rows]), column([row.entropy for row in rows])
    out = outputs(batch, logprobs_T, rows, entropy_T)
    loss, metrics = torch.zeros((), dtype=torch.float64), {}
    for term in algo.losses["policy"]:
        value, found = term(out, batch)
        loss = loss + value
        metrics.update({f"{term.name}/{name}": metric for name, metric in found.items()})
    return loss.detach(), gradient(loss, logprobs_T), metrics


def by_row(values_T: Tensor, rows: list[Row]) -> dict[int, list[float]]:
    """Per-token values by the identity of their row."""
    parts = values_T.split([len(row.tokens) for row in rows])
    return {id(row): part.tolist() for row, part in zip(rows, parts, strict=True)}


def assert_same(found: dict[int, list[float]], expected: dict[int, list[float]]) -> None:
    assert found.keys() == expected.keys()
    for key in expected:
        assert found[key] == pytest.approx(expected[key], rel=1e-10, abs=1e-13)


@given(rows=rollouts(), weighting=WEIGHTINGS, data=st.data())
def test_order_of_groups_and_of_rows_does_not_matter(rows: list[Row], weighting, data: st.DataObject):
    rows, algo = with_references(rows), algorithm(weighting)
    order = data.draw(st.permutations(in_order(rows)))
    shuffled = [row for g in order for row in data.draw(st.permutations([r for r in rows if r.group == g]))]
    loss, slopes, metrics = loss_and_slopes(prepare(rows, algo), rows, algo)
    other_loss, other_slopes, other_metrics = loss_and_slopes(prepare(shuffled, algo), shuffled, algo)
    assert other_loss.item() == pytest.approx(loss.item(), rel=1e-10, abs=1e-13)
    assert_same(by_row(other_slopes, shuffled), by_row(slopes, rows))
    for name in metrics:
        assert other_metrics[name].item() == pytest.approx(metrics[name].item(), rel=1e-10, abs=1e-13)


@given(rows=rollouts(), weighting=WEIGHTINGS, data=st.data())
def test_micro_batches_sum_to_the_whole(rows: list[Row], weighting, data: st.DataObject):
    """Weighed once, cut anywhere, in any order, groups torn apart."""
    rows, algo = with_references(rows), algorithm(weighting)
    if not rows:
        return
    whole = prepare(rows, algo)
    loss, slopes, metrics = loss_and_slopes(whole, rows, algo)
    order = data.draw(st.permutations(range(len(rows))))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(rows)), max_size=3)) | {0, len(rows)})
    total, parts, sums = 0.0, {}, dict.fromkeys(metrics, 0.0)
    for start, end in itertools.pairwise(cuts):
        picked = order[start:end]
        some = [rows[i] for i in picked]
        part, part_slopes, part_metrics = loss_and_slopes(whole.take(picked), some, algo)
        total += part.item()
        parts |= by_row(part_slopes, some)
        sums = {name: sums[name] + part_metrics[name].item() for name in sums}
    assert total == pytest.approx(loss.item(), rel=1e-10, abs=1e-13)
    assert_same(parts, by_row(slopes, rows))
    assert sums == pytest.approx({name: metric.item() for name, metric in metrics.items()}, rel=1e-10, abs=1e-13)


@given(rows=rollouts(), weighting=WEIGHTINGS, data=st.data())
def test_a_neighbours_logprobs_change_nothing(rows: list[Row], weighting, data: st.DataObject):
    """Another trajectory's logprobs never reach a row's contribution, to the last bit."""
    rows, algo = with_references(rows), algorithm(weighting)
    if len(rows) < 2:
        return
    batch = prepare(rows, algo)
    victim = data.draw(st.integers(0, len(rows) - 1))
    moved = [row if i == victim else replace(row, logprobs=[lp - 0.7 for lp in row.logprobs]) for i, row in enumerate(rows)]
    start = int(batch.starts_S[victim])
    own = slice(start, start + len(rows[victim].tokens))
    for term in algo.losses["policy"]:
        found = []
        for variant in (rows, moved):
            logprobs_T, entropy_T = leaf([r.logprobs for r in variant]), leaf([r.entropy for r in variant])
            x_T, metrics = term.fn(outputs(batch, logprobs_T, rows, entropy_T), batch)
            slopes_T = gradient(x_T[own].sum(), logprobs_T)
            elsewhere = torch.ones(batch.n_tokens, dtype=torch.bool)
            elsewhere[own] = False
            assert not slopes_T[elsewhere].any()
            found.append([x_T[own], slopes_T[own], *(m[own] for m in metrics.values())])
        for a, b in zip(*found, strict=True):
            assert torch.equal(a, b)


def noise(row: Row, numbers: list[float]) -> list[float]:
    """The row's numbers at the tokens that train, others elsewhere."""
    return [x if trains else 1.7 * t - 3 for t, (trains, x) in enumerate(zip(row.mask, numbers, strict=True))]


@given(rows=rollouts(), weighting=WEIGHTINGS)
def test_tokens_that_do_not_train_reach_nothing(rows: list[Row], weighting):
    """Prompt, environment and baseline tokens may hold any numbers in any column."""
    rows, algo = with_references(rows), algorithm(weighting)
    noisy = [replace(row, **{name: noise(row, getattr(row, name)) for name in COLUMNS}) for row in rows]
    loss, slopes, _ = loss_and_slopes(prepare(rows, algo), rows, algo)
    noisy_loss, noisy_slopes, _ = loss_and_slopes(prepare(noisy, algo), noisy, algo)
    assert torch.equal(noisy_loss, loss)
    assert torch.equal(noisy_slopes, slopes)
    assert not slopes[~torch.tensor(flat([row.mask for row in rows]), dtype=torch.bool)].any()


@given(rows=rollouts(), weighting=WEIGHTINGS)
def test_rows_that_take_no_part_leave_the_rest_alone(rows: list[Row], weighting):
    """Baseline rows, taken out beforehand, change no loss and no gradient."""
    algo = algorithm(weighting)
    rows = with_references(rows)  # failures are not even packed
    alone = [row for row in rows if row.takes_part]
    loss, slopes, _ = loss_and_slopes(prepare(rows, algo), rows, algo)
    expected_loss, expected, _ = loss_and_slopes(prepare(alone, algo), alone, algo)
    assert loss.item() == pytest.approx(expected_loss.item(), rel=1e-10, abs=1e-13)
    found = by_row(slopes, rows)
    assert_same({id(row): found[id(row)] for row in alone}, by_row(expected, alone))


@given(rows=rollouts())
def test_zero_advantage_rows_still_feel_the_kl(rows: list[Row]):
    """A group of equal rewards has no policy gradient, and the penalty pulls it all the same."""
    rows = [replace(row, reward=1.0, ending="scored") for row in with_references(rows)]
    algo = algorithm(token_mean)
    batch = prepare(rows, algo)
    for term, moves in zip(algo.losses["policy"][:2], (False, True), strict=True):
        logprobs_T = leaf([row.logprobs for row in rows])
        slopes_T = gradient(term(outputs(batch, logprobs_T, rows), batch)[0], logprobs_T)
        trains = torch.tensor(flat([row.mask for row in rows]), dtype=torch.bool)
        assert bool(slopes_T.any()) == (moves and bool(trains.any()))
