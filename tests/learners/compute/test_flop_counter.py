"""FLOP by hand, for a decoder of one layer; and that what is put around a learner changes nothing
else of it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from ratchet.batch import LossWeights
from ratchet.config.model_shape.presets import get_preset
from ratchet.data.packing import pack
from ratchet.learners.compute.flop_counter import FlopCounter, wrap_with_flop_counter
from ratchet.models.flops import DecoderCost
from ratchet.testing.builders import make_group, make_trajectory
from ratchet.testing.fakes import FakeLearner

SHAPE = get_preset(
    "tiny",
    vocab_size=10,
    hidden_size=8,
    n_layers=1,
    n_heads=2,
    n_kv_heads=2,
    head_dim=4,
    intermediate_size=16,
)
MATRICES = 4 * 8 * 8 + 3 * 8 * 16 + 10 * 8  # attention, the gated layer, the head


def forward(*lengths: int) -> int:
    """2 for each entry that a token is multiplied with; 4 x heads x size of a head for each pair of
    tokens."""
    return sum(2 * MATRICES * n + 4 * 2 * 4 * n * (n + 1) // 2 for n in lengths)


class Learner(FakeLearner):
    """Says what it was asked; nothing else."""

    def __init__(self) -> None:
        super().__init__(2)

    async def score(self, batch: Any, wanted: Any, *, top_k: int = 0) -> dict[str, Any]:
        return {"asked": (batch.n_tokens, wanted, top_k)}

    async def update(self, mini: Any, terms: Any) -> dict[str, float]:
        return {"loss": 1.0}


class Printed(Learner):
    def fingerprint(self) -> str:
        return "abc"


def spent(update: float = 3.0) -> FlopCounter:
    return FlopCounter({"policy": DecoderCost(SHAPE).token_cost}, passes_per_update=update)


def test_rows_by_hand():
    found = spent()
    found.add("policy", [3, 5])
    assert found.flop == forward(3, 5)
    found.add("teacher", [3])  # whose shape is not known
    found.add("policy", [])
    assert found.flop == forward(3, 5)


@pytest.mark.parametrize("update", [3.0, 2.0])
def test_an_update_reads_the_rows_that_weigh(update: float):
    groups = [
        make_group(
            "g",
            [
                make_trajectory([1], [2, 3], reward=1.0),
                make_trajectory([1], [2], reward=0.0, attempt=1),
            ],
        )
    ]
    batch = pack(groups)
    weights = torch.tensor([0.0, 1.0, 1.0, 0.0, 0.0], dtype=torch.float64)
    batch.weights["pg"] = LossWeights("token", weights)  # pyright: ignore[reportIndexIssue]
    counted = spent(update)
    (learner,) = wrap_with_flop_counter({"policy": Learner()}, counted).values()  # pyright: ignore[reportArgumentType]

    class Term:
        name = "pg"

    assert asyncio.run(learner.update(batch, [Term()])) == {"loss": 1.0}  # pyright: ignore[reportArgumentType]
    assert counted.flop == update * forward(3)
    assert asyncio.run(learner.score(batch, ["logprobs"], top_k=2)) == {
        "asked": (5, ["logprobs"], 2)
    }
    assert counted.flop == update * forward(3) + forward(3, 2)


def test_only_who_has_a_fingerprint_says_one():
    roles = wrap_with_flop_counter({"policy": Printed(), "critic": Learner()}, spent())  # pyright: ignore[reportArgumentType]
    assert [role.fingerprint() for role in roles.values()] == ["abc", None]
