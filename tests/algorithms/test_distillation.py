"""Divergences from a teacher: value and gradient against `oracles.distillation`, by enumeration and
by hand.

T = all tokens laid end to end, K = teacher's tokens with a column, V = vocabulary.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from dataclasses import replace
from functools import partial
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import categorical, distillation
from oracles import ragged as oracle
from oracles.cases import gradient, groups, kept, rollouts
from oracles.preference_cases import check_metrics
from oracles.ragged import Row, weights_of
from torch import Tensor

from ratchet.algorithms.base import Algorithm, AlgorithmTerm, AlgoState
from ratchet.algorithms.loss_aggregation import token_mean
from ratchet.algorithms.losses.distillation import Objective, divergence
from ratchet.algorithms.scoring import fill_columns
from ratchet.batch import Batch
from ratchet.config.resolve import build, resolve
from ratchet.data.packing import pack
from ratchet.learners.compute.token_outputs import FullVocabulary, compute_topk_and_rest_logprobs
from ratchet.protocols import Outputs
from ratchet.testing.builders import make_group, make_trajectory
from ratchet.testing.synthetic import TinyRole
from ratchet.types import Scored, Truncated, Unjudged

V = 6
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)
LN2 = math.log(2)
LOGITS = st.lists(st.floats(-3, 3), min_size=V, max_size=V)
MIXES = st.sampled_from([0.1, 0.5, 0.9])
KS = st.integers(1, V - 1)
near = partial(pytest.approx, rel=1e-10, abs=1e-10)


def top(log_p: list[float], k: int) -> list[int]:
    return sorted(range(len(log_p)), key=lambda v: -log_p[v])[:k]


def one_token() -> Batch:
    """A prompt token, and one that trains."""
    return pack(groups([Row("g", 0, [0, 1], [False, True], "unjudged")]))


def filled(batch: Batch, ids: list[list[int]], teacher: list[list[float]]) -> Batch:
    return batch.fill_tokens(
        teacher_ids=torch.tensor(ids, dtype=torch.int64),
        teacher_topk_logprobs=torch.tensor(teacher, dtype=torch.float64),
    )


def with_rest(logprobs_K: Tensor) -> Tensor:
    """And of any other token: what is left of 1. Where no token trains, learners leave zeros."""
    rest = (1 - logprobs_K.exp().sum(-1, keepdim=True)).clamp(min=1e-300).log()
    return torch.cat([logprobs_K, rest], dim=-1)


def columns(all_V: Tensor, ids: list[int]) -> Tensor:
    """As learners make them: K tokens and, where K < V, a bucket."""
    return compute_topk_and_rest_logprobs(
        FullVocabulary(), all_V[None], torch.tensor([ids]), len(all_V)
    )[0]


def at_one_token(teacher: Tensor, student: Tensor, ids: list[int], **options) -> Tensor:
    """x of one token, from both logprobs, a bucket's last. Where no token trains, learners leave
    zeros."""
    batch = filled(one_token(), [[0] * len(ids), ids], [[0.0] * len(teacher), teacher.tolist()])
    topk_TK = torch.stack([torch.zeros_like(student), student])
    x_T, metrics = divergence(
        Outputs(sequence_sum=batch.sequence_sum, topk_logprobs=topk_TK), batch, **options
    )
    assert x_T.shape == (2,)
    check_metrics({name: metric[1:] for name, metric in metrics.items()}, x_T[1:])
    return x_T[1]


def by_logprobs(teacher: list[float], student: list[float], **options) -> tuple[float, list[float]]:
    leaf = torch.tensor(student, dtype=torch.float64, requires_grad=True)
    known = torch.tensor(teacher, dtype=torch.float64)
    x = at_one_token(with_rest(known), with_rest(leaf), list(range(len(teacher))), **options)
    return x.item(), gradient(x, leaf).tolist()


def by_logits(
    log_p: list[float], z: list[float], ids: list[int], **options
) -> tuple[float, list[float]]:
    logits = torch.tensor(z, dtype=torch.float64, requires_grad=True)
    known = torch.tensor(log_p, dtype=torch.float64)
    x = at_one_token(
        columns(known, ids), columns(torch.log_softmax(logits, 0), ids), ids, **options
    )
    return x.item(), gradient(x, logits).tolist()


# --- K tokens and a bucket


@pytest.mark.parametrize("objective", OBJECTIVES)
@given(z_teacher=LOGITS, z=LOGITS, k=KS, mix=MIXES)
def test_value_and_gradient_equal_the_oracle(
    objective: Objective, z_teacher: list[float], z: list[float], k: int, mix: float
):
    """By the logprobs of the K tokens, through the bucket too: what they gain it loses."""
    log_p, log_q = categorical.log_softmax(z_teacher), categorical.log_softmax(z)
    ids = top(log_p, k)
    teacher, student = [log_p[v] for v in ids], [log_q[v] for v in ids]
    x, slopes = distillation.divergence(objective, teacher, student, mix=mix, bucket=True)
    found, slope_K = by_logprobs(teacher, student, objective=objective, mix=mix)
    assert found == near(x)
    assert slope_K == near(slopes)


@given(z_teacher=LOGITS, z=LOGITS, clip=st.sampled_from([0.01, 0.2, 5.0]))
def test_a_token_above_the_clip_has_its_value_and_no_gradient(z_teacher, z, clip: float):
    log_p, log_q = categorical.log_softmax(z_teacher), categorical.log_softmax(z)
    x, slopes = distillation.by_logits("forward", log_p, log_q, mix=0.5)
    found, slope_V = by_logits(log_p, z, list(range(V)), clip=clip)
    assert found == near(min(x, clip))
    if abs(x - clip) > 1e-9:
        assert slope_V == near(slopes if x < clip else [0.0] * V)


@st.composite
def students(draw: st.DrawFn) -> tuple[list[Row], int, list[list[float]], list[list[float]]]:
    """(rows, K, the teacher's logits by token, the student's)."""
    rows = draw(rollouts())
    rows = kept(rows, rows)
    n = sum(len(row.tokens) for row in rows)
    tables = st.lists(LOGITS, min_size=n, max_size=n)
    return rows, draw(KS), draw(tables), draw(tables)


@pytest.mark.parametrize("objective", OBJECTIVES)
@settings(max_examples=settings.default.max_examples // 2)
@given(case=students(), mix=MIXES)
def test_a_term_on_ragged_batches_equals_the_oracle(objective: Objective, case, mix: float):
    rows, k, z_teacher, z = case
    if not rows:
        return
    masks = [m for row in rows for m in row.mask]
    ids, teacher, student, x, slopes = [], [], [], [], []
    for trains, z_p, z_q in zip(masks, z_teacher, z, strict=True):
        log_p, log_q = categorical.log_softmax(z_p), categorical.log_softmax(z_q)
        ids.append(top(log_p, k))
        teacher.append([log_p[v] if trains else 0.0 for v in ids[-1]])
        student.append([log_q[v] if trains else 0.0 for v in ids[-1]])
        value, slope = (
            distillation.divergence(objective, teacher[-1], student[-1], mix=mix, bucket=True)
            if trains
            else (0.0, [0.0] * k)
        )
        x.append(value)
        slopes.append(slope)
    lengths = [len(row.tokens) for row in rows]
    ragged = [x[sum(lengths[:i]) : sum(lengths[: i + 1])] for i in range(len(rows))]
    weights = [w for row in weights_of(oracle.token_mean, rows) for w in row]

    term = AlgorithmTerm(
        "distill",
        partial(divergence, objective=objective, mix=mix),
        token_mean,
        needs=frozenset({"topk_logprobs"}),
    )
    batch = filled(
        Algorithm("test", {"policy": (term,)}, "rollouts").weigh(pack(groups(rows)), AlgoState()),
        ids,
        with_rest(torch.tensor(teacher, dtype=torch.float64)).tolist(),
    )
    topk_TK = torch.tensor(student, dtype=torch.float64, requires_grad=True)
    loss, metrics = term(
        Outputs(sequence_sum=batch.sequence_sum, topk_logprobs=with_rest(topk_TK)), batch
    )
    assert loss.item() == near(oracle.token_mean(rows, ragged))
    expected = [[w * s for s in slope] for w, slope in zip(weights, slopes, strict=True)]
    torch.testing.assert_close(
        gradient(loss, topk_TK), torch.tensor(expected, dtype=torch.float64), rtol=1e-10, atol=1e-10
    )
    assert all(not metric.requires_grad and metric.isfinite() for metric in metrics.values())


@pytest.mark.parametrize("objective", OBJECTIVES)
@settings(max_examples=settings.default.max_examples // 2)
@given(case=students(), coef=st.sampled_from([0.2, 3.0]))
def test_beside_the_likelihood_of_given_text_it_equals_the_oracle(
    objective: Objective, case, coef: float
):
    """Over the whole vocabulary, as built from its configuration, by the student's logits."""
    rows, _, z_teacher, z = case
    if not rows:
        return
    targets = [t % V for t in range(len(z))]
    log_p = [categorical.log_softmax(logits) for logits in z_teacher]
    log_q = [categorical.log_softmax(logits) for logits in z]
    found = [
        distillation.with_likelihood(objective, p, q, token, mix=0.5, coef=coef)
        for p, q, token in zip(log_p, log_q, targets, strict=True)
    ]
    ends = list(itertools.accumulate(len(row.tokens) for row in rows))
    x = [[value for value, _ in found[a:b]] for a, b in itertools.pairwise([0, *ends])]
    weights = [w for row in weights_of(oracle.token_mean, rows) for w in row]

    keys = {"objective": objective, "top_k": None, "sft_coef": coef}
    algo = build(resolve("algorithm", {"kind": "distill_off_policy", "teacher": "x", **keys}))
    batch = algo.weigh(pack(groups(rows)), AlgoState()).fill_tokens(
        teacher_topk_logprobs=torch.tensor(log_p, dtype=torch.float64)
    )
    logits_TV = torch.tensor(z, dtype=torch.float64, requires_grad=True)
    all_TV = logits_TV.log_softmax(-1)
    out = Outputs(
        sequence_sum=batch.sequence_sum,
        topk_logprobs=all_TV,
        logprobs=all_TV[torch.arange(len(targets)), torch.tensor(targets)],
    )
    loss = torch.stack([term(out, batch)[0] for term in algo.losses["policy"]]).sum()
    assert loss.item() == near(oracle.token_mean(rows, x))
    expected = [[w * s for s in slopes] for w, (_, slopes) in zip(weights, found, strict=True)]
    torch.testing.assert_close(
        gradient(loss, logits_TV),
        torch.tensor(expected, dtype=torch.float64),
        rtol=1e-10,
        atol=1e-10,
    )


