"""Every policy loss against `oracles.policy_losses`: the value and the gradient by every logprob of
a random ragged batch; on policy; the tables of clipping by sign; what is detached. The clipped
surrogate has more in `test_losses.py`.

T = all tokens laid end to end, S = sequences.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from oracles import losses, policy_losses
from oracles import ragged as oracle
from oracles.cases import column, gradient, groups, kept, leaf, outputs, rollouts
from oracles.ragged import Ragged, Row, weights_of
from torch import Tensor

from ratchet.algorithms.base import Algorithm, AlgorithmTerm, AlgoState
from ratchet.algorithms.loss_aggregation import sequence_mean, token_mean
from ratchet.algorithms.losses import policy
from ratchet.batch import Batch
from ratchet.data.packing import pack

close = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-10)


@dataclass(frozen=True)
class Loss:
    """One loss, its oracle, the options that it is tried with, and what it is on policy."""

    name: str
    oracle: Callable[..., tuple[Any, Ragged]]
    options: list[dict[str, Any]]
    on_policy: str = "A"  # the value: "A" for -A, "logprob" for -A log p, "soft" for -2 A / tau
    level: str = "token"
    # log ratios where it is not smooth
    kinks: Callable[[dict[str, Any]], list[float]] = field(default=lambda options: [])

    @property
    def fn(self) -> Callable[..., tuple[Tensor, dict[str, Tensor]]]:
        return getattr(policy, self.name)

    def __str__(self) -> str:
        return self.name


def ratio_bounds(options: dict[str, Any]) -> list[float]:
    low, high, dual = options["clip_low"], options["clip_high"], options.get("dual_clip")
    bounds = (
        [1.0 + high]
        + ([1.0 - low] if low is not None and low < 1 else [])
        + ([dual] if dual else [])
    )
    return [math.log(b) for b in bounds]


def log_bounds(options: dict[str, Any]) -> list[float]:
    return [-options["clip_low"], options["clip_high"]]


CLIPS = [
    {"clip_low": low, "clip_high": high}
    for low, high in [(0.2, 0.2), (0.2, 0.28), (0.05, 0.6), (3e-4, 4e-4)]
]
DUALS = [{**clip, "dual_clip": dual} for clip in CLIPS for dual in (None, 1.2, 3.0)]
ONE_SIDED = [{"clip_low": None, "clip_high": high} for high in (0.2, 2.0)]
TAPERS = [
    {"negative_low": low, "negative_high": high}
    for low, high in [(0.0, 1.0), (0.1, 0.5), (0.0, 7.0)]
]
WIDTHS = [
    {"clip_low": low, "clip_high": high} for low, high in [(0.4, 0.4), (0.1, 0.7), (0.9, 0.3)]
]
SOFT = [{"tau_pos": pos, "tau_neg": neg} for pos, neg in [(1.0, 1.05), (0.5, 4.0)]]
TOKEN = [
    Loss("clipped_surrogate", losses.clipped_surrogate, DUALS, kinks=ratio_bounds),
    Loss("reinforce", policy_losses.reinforce, [{}], "logprob"),
    Loss("gspo_token", policy_losses.gspo_token, CLIPS, kinks=ratio_bounds),
    Loss("cispo", policy_losses.cispo, [*CLIPS, *ONE_SIDED], "logprob"),
    Loss("topr", policy_losses.topr, TAPERS, "logprob"),
    Loss("sapo", policy_losses.sapo, SOFT, "soft"),
]
SEQUENCE = [
    Loss("gspo", policy_losses.gspo, CLIPS, level="sequence", kinks=ratio_bounds),
    Loss("gmpo", policy_losses.gmpo, WIDTHS, level="sequence", kinks=log_bounds),
    Loss(
        "kimi",
        policy_losses.kimi,
        [{"tau": 0.1}, {"tau": 1.0}, {"tau": 0.0}],
        "logprob",
        "sequence",
    ),
]
ALL = TOKEN + SEQUENCE


@st.composite
def judged(draw: st.DrawFn) -> tuple[list[Row], Ragged]:
    """Rows that are in the batch, and any advantages: constant in a row, as most estimators' are,
    or a token's own. Old and live logprobs where nothing trains are arbitrary: nobody may read
    them."""
    rows = draw(rollouts(max_groups=3))
    rows = kept(rows, rows)
    assume(rows)
    amount = st.one_of(st.sampled_from([0.0, 1.0, -1.0]), st.floats(-3, 3))
    advantages, out = [], []
    for row in rows:
        level = draw(amount | st.none())
        advantages.append(
            [(draw(amount) if level is None else level) if m else 0.0 for m in row.mask]
        )
        junk = draw(st.sampled_from([0.0, -2.5]))
        out.append(
            replace(
                row,
                old_logprobs=[
                    old if m else junk for m, old in zip(row.mask, row.old_logprobs, strict=True)
                ],
            )
        )
    return out, advantages


def batch_of(rows: list[Row], advantages: Ragged) -> Batch:
    return pack(groups(rows)).fill_tokens(advantages=column(advantages))


def weigh(batch: Batch, term: AlgorithmTerm) -> Batch:
    return Algorithm("test", {"policy": (term,)}, "rollouts").weigh(batch, AlgoState())


def log_ratios(row: Row) -> list[float]:
    return [
        lp - old for m, lp, old in zip(row.mask, row.logprobs, row.old_logprobs, strict=True) if m
    ]


def smooth(rows: list[Row], kinks: list[float]) -> bool:
    """Whether no ratio, of a token or of a row, is within rounding of a bound, where the slope is
    anybody's."""
    for row in rows:
        lrs = log_ratios(row)
        if lrs and any(
            abs(x - kink) < 1e-9 for x in [*lrs, policy_losses.mean(lrs)] for kink in kinks
        ):
            return False
    return True


