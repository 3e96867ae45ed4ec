"""Random ragged batches of pairs, of labelled answers and of labelled steps (hypothesis), as the
product's groups and columns.

What a loss must not read is filled with garbage: logprobs where no token trains, rows that only
feed statistics.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from hypothesis import strategies as st
from oracles import cases
from oracles.cases import VOCAB, column, gradient
from oracles.ragged import Ragged, Row
from oracles.reward_model import Labels
from torch import Tensor

from ratchet.batch import Batch
from ratchet.data.packing import pack
from ratchet.protocols import Outputs
from ratchet.types import Group

LOGPROBS = st.floats(-4.0, -0.01)
SHIFTS = st.one_of(st.just(0.0), st.floats(-1.5, 1.5))  # live - reference: exactly equal, and near
SCORES = st.floats(-6.0, 6.0)
LABELS = st.sampled_from([0.0, 0.0, 1.0, 1.0, 0.25])
REWARDS = st.sampled_from([0.0, 1.0, -1.0, 0.3, 2.5])
TermFunction = Callable[[Outputs, Batch], tuple[Tensor, dict[str, Tensor]]]


@st.composite
def masks(draw: st.DrawFn) -> list[bool]:
    """A prompt, then spans that train or do not. Possibly none trains (an empty answer), possibly
    one token does."""
    spans = [[False] * draw(st.integers(1, 2))]
    for trains in draw(st.lists(st.booleans(), max_size=3)):
        spans.append([trains] * draw(st.integers(1, 3)))
    return [m for span in spans for m in span]


@st.composite
def a_row(
    draw: st.DrawFn, group: str, attempt: int, use: str = "train", trained: list[bool] | None = None
) -> Row:
    trained = draw(masks()) if trained is None else trained
    n = len(trained)

    def numbers(kind: st.SearchStrategy[float]) -> list[float]:
        return draw(st.lists(kind, min_size=n, max_size=n))

    live = numbers(LOGPROBS)
    ref = [lp - shift for lp, shift in zip(live, numbers(SHIFTS), strict=True)]
    old = [lp - shift for lp, shift in zip(live, numbers(SHIFTS), strict=True)]
    tokens = draw(st.lists(st.integers(0, VOCAB - 1), min_size=n, max_size=n))
    reward = draw(REWARDS) if use == "train" else None
    ending = "scored" if use == "train" else "unjudged"
    return Row(group, attempt, tokens, trained, ending, reward, use, live, old, ref)


@st.composite
def pairs(draw: st.DrawFn, empty: bool = True) -> list[Row]:
    """Groups of two training rows, chosen first. With `empty` an answer may have no trained token
    at all."""
    rows: list[Row] = []
    for g in range(draw(st.integers(1, 4))):
        two = [draw(a_row(f"g{g}", attempt)) for attempt in (0, 1)]
        if not empty:
            two = [
                row
                if any(row.mask)
                else replace(row, trained=[False] + [True] * (len(row.tokens) - 1))
                for row in two
            ]
            two = [
                row if any(row.mask) else draw(a_row(f"g{g}", i, trained=[False, True]))
                for i, row in enumerate(two)
            ]
        rows += two
    return rows


@st.composite
def labelled(draw: st.DrawFn) -> list[Row]:
    """KTO's groups: one labelled answer, and one answer to another prompt that only feeds the
    reference point."""
    rows: list[Row] = []
    for g in range(draw(st.integers(1, 5))):
        two = [draw(a_row(f"g{g}", 0)), draw(a_row(f"g{g}", 1, "reference"))]
        rows += two if draw(st.booleans()) else two[::-1]
    return rows


@st.composite
def scored_pairs(draw: st.DrawFn) -> tuple[list[Row], list[float]]:
    rows = draw(pairs())
    return rows, draw(st.lists(SCORES, min_size=len(rows), max_size=len(rows)))


@st.composite
def stepwise(draw: st.DrawFn) -> tuple[list[Row], Ragged, Labels]:
    """(rows, token scores, labels): every turn, one maximal span of trained tokens, may have a
    label at its last token."""
    rows: list[Row] = []
    for g in range(draw(st.integers(1, 4))):
        use = draw(st.sampled_from(["train", "train", "train", "reference", "baseline"]))
        rows.append(draw(a_row(f"g{g}", 0, use)))
    scores = [
        draw(st.lists(SCORES, min_size=len(row.tokens), max_size=len(row.tokens))) for row in rows
    ]
    labels: Labels = []
    for row in rows:
        ends = {span.end - 1 for span in row.spans}
        labels.append(
            [draw(st.none() | LABELS) if t in ends else None for t in range(len(row.tokens))]
        )
    return rows, scores, labels


def step_groups(rows: list[Row], labels: Labels) -> list[Group]:
    """The rows as groups whose turns have rewards of their own; every row is a group."""
    found = []
    for group, labels_row in zip(cases.groups(rows), labels, strict=True):
        (trajectory,) = group.trajectories
        turns = tuple(replace(turn, reward=labels_row[turn.end - 1]) for turn in trajectory.turns)
        found.append(replace(group, trajectories=(replace(trajectory, turns=turns),)))
    return found


def batch_of(rows: list[Row]) -> Batch:
    """Packed, with the columns that passes fill."""
    batch = pack(cases.groups(rows))
    return batch.fill_tokens(
        ref_logprobs=column([row.ref_logprobs for row in rows]),
        old_logprobs=column([row.old_logprobs for row in rows]),
    )


def live(rows: list[Row]) -> Tensor:
    return cases.leaf([row.logprobs for row in rows])


def evaluate(
    fn: TermFunction, rows: list[Row], batch: Batch | None = None
) -> tuple[list[float], list[float]]:
    """(x, d sum(weight * x) / dlogprob [T]) of a group's or a row's loss, with the weights 1, 2, 3,
    ... so that the gradient of no entry can stand in for that of another."""
    logprobs_T = live(rows)
    batch = batch_of(rows) if batch is None else batch
    x, metrics = fn(cases.outputs(batch, logprobs_T, rows), batch)
    check_metrics(metrics, x)
    return x.tolist(), gradient((x * counting(len(x))).sum(), logprobs_T).tolist()


def check_metrics(metrics: dict[str, Tensor], x: Tensor) -> None:
    for name, metric in metrics.items():
        assert metric.shape == x.shape, name
        assert not metric.requires_grad, name
        assert bool(metric.isfinite().all()), name


def counting(n: int) -> Tensor:
    return torch.arange(1, n + 1, dtype=torch.float64)


def weighted_by_group(rows: list[Row], slopes: Ragged) -> list[float]:
    """The oracle's flat gradient under the weights of `evaluate`, for a loss by group."""
    order = list(dict.fromkeys(row.group for row in rows))
    return [
        (order.index(row.group) + 1) * slope
        for row, s_row in zip(rows, slopes, strict=True)
        for slope in s_row
    ]


def weighted_by_row(slopes: Ragged) -> list[float]:
    return [(i + 1) * slope for i, s_row in enumerate(slopes) for slope in s_row]