# --- by hand: teacher (1/2, 1/4; 1/4 in the bucket), student (1/4, 1/4; 1/2 in the bucket)

TEACHER, STUDENT = [-LN2, -2 * LN2], [-2 * LN2, -2 * LN2]
L43 = math.log(4 / 3)
L23 = math.log(2 / 3)


@pytest.mark.parametrize(
    ("objective", "mix", "x", "slopes"),
    [
        # ln(2) / 2 + 0 - ln(2) / 4; q_k (-p_k / q_k + 1/2)
        ("forward", 0.5, LN2 / 4, [-3 / 8, -1 / 8]),
        # -ln(2) / 4 + 0 + ln(2) / 2; q_k (log(q_k / p_k) - ln 2)
        ("reverse", 0.5, LN2 / 4, [-LN2 / 2, -LN2 / 4]),
        # m = (3/8, 1/4; 3/8). (ln(4/3) / 2 + ln(2/3) / 4) / 2 from either side; q_k / 2 (log(q_k /
        # m_k) - ln(4/3))
        ("js", 0.5, L43 / 2 + L23 / 4, [(L23 - L43) / 8, -L43 / 8]),
        # the same m; q_k / 2 (-p_k / m_k + 2/3)
        ("skewed_forward", 0.5, L43 / 2 + L23 / 4, [(-4 / 3 + 2 / 3) / 8, (-1 + 2 / 3) / 8]),
        # the same m; q_k (log(q_k / m_k) - q_k / (2 m_k) - ln(4/3) + (1/2) (4/3))
        (
            "skewed_reverse",
            0.5,
            L23 / 4 + L43 / 2,
            [(L23 - 1 / 3 - L43 + 2 / 3) / 4, (-1 / 2 - L43 + 2 / 3) / 4],
        ),
        # a quarter of forward, three of reverse
        ("mixed", 0.25, LN2 / 4, [(-3 / 8 - 3 * LN2 / 2) / 4, (-1 / 8 - 3 * LN2 / 4) / 4]),
    ],
)
def test_two_tokens_and_a_bucket_by_hand(
    objective: Objective, mix: float, x: float, slopes: list[float]
):
    found, slope_K = by_logprobs(TEACHER, STUDENT, objective=objective, mix=mix)
    assert found == near(x)
    assert slope_K == near(slopes)