def assert_metrics(metrics: dict[str, Tensor], shape: torch.Size) -> None:
    for name, value in metrics.items():
        assert value.shape == shape, name
        assert not value.requires_grad, name
        assert value.isfinite().all(), name


# --- against the oracles


@pytest.mark.parametrize("loss", TOKEN, ids=str)
@given(case=judged(), data=st.data())
def test_token_losses_equal_the_oracle(
    loss: Loss, case: tuple[list[Row], Ragged], data: st.DataObject
):
    rows, advantages = case
    options = data.draw(st.sampled_from(loss.options))
    assume(smooth(rows, loss.kinks(options)))
    batch, logprobs_T = batch_of(rows, advantages), leaf([row.logprobs for row in rows])
    x_T, metrics = loss.fn(outputs(batch, logprobs_T, rows), batch, **options)
    assert x_T.shape == (batch.n_tokens,)
    assert_metrics(metrics, x_T.shape)
    values, slopes = loss.oracle(rows, advantages, **options)
    mask_T = batch.trainable_T
    close(x_T[mask_T], column(values)[mask_T])
    # a token's slope is its own
    weights_T = torch.linspace(-1, 2, batch.n_tokens, dtype=torch.float64) * mask_T
    close(gradient((weights_T * x_T).sum(), logprobs_T), weights_T * column(slopes))


@pytest.mark.parametrize("loss", SEQUENCE, ids=str)
@given(case=judged(), data=st.data())
def test_sequence_losses_equal_the_oracle(
    loss: Loss, case: tuple[list[Row], Ragged], data: st.DataObject
):
    rows, advantages = case
    options = data.draw(st.sampled_from(loss.options))
    assume(smooth(rows, loss.kinks(options)))
    batch, logprobs_T = batch_of(rows, advantages), leaf([row.logprobs for row in rows])
    x_S, metrics = loss.fn(outputs(batch, logprobs_T, rows), batch, **options)
    assert x_S.shape == (batch.n_sequences,)
    assert_metrics(metrics, x_S.shape)
    values, slopes = loss.oracle(rows, advantages, **options)
    close(x_S, torch.tensor(values, dtype=torch.float64))
    weights_S = torch.linspace(-1, 2, batch.n_sequences, dtype=torch.float64)
    close(
        gradient((weights_S * x_S).sum(), logprobs_T), weights_S[batch.sequence_T] * column(slopes)
    )


