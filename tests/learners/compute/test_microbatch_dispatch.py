"""What the driver does for each micro-batch costs what the micro-batch is worth, not the batch."""

import pytest
import torch
from learners.spread_cases import groups, weighed

from ratchet.data.packing import pack
from ratchet.learners.compute.microbatch_dispatch import distribute_microbatches, gather_columns
from ratchet.learners.compute.microbatching import plan_microbatches


def test_a_batch_cut_into_parts_is_each_of_them_taken():
    batch, _ = weighed(0)
    plan = [[3, 1], [], [7], [0, 2, 4]]
    for rows, part in zip(plan, batch.split(plan), strict=True):
        taken = batch.take(rows)
        assert torch.equal(part.tokens_T, taken.tokens_T)
        assert torch.equal(
            part.tokens_T,
            torch.cat(
                [batch.tokens_T[batch.sequence_T == row] for row in rows] or [taken.tokens_T]
            ),
        )
        assert part.group_ids == taken.group_ids
        assert all(
            torch.equal(part.weights[name].values, taken.weights[name].values)
            for name in batch.weights
        )


def test_whole_columns_are_made_once(monkeypatch):
    batch = pack(groups(0, n=8))
    plan = plan_microbatches(batch, max_tokens=20)
    micros = [micro for own in distribute_microbatches(batch, plan, ranks=2) for micro in own]
    found = [{"logprobs": micro.batch.tokens_T.double()} for micro in micros]
    made, new_zeros = [], torch.Tensor.new_zeros
    monkeypatch.setattr(
        torch.Tensor, "new_zeros", lambda self, *size: made.append(size) or new_zeros(self, *size)
    )
    columns = gather_columns(batch, [micro.rows for micro in micros], found)
    assert torch.equal(columns["logprobs"], batch.tokens_T.double())
    assert made == [(batch.n_tokens,)]
    assert len(plan) > 4


@pytest.mark.parametrize(("micros", "ranks", "each"), [(1, 4, 1), (5, 4, 2), (4, 4, 1), (0, 4, 0)])
def test_every_rank_has_as_many(micros, ranks, each):
    """What is missing computes a row again, which weighs nothing."""
    batch, _ = weighed(0)
    dealt = distribute_microbatches(batch, [[row] for row in range(micros)], ranks)
    assert [len(own) for own in dealt] == [each] * ranks
    fillers = [micro for own in dealt for micro in own if not micro.rows]
    assert len(fillers) == each * ranks - micros
    assert not any(
        weight.values.any() for micro in fillers for weight in micro.batch.weights.values()
    )