# --- the whole vocabulary


@pytest.mark.parametrize("objective", OBJECTIVES)
@given(z_teacher=LOGITS, z=LOGITS, mix=MIXES)
def test_over_the_whole_vocabulary_it_is_the_divergence_itself(
    objective: Objective, z_teacher, z, mix: float
):
    log_p, log_q = categorical.log_softmax(z_teacher), categorical.log_softmax(z)
    x, slopes = distillation.by_logits(objective, log_p, log_q, mix=mix)
    found, slope_V = by_logits(log_p, z, top(log_p, V), objective=objective, mix=mix)
    assert found == near(x)
    assert slope_V == near(slopes)


@given(z_teacher=LOGITS, z=LOGITS)
def test_over_the_whole_vocabulary_the_two_kls_have_their_known_gradients(
    z_teacher: list[float], z: list[float]
):
    log_p, log_q = categorical.log_softmax(z_teacher), categorical.log_softmax(z)
    x, slope_V = by_logits(log_p, z, list(range(V)), objective="forward")
    assert (x, slope_V) == (
        near(categorical.kl(log_p, log_q)),
        near(categorical.forward_kl_gradient(log_q, log_p)),
    )
    x, slope_V = by_logits(log_p, z, list(range(V)), objective="reverse")
    assert (x, slope_V) == (
        near(categorical.kl(log_q, log_p)),
        near(categorical.reverse_kl_gradient(log_q, log_p)),
    )