@pytest.mark.parametrize(
    ("weighting", "mean"), [(token_mean, oracle.token_mean), (sequence_mean, oracle.sequence_mean)]
)
@pytest.mark.parametrize("loss", ALL, ids=str)
@settings(max_examples=25)
@given(case=judged())
def test_weighted_as_terms(loss: Loss, weighting, mean, case: tuple[list[Row], Ragged]):
    """A row's x counts as each of its trained tokens would: its weight is the sum of theirs."""
    rows, advantages = case
    options = loss.options[0]
    assume(smooth(rows, loss.kinks(options)))
    term = AlgorithmTerm("policy", partial(loss.fn, **options), weighting, level=loss.level)  # pyright: ignore[reportArgumentType]
    batch, logprobs_T = (
        weigh(batch_of(rows, advantages), term),
        leaf([row.logprobs for row in rows]),
    )
    total, metrics = term(outputs(batch, logprobs_T, rows), batch)
    values, slopes = loss.oracle(rows, advantages, **options)
    weights = weights_of(mean, rows)
    if loss.level == "sequence":
        values = [[value] * len(row.tokens) for value, row in zip(values, rows, strict=True)]
        weights = [[math.fsum(w)] * len(w) for w in weights]
    assert total.item() == pytest.approx(mean(rows, values), rel=1e-10, abs=1e-12)
    close(gradient(total, logprobs_T), column(weights) * column(slopes))
    assert all(metric.isfinite() and metric.ndim == 0 for metric in metrics.values())


# --- on policy


