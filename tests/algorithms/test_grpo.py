"""GRPO as built from its configuration, against the papers' objectives written out as loops.

Each paper is one configuration: GRPO (arXiv:2402.03300 eq. 3), DAPO (arXiv:2503.14476 eq. 8), Dr.
GRPO (arXiv:2503.20783).
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import advantages, losses
from oracles import ragged as oracle
from oracles.cases import column, gradient, groups, kept, leaf, outputs, rollouts
from oracles.ragged import Ragged, Row, weights_of
from pydantic import ValidationError
from torch import Tensor

from ratchet.algorithms.base import Algorithm, AlgoState
from ratchet.algorithms.config.advantages import GroupRelative
from ratchet.algorithms.config.named_policy_gradients import DAPOConfig, DrGRPOConfig, GRPOConfig
from ratchet.algorithms.config.policy_gradient import PolicyGradientConfig
from ratchet.algorithms.config.policy_losses import PPO
from ratchet.algorithms.policy_gradient import build_policy_gradient
from ratchet.batch import Batch
from ratchet.config.resolve import build, resolve
from ratchet.data.packing import pack
from ratchet.errors import ConfigError

PAPERS = [
    pytest.param(GRPOConfig(), oracle.sequence_mean, (), id="GRPO"),
    pytest.param(DAPOConfig(equal_rewards="keep"), oracle.token_mean, (), id="DAPO"),
    pytest.param(DrGRPOConfig(fixed_length=7), oracle.fixed_length, (7,), id="Dr. GRPO"),
    pytest.param(
        GRPOConfig(weighting="prompt_mean", loss=PPO(dual_clip=3.0)),
        oracle.prompt_mean,
        (),
        id="prompt mean, dual clip",
    ),
]


def grpo(**options) -> Algorithm:
    """Keys as in a recipe."""
    return build(resolve("algorithm", {"kind": "grpo", **options}))


def prepare(algo: Algorithm, rows: list[Row]) -> Batch:
    batch = pack(groups(rows)).fill_tokens(ref_logprobs=column([row.ref_logprobs for row in rows]))
    return algo.weigh(algo.advantage(batch, AlgoState()), AlgoState())


def total(
    algo: Algorithm, rows: list[Row], logprobs_T: Tensor, entropy_T: Tensor | None = None
) -> Tensor:
    """Without an entropy it is NaN, which a term that only measures it must keep out of the
    loss."""
    batch = prepare(algo, rows)
    out = outputs(
        batch,
        logprobs_T,
        rows,
        torch.full_like(logprobs_T, torch.nan) if entropy_T is None else entropy_T,
    )
    return sum(
        (term(out, batch)[0] for term in algo.losses["policy"]),
        torch.zeros((), dtype=torch.float64),
    )


def with_references(rows: list[Row]) -> list[Row]:
    return [
        replace(r, ref_logprobs=[0.9 * lp - 0.05 if lp else 0.0 for lp in r.old_logprobs])
        for r in rows
    ]


def surrogate(rows: list[Row], config: PolicyGradientConfig) -> tuple[Ragged, Ragged]:
    assert isinstance(config.loss, PPO)
    assert isinstance(config.advantage, GroupRelative)
    spec = {
        "clip_low": config.loss.clip_low,
        "clip_high": config.loss.clip_high,
        "dual_clip": config.loss.dual_clip,
    }
    by_row = advantages.group_relative(rows, scale=config.advantage.scale, epsilon=1e-6)
    return losses.clipped_surrogate(rows, advantages.on_tokens(rows, by_row), **spec)


@pytest.mark.parametrize(("config", "mean", "constants"), PAPERS)
@given(rows=rollouts())
def test_the_papers_objective_and_its_gradient(
    config: PolicyGradientConfig, mean, constants, rows: list[Row]
):
    rows = with_references(rows)
    x, slope = surrogate(rows, config)
    weights = weights_of(mean, rows, *constants)
    slopes = [
        [w * s for w, s in zip(w_row, s_row, strict=True)]
        for w_row, s_row in zip(weights, slope, strict=True)
    ]
    value, expected = mean(rows, x, *constants), column(kept(rows, slopes))
    rows = kept(rows, rows)
    logprobs_T = leaf([row.logprobs for row in rows])
    loss = total(build_policy_gradient(config), rows, logprobs_T)
    assert loss.item() == pytest.approx(value, rel=1e-10, abs=1e-12)
    torch.testing.assert_close(gradient(loss, logprobs_T), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@given(rows=rollouts())
def test_kl_in_the_loss_on_policy(estimator: str, rows: list[Row]):
    """At policy = old, by the closed form of each estimator: with d = log(policy / reference), the
    values are d, d^2 / 2 and exp(-d) - 1 + d; the slopes that make the expected gradient right are
    d + c with a c that has no expected gradient (1 for k1, 0 for k2; for k3, whose value's ratio is
    differentiated too, (exp(-d) - 1 + d) + (1 - exp(-d)) = d)."""
    rows = [replace(row, logprobs=row.old_logprobs) for row in with_references(rows)]
    x, slope = surrogate(rows, GRPOConfig())
    for row, x_row, s_row in zip(rows, x, slope, strict=True):
        for t, (lp, ref) in enumerate(zip(row.logprobs, row.ref_logprobs, strict=True)):
            d = lp - ref
            x_row[t] += 0.05 * {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[estimator]
            s_row[t] += 0.05 * {"k1": d + 1, "k2": d, "k3": d}[estimator]
    weights = weights_of(oracle.sequence_mean, rows)
    slopes = [
        [w * s for w, s in zip(w_row, s_row, strict=True)]
        for w_row, s_row in zip(weights, slope, strict=True)
    ]
    value, expected = oracle.sequence_mean(rows, x), column(kept(rows, slopes))
    rows = kept(rows, rows)
    logprobs_T = leaf([row.logprobs for row in rows])
    loss = total(grpo(kl={"coef": 0.05, "estimator": estimator}), rows, logprobs_T)
    assert loss.item() == pytest.approx(value, rel=1e-10, abs=1e-12)
    torch.testing.assert_close(gradient(loss, logprobs_T), expected, rtol=1e-10, atol=1e-10)


TWO = [
    Row(
        "g",
        i,
        [1, 2, 3],
        [False, True, True],
        reward=float(i),
        logprobs=[0, -1, -2.0],
        old_logprobs=[0, -1.1, -1.9],
    )
    for i in range(2)
]


def test_entropy_coefficient_rewards_entropy():
    entropy_T = leaf([[0, 1.0, 0.5]] * 2)
    loss = total(
        grpo(entropy_coef=0.01), with_references(TWO), column([r.logprobs for r in TWO]), entropy_T
    )
    assert gradient(loss, entropy_T).tolist() == pytest.approx([0, -0.0025, -0.0025] * 2)


def test_the_reference_is_asked_for_only_where_there_is_a_penalty():
    assert "ref_logprobs" not in {p.produces for p in grpo().passes}
    assert "ref_logprobs" in {p.produces for p in grpo(kl={"coef": 0.1}).passes}


def test_several_steps_a_batch_ask_for_old_logprobs():
    assert "old_logprobs" not in {p.produces for p in grpo().passes}
    for several in ({"epochs": 2}, {"minibatches": 2}):
        assert "old_logprobs" in {p.produces for p in grpo(**several).passes}


@pytest.mark.parametrize(
    "options",
    [
        {"group_size": 1},  # no peer to compare with: every advantage would be 0
        {"weighting": "fixed_length"},  # without the length
        {"weighting": "fixed_length", "fixed_length": 0},
        {"loss": {"clip_low": -0.1}},
        {"loss": {"clip_high": -0.1}},
        {"loss": {"clip_low": 1.5}},  # 1 - clip_low < 0: the bound could never act
        {"loss": {"dual_clip": 1.0}},  # c must exceed 1, or it cuts the loss on policy
        {"loss": {"dual_clip": 0.5}},
        {"kl": {"coef": -0.1}},
        {"advantage": {"epsilon": -1e-6}},
        # their mean gradients are not the forward KL's
        {"kl": {"coef": 0.1, "objective": "forward", "estimator": "k1"}},
        {"kl": {"coef": 0.1, "objective": "forward", "estimator": "k2"}},
        {"minibatches": 0},
        {"epochs": 0},
    ],
    ids=str,
)
def test_what_can_not_work_is_refused(options: dict):
    with pytest.raises((ConfigError, ValidationError)):
        grpo(**options)


def test_minibatches_are_whole_groups_each_normalised_for_itself():
    rows = with_references(
        [replace(row, group=g, trained=[False, True, g == "a"]) for g in ("a", "b") for row in TWO]
    )
    algo = grpo(minibatches=2, group_size=2)
    batch = algo.advantage(
        pack(groups(rows)).fill_tokens(ref_logprobs=column([r.ref_logprobs for r in rows])),
        AlgoState(),
    )
    minis = [algo.weigh(mini, AlgoState()) for mini in algo.split(batch)]
    assert [mini.group_ids for mini in minis] == [("a",), ("b",)]
    weights = [next(iter(mini.weights.values())).values.tolist() for mini in minis]
    assert weights == [[0, 0.25, 0.25] * 2, [0, 0.5, 0] * 2]


@given(rows=rollouts(), count=st.integers(2, 5))
@pytest.mark.parametrize("of", ["groups", "attempts"])
def test_minibatches_divide_a_batch_evenly(of: str, rows: list[Row], count: int):
    """Each row once; whole groups in order, or attempts of every group."""
    batch = pack(groups(rows))
    places = batch.fill_sequences(row=torch.arange(batch.n_sequences))
    found = [
        mini.need("row").tolist()
        for mini in grpo(minibatches=count, minibatches_of=of).split(places)
    ]
    assert len(found) == count
    assert sorted(itertools.chain(*found)) == list(range(batch.n_sequences))

    unit_S = [
        (g, a if of == "attempts" else 0)
        for g, a in zip(batch.group_S.tolist(), batch.attempt_S.tolist(), strict=True)
    ]
    units = [list(dict.fromkeys(unit_S[row] for row in rows)) for rows in found]
    assert sorted(itertools.chain(*units)) == sorted(set(unit_S)), (
        "a group or an attempt lies in two mini-batches"
    )
    if of == "attempts":
        trains = {
            unit for unit, alone in zip(unit_S, batch.baseline_S.tolist(), strict=True) if not alone
        }
        units = [[unit for unit in part if unit in trains] for part in units]
    sizes = (
        [units]
        if of == "groups"
        else [[[u for u in part if u[0] == g] for part in units] for g in range(batch.n_groups)]
    )
    assert all(max(map(len, size)) - min(map(len, size)) <= 1 for size in sizes)


def test_a_baseline_goes_with_an_attempt():
    """ReMax: one attempt a prompt and a greedy one; each optimizer step has attempts that train."""
    rows = [
        replace(TWO[0], group=g, attempt=a, use=use)
        for g in "abcd"
        for a, use in ((0, "train"), (1, "baseline"))
    ]
    algo = build(
        resolve("algorithm", {"kind": "remax", "minibatches": 2, "minibatches_of": "attempts"})
    )
    assert [
        (mini.train_S.sum().item(), mini.baseline_S.sum().item())
        for mini in algo.split(pack(groups(rows)))
    ] == [(2, 2)] * 2


def test_attempts_are_kept_together_where_the_loss_compares_them():
    algo = grpo(minibatches=2, minibatches_of="attempts")
    compared = replace(algo.losses["policy"][0], level="group")
    with pytest.raises(ConfigError, match="Set minibatches_of=groups"):
        replace(algo, losses={"policy": (compared,)})