# The weight of adaptive KL depends on how finely the outcomes are told apart.
@pytest.mark.parametrize("objective", [name for name in OBJECTIVES if name != "adaptive"])
@given(z_teacher=LOGITS, z=LOGITS, mix=MIXES)
def test_more_tokens_never_show_less_and_all_show_everything(
    objective: Objective, z_teacher, z, mix: float
):
    """A bucket hides differences within it: splitting it can only raise a divergence (data
    processing inequality)."""
    log_p, log_q = categorical.log_softmax(z_teacher), categorical.log_softmax(z)
    found = [
        by_logits(log_p, z, top(log_p, k), objective=objective, mix=mix)[0] for k in range(1, V + 1)
    ]
    assert all(a <= b + 1e-12 for a, b in itertools.pairwise(found))
    assert found[0] >= -1e-12
    full = distillation.by_logits(objective, log_p, log_q, mix=mix)[0]
    # A bucket that holds a single token hides nothing: the last two are equal already.
    assert found[-2:] == near([full, full])


# --- how the objectives relate


@pytest.mark.parametrize("k", [1, 3, V])
@pytest.mark.parametrize("objective", OBJECTIVES)
@given(z=LOGITS, mix=MIXES)
def test_an_identical_teacher_teaches_nothing(
    objective: Objective, k: int, z: list[float], mix: float
):
    log_p = categorical.log_softmax(z)
    x, slope_V = by_logits(log_p, z, top(log_p, k), objective=objective, mix=mix)
    assert x == pytest.approx(0, abs=1e-12)
    assert slope_V == pytest.approx([0] * V, abs=1e-12)