@pytest.mark.parametrize("loss", ALL, ids=str)
@settings(max_examples=settings.default.max_examples // 2)
@given(case=judged(), data=st.data())
def test_on_policy_it_is_the_plain_policy_gradient(
    loss: Loss, case: tuple[list[Row], Ragged], data: st.DataObject
):
    """At policy = old the slope of a token is -A, or -A / |y| by each token where the answer's
    ratio is length-normalised."""
    rows, advantages = case
    rows = [replace(row, old_logprobs=row.logprobs) for row in rows]
    options = data.draw(
        st.sampled_from(loss.options).filter(lambda o: o.get("negative_high", 1.0) >= 1.0)
    )
    batch, logprobs_T = batch_of(rows, advantages), leaf([row.logprobs for row in rows])
    x, _ = loss.fn(outputs(batch, logprobs_T, rows), batch, **options)
    a_T, mask_T, sums = column(advantages), batch.trainable_T, batch.sequence_sum
    count_S = sums(mask_T.double()).clamp(min=1)
    tau_T = column(
        [
            [options.get("tau_pos" if a > 0 else "tau_neg", 1.0) for a in a_row]
            for a_row in advantages
        ]
    )
    value_T = (
        -a_T
        * {"A": torch.ones_like(a_T), "logprob": logprobs_T.detach(), "soft": 2 / tau_T}[
            loss.on_policy
        ]
    )
    slope_T = -a_T
    if loss.name == "kimi":
        close(x, sums(value_T))
    elif loss.level == "sequence":
        close(x, sums(value_T) / count_S)
        slope_T = (-sums(a_T) / count_S**2)[batch.sequence_T] * mask_T
    else:
        close(x[mask_T], value_T[mask_T])
        x = x[mask_T]
    close(gradient(x.sum(), logprobs_T), slope_T)


# --- by hand


def one_answer(
    ratios: list[float], advantage: float, loss: str, **options
) -> tuple[list[float], list[float]]:
    """(x, gradient of the sum of x by the trained tokens) of one answer; old logprobs are all
    -1."""
    row = Row("g", 0, [1] * (len(ratios) + 1), [False] + [True] * len(ratios), reward=1.0)
    row = replace(
        row,
        logprobs=[0.0] + [math.log(r) - 1.0 for r in ratios],
        old_logprobs=[0.0] + [-1.0] * len(ratios),
    )
    batch, logprobs_T = batch_of([row], [[advantage * m for m in row.mask]]), leaf([row.logprobs])
    x, _ = getattr(policy, loss)(outputs(batch, logprobs_T, [row]), batch, **options)
    slopes = gradient(
        (x * (batch.trainable_T if len(x) == batch.n_tokens else 1)).sum(), logprobs_T
    )
    return x.tolist(), slopes[1:].tolist()


SIGNS = [
    (2.0, 1.5, -2.4, False),
    (2.0, 1.1, -2.2, True),
    (2.0, 0.5, -1.0, True),
    (-2.0, 0.5, 1.6, False),
    (-2.0, 0.9, 1.8, True),
    (-2.0, 1.5, 3.0, True),
]


@pytest.mark.parametrize(("advantage", "s", "x", "moves"), SIGNS)
def test_sign_table_of_the_sequence_ratio(advantage: float, s: float, x: float, moves: bool):
    """The tokens' ratios are 4 s and s / 4: clipped each by itself, they would give another
    answer."""
    found, slopes = one_answer([4 * s, s / 4], advantage, "gspo", clip_low=0.2, clip_high=0.2)
    slope = -s * advantage / 2 if moves else 0.0  # s / |y| by each token
    assert found == pytest.approx([x])
    assert slopes == pytest.approx([slope, slope], abs=1e-12)
    found, slopes = one_answer([4 * s, s / 4], advantage, "gspo_token", clip_low=0.2, clip_high=0.2)
    assert found[1:] == pytest.approx([x, x])
    assert slopes == pytest.approx([2 * slope, 2 * slope], abs=1e-12)


@pytest.mark.parametrize(
    ("advantage", "ratio", "weight"),
    [
        (2.0, 3.0, 1.2),
        (2.0, 0.5, 0.9),
        (-2.0, 3.0, 1.2),
        (-2.0, 0.5, 0.9),
        (2.0, 1.1, 1.1),
        (-2.0, 1.1, 1.1),
    ],
)
def test_cispo_bounds_the_weight_and_keeps_every_gradient(
    advantage: float, ratio: float, weight: float
):
    found, slopes = one_answer([ratio], advantage, "cispo", clip_low=0.1, clip_high=0.2)
    assert found[1] == pytest.approx(-weight * advantage * (math.log(ratio) - 1))
    assert slopes == pytest.approx([-weight * advantage])


def test_cispo_without_a_lower_bound():
    _, slopes = one_answer([1e-3, 3.0], 2.0, "cispo", clip_low=None, clip_high=1.0)
    assert slopes == pytest.approx([-2e-3, -4.0])


@pytest.mark.parametrize(
    ("advantage", "ratios", "weight"),
    [
        (1.0, [4.0, 2.0], 1.0),  # positives are never weighed
        (1.0, [0.5, 0.1], 1.0),
        (-1.0, [0.5, 0.5], 0.25),  # negatives by the whole answer's ratio
        (-1.0, [4.0, 0.5], 1.0),  # no more than negative_high
        (-1.0, [0.1, 0.1], 0.05),  # no less than negative_low
    ],
)
def test_topr_tapers_negative_answers_alone(advantage: float, ratios: list[float], weight: float):
    _, slopes = one_answer(ratios, advantage, "topr", negative_low=0.05, negative_high=1.0)
    assert slopes == pytest.approx([-weight * advantage] * 2)
    cut = advantage < 0 and weight != math.prod(ratios)
    assert share_clipped("topr", advantage, ratios, negative_low=0.05, negative_high=1.0) == cut


@pytest.mark.parametrize(
    ("advantage", "ratios", "x", "moves"),
    [
        # only what gained too much is cut, at 1.5
        (2.0, [4.0, 0.25], -2 * math.sqrt(1.5 * 0.25), [0, 1]),
        # only what lost too much is cut, at 1 / 2
        (-2.0, [4.0, 0.25], 2 * math.sqrt(4.0 * 0.5), [1, 0]),
        (2.0, [4.0, 4.0], -3.0, [0, 0]),
        (-2.0, [0.25, 0.25], 1.0, [0, 0]),
        (2.0, [1.2, 1.2], -2.4, [1, 1]),
    ],
)
def test_gmpo_cuts_token_ratios_before_their_geometric_mean(
    advantage: float, ratios: list[float], x: float, moves: list[int]
):
    spec = {"clip_low": math.log(2), "clip_high": math.log(1.5)}
    found, slopes = one_answer(ratios, advantage, "gmpo", **spec)
    assert found == pytest.approx([x])
    assert slopes == pytest.approx([x / 2 * m for m in moves], abs=1e-12)


def test_sapo_by_hand():
    # tau 2, r = 1 + ln(3) / 2: sigmoid(ln 3) = 3/4, so f = 2 * 3/4 and f' = 4 * 3/4 * 1/4.
    r = 1 + math.log(3) / 2
    found, slopes = one_answer([r], 1.0, "sapo", tau_pos=2.0, tau_neg=5.0)
    assert (found[1], slopes[0]) == pytest.approx((-1.5, -0.75 * r))
    found, slopes = one_answer([r], -1.0, "sapo", tau_pos=5.0, tau_neg=2.0)
    assert (found[1], slopes[0]) == pytest.approx((1.5, 0.75 * r))


def test_sapo_keeps_the_precision_of_its_temperatures():
    found, _ = one_answer([1.0], -1.0, "sapo", tau_pos=1.0, tau_neg=1.05)
    assert found[1] == pytest.approx(2 / 1.05, rel=1e-12)


def test_kimi_by_hand():
    # log ratios ln 2 and ln 3, tau 1/2: the regulariser is (ln 6)^2 / 4, and pulls every token by
    # ln(6) / 2.
    found, slopes = one_answer([2.0, 3.0], 1.5, "kimi", tau=0.5)
    assert found == pytest.approx([-1.5 * (math.log(6) - 2) + math.log(6) ** 2 / 4])
    assert slopes == pytest.approx([-1.5 + math.log(6) / 2] * 2)


@given(case=judged())
def test_gspo_token_is_gspo_where_a_row_has_one_advantage(case: tuple[list[Row], Ragged]):
    """Section 4.3 of the paper: the token form differs in nothing then, value and gradient of a
    row's mean alike."""
    rows, _ = case
    advantages = [
        [(-1.0) ** i * (i + 1) if m else 0.0 for m in row.mask] for i, row in enumerate(rows)
    ]
    spec = {"clip_low": 0.2, "clip_high": 0.28}
    assume(smooth(rows, ratio_bounds(spec)))
    batch, logprobs_T = batch_of(rows, advantages), leaf([row.logprobs for row in rows])
    out, mask_T = outputs(batch, logprobs_T, rows), batch.trainable_T
    x_S, _ = policy.gspo(out, batch, **spec)
    x_T, _ = policy.gspo_token(out, batch, **spec)
    mean_S = batch.sequence_sum(torch.where(mask_T, x_T, 0.0)) / batch.sequence_sum(
        mask_T.double()
    ).clamp(min=1)
    close(mean_S, x_S)
    close(gradient(mean_S.sum(), logprobs_T), gradient(x_S.sum(), logprobs_T))


# --- robustness


@pytest.mark.parametrize("loss", ALL, ids=str)
@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
@pytest.mark.parametrize("log_ratio", [-60.0, 60.0])
def test_extreme_ratios_stay_finite(loss: Loss, advantage: float, log_ratio: float):
    for options in loss.options:
        x, slopes = one_answer([math.exp(log_ratio), 1.0], advantage, loss.name, **options)
        assert all(math.isfinite(v) for v in (*x, *slopes))


@pytest.mark.parametrize("loss", ALL, ids=str)
def test_what_does_not_train_poisons_nothing(loss: Loss):
    """A filter took a row and a token out of the final mask; their logprobs would overflow any
    ratio."""
    rows = [
        Row(
            "g",
            0,
            [1, 2, 3],
            [False, True, True],
            reward=1.0,
            logprobs=[0, -1, -1],
            old_logprobs=[0, -1.1, -1.05],
        ),
        Row(
            "g",
            1,
            [1, 2, 3],
            [False, True, True],
            reward=0.0,
            logprobs=[0, 0, 0],
            old_logprobs=[0, -2e3, 2e3],
        ),
        Row(
            "g",
            2,
            [1, 2, 3],
            [False, True, True],
            reward=0.0,
            logprobs=[0, -2, 0],
            old_logprobs=[0, -2.1, -2e3],
        ),
    ]
    trains = torch.tensor([False, True, True, False, False, False, False, True, False])
    a_T = torch.where(trains, 1.0, 0.0).double()
    batch = replace(pack(groups(rows)).fill_tokens(advantages=a_T), trainable_T=trains)
    term = AlgorithmTerm(
        "policy", partial(loss.fn, **loss.options[0]), sequence_mean, level=loss.level
    )  # pyright: ignore[reportArgumentType]
    batch, logprobs_n = (
        weigh(batch, term),
        torch.tensor([-1.0, -1.0, -2.0], dtype=torch.float64, requires_grad=True),
    )
    # as a learner fills it
    logprobs_T = torch.zeros(9, dtype=torch.float64).index_put(torch.where(trains), logprobs_n)
    total, metrics = term(outputs(batch, logprobs_T, rows), batch)
    slopes_n = gradient(total, logprobs_n)
    assert all(number.isfinite() for number in (total, *metrics.values()))
    assert slopes_n.isfinite().all()
    assert (slopes_n != 0).all()


@pytest.mark.parametrize(
    ("loss", "advantage", "share"),
    [
        ("gspo", 1.0, 0.0),  # the mean log ratio is 0
        ("gspo_token", 1.0, 0.0),
        ("clipped_surrogate", 1.0, 1 / 2),  # one of two ratios is above, and only that bound acts
        ("clipped_surrogate", -1.0, 1 / 2),
        ("gmpo", 1.0, 1 / 2),
        ("gmpo", -1.0, 1 / 2),
        ("cispo", 1.0, 1.0),  # the weight is bounded on both sides, whatever the sign
        ("cispo", -1.0, 1.0),
    ],
)
def test_clipped_is_the_share_of_clipped_tokens(loss: str, advantage: float, share: float):
    found = share_clipped(loss, advantage, [math.e, 1 / math.e], clip_low=0.2, clip_high=0.2)
    assert found == pytest.approx(share)


def share_clipped(loss: str, advantage: float, ratios: list[float], **options) -> float:
    row = Row("g", 0, [1, 2, 3], [False, True, True], reward=1.0, old_logprobs=[0, -2, -2])
    logprobs_T = leaf([[0, *(math.log(ratio) - 2 for ratio in ratios)]])
    batch = batch_of([row], [[0, advantage, advantage]])
    _, metrics = getattr(policy, loss)(outputs(batch, logprobs_T, [row]), batch, **options)
    return metrics["clipped"][-2:].mean().item()


def test_gmpo_clips_nothing_where_there_is_no_advantage():
    assert share_clipped("gmpo", 0.0, [math.e, 1 / math.e], clip_low=0.2, clip_high=0.2) == 0.0
