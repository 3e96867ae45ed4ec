"""Distillation from several teachers and across tokenizers, against `oracles.likelihood_matching`."""

import math

import pytest
import torch
from oracles import likelihood_matching as oracle
from oracles.cases import gradient, groups
from oracles.ragged import Row

from ratchet.algorithms.base import AlgoState
from ratchet.algorithms.losses.likelihood_matching import compute_binary_kl
from ratchet.config.resolve import build, resolve
from ratchet.data.packing import pack
from ratchet.protocols import Outputs

# Two rows whose first token is a prompt. Span numbers start from 0 in each row.
ROWS = [
    Row(name, 0, [1] * (n + 1), [False] + [True] * n, "unjudged")
    for name, n in (("g", 5), ("h", 3))
]
SPANS = ([[0, 0, 1, -1, 2], [0, 1, 1]], [[0, 1, 1, 1, -1], [-1, -1, 0]])
STUDENT = [[-0.1, -2.0, -0.7, -0.3, -1.1], [-0.5, -0.2, -3.0]]
LIKELIHOODS = ([{0: -1.0, 1: -0.2, 2: -4.0}, {0: -0.5, 1: -3.2}], [{0: -2.0, 1: -0.9}, {0: -0.01}])


def fill(batch, number, ending):
    """The columns of an aligned teacher, over all rows and with their prompts."""
    spans, logprobs = [], []
    for row_spans, likelihoods in zip(SPANS[number], LIKELIHOODS[number], strict=True):
        spans += [-1, *row_spans]
        logprobs += [0.0, *(likelihoods.get(s, 0.0) / row_spans.count(s) for s in row_spans)]
    columns = {
        "spans": torch.tensor(spans),
        "logprobs": torch.tensor(logprobs, dtype=torch.float64),
    }
    return batch.fill_tokens(**{f"teacher_{name}{ending}": x for name, x in columns.items()})


def learn(options, *endings):
    algorithm = build(resolve("algorithm", {"kind": "distill_off_policy", **options}))
    batch = algorithm.weigh(pack(groups(ROWS)), AlgoState())
    for number, ending in enumerate(endings):
        batch = fill(batch, number, ending)
    values = [x for row in STUDENT for x in (0.0, *row)]
    leaf = torch.tensor(values, dtype=torch.float64, requires_grad=True)
    out = Outputs(sequence_sum=batch.sequence_sum, logprobs=leaf)
    results = [term(out, batch) for term in algorithm.losses["policy"]]
    loss = sum(x for x, _ in results)
    return loss, gradient(loss, leaf).tolist(), results[0][1]


@pytest.mark.parametrize("temperature", [1.0, 20.0])
@pytest.mark.parametrize("weights", [(1.0,), (0.75, None), (None, None)])
def test_the_loss_is_the_weighted_sum_over_teachers(temperature, weights) -> None:
    several = len(weights) > 1
    teachers = [{"path": f"t{i}", "weight": weight} for i, weight in enumerate(weights)]
    options = {"teacher": teachers if several else "t", "teacher_tokens": "aligned"}
    loss, slopes, metrics = learn(
        {**options, "span_temperature": temperature}, *(("_1", "_2") if several else ("",))
    )
    numbers = [0.5 if weight is None else weight for weight in weights]
    cases = list(zip(numbers, SPANS, LIKELIHOODS, strict=False))
    expected, expected_slopes = oracle.teachers_loss(STUDENT, cases, temperature)
    assert loss.item() == pytest.approx(expected, rel=1e-9)
    assert slopes == pytest.approx([x for row in expected_slopes for x in (0.0, *row)], rel=1e-9)
    assert metrics["uncovered"].item() == pytest.approx(1 / 8)


def test_likelihoods_beside_the_demonstrations() -> None:
    options = {"teacher": "t", "teacher_tokens": "aligned"}
    plain, both = learn(options, "")[0], learn({**options, "sft_coef": 0.2}, "")[0]
    nll = -sum(map(sum, STUDENT)) / 8
    assert (both - plain).item() == pytest.approx(0.2 * nll)


def test_several_teachers_of_the_same_tokens_are_compared_on_the_whole_vocabulary() -> None:
    options = {"teacher": [{"path": "a", "weight": 3.0}, {"path": "b"}], "top_k": None}
    algorithm = build(resolve("algorithm", {"kind": "distill_off_policy", **options}))
    generator = torch.Generator().manual_seed(0)
    p, r, q = torch.randn(3, 10, 4, generator=generator, dtype=torch.float64).log_softmax(-1)
    batch = algorithm.weigh(pack(groups(ROWS)), AlgoState())
    batch = batch.fill_tokens(teacher_topk_logprobs_1=p, teacher_topk_logprobs_2=r)
    out = Outputs(sequence_sum=batch.sequence_sum, topk_logprobs=q)
    loss = sum(term(out, batch)[0] for term in algorithm.losses["policy"])
    expected = sum(
        weight * math.exp(x[t, v]) * (x[t, v] - q[t, v]) / 8
        for weight, x in ((3.0, p), (0.5, r))
        for t in range(10)
        for v in range(4)
        if batch.trainable_T[t]
    )
    assert loss.item() == pytest.approx(expected.item())
    assert list(algorithm.roles) == ["teacher/1", "teacher/2"]


def test_certain_spans_have_finite_losses() -> None:
    certain = torch.zeros(2, dtype=torch.float32)
    assert compute_binary_kl(certain, torch.tensor([0.0, -50.0])).isfinite().all()