@given(z_teacher=LOGITS, z=LOGITS, k=KS)
def test_js_is_symmetric_at_one_half(z_teacher: list[float], z: list[float], k: int):
    log_p, log_q = categorical.log_softmax(z_teacher), categorical.log_softmax(z)
    ids = top(log_p, k)
    there = by_logits(log_p, z, ids, objective="js", mix=0.5)[0]
    assert there == near(by_logits(log_q, z_teacher, ids, objective="js", mix=0.5)[0])
    assert there <= LN2 + 1e-12


@given(z_teacher=LOGITS, z=LOGITS, k=KS)
def test_the_mixed_and_the_skewed_have_the_plain_ones_as_ends(
    z_teacher: list[float], z: list[float], k: int
):
    log_p = categorical.log_softmax(z_teacher)
    find = partial(by_logits, log_p, z, top(log_p, k))
    forward, reverse = find(objective="forward"), find(objective="reverse")
    for plain, other, mix in [
        (forward, "mixed", 1.0),
        (reverse, "mixed", 0.0),
        (forward, "skewed_forward", 0.0),
        (reverse, "skewed_reverse", 0.0),
    ]:
        x, slope_V = find(objective=other, mix=mix)
        assert (x, slope_V) == (near(plain[0]), near(plain[1]))


@given(z_teacher=LOGITS, z=LOGITS, k=KS)
def test_js_tends_to_the_two_kls_at_its_ends(z_teacher: list[float], z: list[float], k: int):
    """arXiv:2306.13649 section 2: js / mix -> forward as mix -> 0, and js / (1 - mix) -> reverse as
    mix -> 1."""
    log_p = categorical.log_softmax(z_teacher)
    find = partial(by_logits, log_p, z, top(log_p, k))
    small = 1e-6
    assert find(objective="js", mix=small)[0] / small == pytest.approx(
        find(objective="forward")[0], rel=1e-2, abs=1e-2
    )
    assert find(objective="js", mix=1 - small)[0] / small == pytest.approx(
        find(objective="reverse")[0], rel=1e-2, abs=1e-2
    )


# --- edges


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("k", [1, 2, V])
def test_peaked_distributions_stay_finite(objective: Objective, dtype: torch.dtype, k: int):
    """The K tokens hold all the mass up to rounding, on one side or on both: the bucket is then
    empty, not negative."""
    flat, peaked, other = (
        [0.0] * V,
        [40.0, 20.0, 0.0, -1.0, -2.0, -3.0],
        [20.0, 40.0, 0.0, -3.0, -2.0, -1.0],
    )
    for z_teacher, z in [(peaked, peaked), (peaked, other), (peaked, flat), (flat, peaked)]:
        log_p = torch.log_softmax(torch.tensor(z_teacher, dtype=dtype), 0)
        logits = torch.tensor(z, dtype=dtype, requires_grad=True)
        ids = top(log_p.tolist(), k)
        batch = one_token().to("cpu", dtype)
        known = columns(log_p, ids)
        batch = batch.fill_tokens(
            teacher_ids=torch.tensor([[0] * k, ids]),
            teacher_topk_logprobs=known.expand(2, len(known)),
        )
        topk_TK = torch.stack([torch.zeros_like(known), columns(torch.log_softmax(logits, 0), ids)])
        x_T, _ = divergence(
            Outputs(sequence_sum=batch.sequence_sum, topk_logprobs=topk_TK),
            batch,
            objective=objective,
        )
        slope_V = gradient(x_T[1], logits)
        assert x_T[1].isfinite()
        assert bool(slope_V.isfinite().all())
        assert slope_V.abs().max() < 100
        if z_teacher is z:
            assert x_T[1].item() == pytest.approx(0, abs=1e-5)
            assert slope_V.tolist() == pytest.approx([0] * V, abs=1e-5)


