import pytest
import torch

from ratchet.batch import LossWeights
from ratchet.data.packing import pack
from ratchet.errors import MissingColumn
from ratchet.testing.builders import make_group, make_trajectory


@pytest.fixture
def batch():
    groups = [
        make_group(
            "a",
            [make_trajectory([1, 2], [3], reward=1.0), make_trajectory([1, 2], [4, 5], reward=0.5)],
        ),
        make_group("b", [make_trajectory([6], [7], reward=0.0)]),
    ]
    return pack(groups)


def test_a_missing_column_names_itself_and_the_fix(batch):
    with pytest.raises(
        MissingColumn,
        match="column 'values' of algorithm 'ppo' was never filled: add a Pass that produces",
    ):
        batch.need("values", algorithm="ppo")


def test_sums_by_sequence_and_group(batch):
    assert batch.sequence_sum(batch.trainable_T.double()).tolist() == [1.0, 2.0, 1.0]
    assert batch.group_sum(batch.rewards_S).tolist() == [1.5, 0.0]


def test_weights_travel_with_their_rows_unchanged(batch):
    weighed = batch.__class__(
        **{name: getattr(batch, name) for name in batch.__slots__ if name != "weights"},
        weights={
            "token": LossWeights("token", torch.arange(9.0)),
            "sequence": LossWeights("sequence", torch.tensor([10.0, 20.0, 30.0])),
            "group": LossWeights("group", torch.tensor([100.0, 200.0])),
        },
    )
    part = weighed.take([2, 0])
    assert part.weights["token"].values.tolist() == [7.0, 8.0, 0.0, 1.0, 2.0]
    assert part.weights["sequence"].values.tolist() == [30.0, 10.0]
    assert part.weights["group"].values.tolist() == [200.0, 100.0]
    assert part.group_ids == ("b", "a")


def test_to_casts_floating_columns_only(batch):
    moved = batch.fill_tokens(advantages=torch.ones(9, dtype=torch.float64)).to(
        "cpu", torch.float32
    )
    assert moved.rewards_S.dtype == moved.need("advantages").dtype == torch.float32
    assert moved.tokens_T.dtype == torch.int64
    assert moved.trainable_T.dtype == torch.bool
