"""The critic's loss: value and gradient against `oracles.losses.value_loss`, and the table of its
clip by hand.

T = all tokens laid end to end.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from oracles import losses
from oracles import ragged as oracle
from oracles.cases import column, gradient, groups, kept, leaf, outputs, rollouts
from oracles.ragged import Ragged, Row, weights_of

from ratchet.algorithms.base import Algorithm, AlgorithmTerm, AlgoState
from ratchet.algorithms.loss_aggregation import token_mean
from ratchet.algorithms.losses.common import value_loss
from ratchet.data.packing import pack

NUMBERS = st.sampled_from([0.0, 1.0]) | st.floats(-3, 3)
close = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-10)


@st.composite
def critics(draw: st.DrawFn) -> tuple[list[Row], Ragged, Ragged, Ragged]:
    """Rows, and at each of their tokens the live value, the value before the update, and the
    return."""
    rows = draw(rollouts(max_groups=3))
    rows = kept(rows, rows)
    assume(rows)
    live, old, returns = ([[draw(NUMBERS) for _ in row.tokens] for row in rows] for _ in range(3))
    return rows, live, old, returns


@pytest.mark.parametrize("clip", [None, 0.2, 1.5])
@given(case=critics())
def test_value_loss_equals_the_oracle(
    clip: float | None, case: tuple[list[Row], Ragged, Ragged, Ragged]
):
    rows, live, old, returns = case
    moves = [
        abs(v - o)
        for v_row, o_row in zip(live, old, strict=True)
        for v, o in zip(v_row, o_row, strict=True)
    ]
    assume(clip is None or all(abs(move - clip) > 1e-9 for move in moves))
    term = AlgorithmTerm(
        "value", partial(value_loss, clip=clip), token_mean, needs=frozenset({"values"}), coef=0.5
    )
    batch = pack(groups(rows)).fill_tokens(values=column(old), returns=column(returns))
    batch = Algorithm("test", {"policy": (term,)}, "rollouts").weigh(batch, AlgoState())
    values_T = leaf(live)
    out = replace(outputs(batch, column([row.logprobs for row in rows]), rows), values=values_T)
    loss, metrics = term(out, batch)
    x, slopes = losses.value_loss(live, old, returns, clip=clip)
    assert loss.item() == pytest.approx(0.5 * oracle.token_mean(rows, x), rel=1e-10, abs=1e-12)
    close(
        gradient(loss, values_T), 0.5 * column(weights_of(oracle.token_mean, rows)) * column(slopes)
    )
    assert all(not metric.requires_grad and metric.isfinite() for metric in metrics.values())


@pytest.mark.parametrize(
    ("value", "target", "x", "slope"),
    [
        # the value before was 1, the clip is 0.5
        (1.2, 2.0, 0.32, -0.8),  # inside: the plain squared error
        (1.8, 3.0, 1.125, 0.0),  # towards the return, past the clip: held at 1.5, no further pull
        (1.8, 0.0, 1.62, 1.8),  # away from the return, past the clip: pulled back in full
        # past the clip, near the return on its far side: |0.2| is more than |-0.1|
        (1.8, 1.6, 0.02, 0.2),
        (0.2, -1.0, 1.125, 0.0),  # the same downwards
        (0.2, 2.0, 1.62, -1.8),
    ],
)
def test_the_clip_stops_only_what_moves_towards_the_return(
    value: float, target: float, x: float, slope: float
):
    row = Row("g", 0, [1, 2], [False, True], reward=1.0, logprobs=[0, -1], old_logprobs=[0, -1])
    batch = pack(groups([row])).fill_tokens(
        values=column([[0, 1.0]]), returns=column([[0, target]])
    )
    values_T = leaf([[0, value]])
    x_T, metrics = value_loss(
        replace(outputs(batch, values_T, [row]), values=values_T), batch, clip=0.5
    )
    assert (x_T[1].item(), gradient(x_T[1], values_T)[1].item()) == pytest.approx((x, slope))
    assert metrics["clipped"].tolist() == [0, float(slope == 0)]
    assert all(
        metric.shape == x_T.shape and not metric.requires_grad for metric in metrics.values()
    )


def test_returns_and_old_values_are_constants():
    row = Row("g", 0, [1, 2], [False, True], reward=1.0, logprobs=[0, -1], old_logprobs=[0, -1])
    batch = pack(groups([row])).fill_tokens(values=column([[0, 1.0]]), returns=column([[0, 2.0]]))
    values_T = leaf([[0, 1.0]])
    x_T, _ = value_loss(replace(outputs(batch, values_T, [row]), values=values_T), batch, clip=0.5)
    # on policy the clip neither acts nor halves
    assert gradient(x_T.sum(), values_T).tolist() == [0.0, -1.0]