@pytest.mark.parametrize("k", [2, V])
def test_single_precision_is_near_double(k: int):
    """A bucket may hold next to nothing: single precision must not turn it into noise."""
    z_teacher, z = [8.0, 6.0, 0.0, -1.0, -2.0, -3.0], [6.0, 7.0, 1.0, -3.0, -2.0, -1.0]
    log_p, log_q = categorical.log_softmax(z_teacher), categorical.log_softmax(z)
    ids = top(log_p, k)
    for objective in OBJECTIVES:
        x, _ = distillation.divergence(
            objective, [log_p[v] for v in ids], [log_q[v] for v in ids], mix=0.5, bucket=k < V
        )
        known, live = (torch.tensor(log, dtype=torch.float32) for log in (log_p, log_q))
        known, live = columns(known, ids), columns(live, ids)
        batch = filled(one_token(), [[0] * k, ids], [[0.0] * len(known), known.tolist()]).to(
            "cpu", torch.float32
        )
        topk_TK = torch.stack([torch.zeros_like(live), live])
        x_T, _ = divergence(
            Outputs(sequence_sum=batch.sequence_sum, topk_logprobs=topk_TK),
            batch,
            objective=objective,
        )
        assert x_T[1].item() == pytest.approx(x, rel=1e-5, abs=1e-6)


# --- the teacher's temperature


def test_the_teacher_alone_is_scored_at_its_temperature():
    """Times that of the row; a row that was sampled greedily is scored at 1, as by the student."""
    seen: list[list[float]] = []

    class Teacher:
        async def score(self, batch: Batch, outputs, *, top_k: int):
            seen.append(batch.temperature_S.tolist())
            widths = {"topk_logprobs": top_k + 1, "topk_ids": top_k}
            return {name: torch.zeros(batch.n_tokens, widths[name]) for name in outputs}

    section = {"kind": "distill_on_policy", "teacher": "x", "teacher_temperature": 4.0, "top_k": 2}
    rows = [
        replace(make_trajectory([1], [2], outcome=Unjudged(), attempt=i), temperature=t)
        for i, t in enumerate((0.5, 0.0))
    ]
    batch = pack([make_group("g", rows)])
    scored = asyncio.run(
        fill_columns(batch, build(resolve("algorithm", section)), {"teacher": Teacher()})
    )
    assert seen == [[2.0, 4.0]]
    assert scored.temperature_S.tolist() == [0.5, 0.0]


# --- what it needs of attempts


def test_only_where_nothing_reads_rewards_none_is_needed():
    """By the parts, not by the name."""

    def needed(kind: str, **keys) -> bool:
        section = resolve("algorithm", {"kind": kind, **keys})
        assert build(section).reads_reward == section.reads_reward
        return section.reads_reward

    teacher = {"teacher": "x"}
    assert not needed("distill_on_policy", **teacher)
    assert not needed("on_policy_distillation", **teacher)
    assert not needed(
        "policy_gradient", advantage={"kind": "on_policy_distillation"}, group_size=1, **teacher
    )
    assert needed("grpo")
    assert needed("on_policy_distillation", positive_nll_coef=0.1, **teacher)
    both = {
        "kind": "mixture",
        "parts": [{"kind": "group_relative"}, {"kind": "on_policy_distillation"}],
    }
    assert needed("policy_gradient", advantage=both, **teacher)
    assert needed("on_policy_distillation", advantage=both, group_size=4, **teacher)


@pytest.mark.parametrize("kind", ["distill_on_policy", "on_policy_distillation"])
def test_attempts_that_nobody_judged_have_the_teachers_signal(kind: str):
    """Cut off or not, with or without a judged neighbour: each moves the policy as if it had been
    judged."""
    algo = build(resolve("algorithm", {"kind": kind, "teacher": "x"}))
    moved = []
    for ends in ((Unjudged(), Unjudged(truncated=True)), (Scored(1.0), Truncated(0.0))):
        rows = [make_trajectory([1], [2, 3], outcome=end, attempt=i) for i, end in enumerate(ends)]
        batch = pack([make_group("g", rows)])
        assert batch.n_sequences == 2
        roles = {"policy": TinyRole("policy"), "teacher": TinyRole("other")}
        made = algo.weigh(
            algo.advantage(asyncio.run(fill_columns(batch, algo, roles)), AlgoState()), AlgoState()
        )
        (name, weight) = next(iter(made.weights.items()))
        assert (weight.values > 0).equal(batch.trainable_T), name
        moved.append(
            made.token_columns.get("advantages", made.token_columns.get("teacher_topk_logprobs"))
        )
    assert moved[0].abs().sum() > 0
    assert moved[0].equal(moved[1])
