"""A generator uses weights where a rank has put them: nothing that serves is ever written, whatever
fails on the way."""

import asyncio
import os

import pytest
import torch
from learners.spread_cases import SHAPE, UNTIED
from weight_sync.components import engine
from weight_sync.test_failures import Tampering
from weight_sync.test_transfer import assert_bit_equal, held, local

from ratchet.errors import WeightSyncError
from ratchet.generators.weight_update import WeightStaging
from ratchet.protocols import Shard
from ratchet.weight_sync.endpoints import LocalRank, WeightReceiver
from ratchet.weight_sync.files import FilesWeightSync
from ratchet.weight_sync.shared_memory import SharedMemoryWeightSync, lay_out_blocks
from ratchet.weight_sync.weight_blocks import WeightBlock


def change(policy, factor):
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(factor)


def weights_of(policy):
    return {name: tensor.clone() for name, tensor in policy.canonical_weights()}


def addresses(generator):
    return {name: view.data_ptr() for name, view in generator._staging.views.items()}


class Both:
    """Two receivers, of which the second may fail to commit."""

    def __init__(self, first, second):
        self.ends, self.breaks = (WeightReceiver(first, 0), WeightReceiver(second, 1)), []

    async def call(self, method, /, *arguments):
        results = []
        for index, end in enumerate(self.ends):
            if index and method == "commit" and self.breaks:
                raise RuntimeError(self.breaks.pop())
            results += await LocalRank(end).call(method, *arguments)
        return results


def test_weights_are_used_where_they_lie_and_two_segments_take_turns():
    policy, outlet = local(UNTIED)
    generator = engine(UNTIED)
    assert not generator.adopted
    link = SharedMemoryWeightSync(outlet, LocalRank(WeightReceiver(generator)))
    seen = []
    for version in (1, 2, 3, 4):
        asyncio.run(link.push(version))
        assert generator.adopted
        assert_bit_equal(held(generator), weights_of(policy))
        seen.append(addresses(generator))
        change(policy, 1.5)
    assert seen[0] == seen[2] != seen[1] == seen[3]
    assert not set(seen[0].values()) & set(seen[1].values())
    assert link.shared_bytes >= 2 * sum(parameter.nbytes for parameter in policy.parameters())
    before = held(generator)
    asyncio.run(link.close())
    assert_bit_equal(held(generator), before)  # its memory lives as long as it is used


@pytest.mark.parametrize("method", ["verify_and_stage", "commit"])
def test_a_push_that_fails_leaves_what_serves_untouched(method):
    policy, outlet = local(UNTIED)
    generator = engine(UNTIED)
    receiver = Tampering(WeightReceiver(generator), "", None)
    link = SharedMemoryWeightSync(outlet, receiver)
    for version in (1, 2):
        asyncio.run(link.push(version))
        change(policy, 1.5)
    before = held(generator)

    def fails(*_):
        raise RuntimeError("the host is on fire")

    for version in (3, 4, 5):  # more often than there are segments
        receiver.method, receiver.act = method, fails
        with pytest.raises(WeightSyncError, match="on fire"):
            asyncio.run(link.push(version))
        assert_bit_equal(held(generator), before)
        change(policy, 1.5)
    for version in (6, 7):
        asyncio.run(link.push(version))
        assert_bit_equal(held(generator), weights_of(policy))
        change(policy, 1.5)


def test_a_receiver_that_committed_keeps_its_weights_though_another_failed():
    """The first then uses a segment that the second has not taken: nobody may write to it."""
    policy, outlet = local(UNTIED)
    first, second = engine(UNTIED), engine(UNTIED)
    both = Both(first, second)
    link = SharedMemoryWeightSync(outlet, both)
    asyncio.run(link.push(1))
    assert addresses(first) == addresses(second)  # one copy for all
    old = held(second)
    change(policy, 1.5)
    both.breaks.append("died")
    with pytest.raises(WeightSyncError, match="died"):
        asyncio.run(link.push(2))
    new = weights_of(policy)
    assert_bit_equal(held(first), new)
    assert_bit_equal(held(second), old)
    change(policy, 1.5)
    both.breaks.append("died again")
    with pytest.raises(WeightSyncError, match="died again"):
        asyncio.run(link.push(3))
    assert_bit_equal(held(first), weights_of(policy))
    assert_bit_equal(held(second), old)
    asyncio.run(link.push(4))
    assert_bit_equal(held(second), weights_of(policy))


def test_another_kind_of_link_writes_to_memory_of_the_generators_own(tmp_path):
    """What was adopted is the weights of other generators too."""
    policy, outlet = local(UNTIED)
    first, second = engine(UNTIED), engine(UNTIED)
    link = SharedMemoryWeightSync(outlet, Both(first, second))
    asyncio.run(link.push(1))
    before, shared = held(second), addresses(first)
    change(policy, 1.5)
    asyncio.run(
        FilesWeightSync(outlet, LocalRank(WeightReceiver(first)), directory=tmp_path).push(2)
    )
    assert not first.adopted
    assert_bit_equal(held(first), weights_of(policy))
    assert not set(shared.values()) & set(addresses(first).values())
    assert_bit_equal(held(second), before)


@pytest.mark.fault("P18")
def test_the_committed_files_stay_under_any_clock(tmp_path):
    _, outlet = local(UNTIED)
    link = FilesWeightSync(outlet, LocalRank(WeightReceiver(engine(UNTIED))), directory=tmp_path)
    asyncio.run(link.push(1))
    (first,) = tmp_path.glob("*/push-*")
    os.utime(first, (2**33, 2**33))  # the clock was set back after this push
    asyncio.run(link.push(2))
    assert [path.name.split("-")[1] for path in tmp_path.glob("*/push-*")] == ["2"]


@pytest.mark.parametrize(("sent", "kept"), [("bfloat16", torch.float32), (None, torch.bfloat16)])
def test_what_has_another_dtype_is_copied(sent, kept):
    policy, outlet = local(SHAPE)
    generator = engine(SHAPE, dtype=kept)
    link = SharedMemoryWeightSync(outlet, LocalRank(WeightReceiver(generator)), dtype=sent)
    for version in (1, 2):
        asyncio.run(link.push(version))
        assert not generator.adopted
        wanted = {
            name: tensor.to(torch.bfloat16).to(kept) for name, tensor in weights_of(policy).items()
        }
        assert_bit_equal(held(generator), wanted)
        change(policy, 1.5)
    assert link.shared_bytes < 1.1 * sum(parameter.nbytes for parameter in policy.parameters())


def test_pieces_that_do_not_lie_as_the_weight_does_are_copied():
    weight = torch.nn.Parameter(torch.zeros(4, 6), requires_grad=False)
    staging = WeightStaging(lambda: [("w", weight.data)], lambda: [weight])
    wanted = torch.arange(24.0).view(4, 6)
    memory = torch.cat(
        [wanted[:, :3].flatten(), wanted[:, 3:].flatten(), wanted.flatten(), wanted.flatten()]
    )

    def receives(*pieces, lasting=True):
        staging.prepare({"weights": {"w": {"shape": (4, 6)}}, "stable": True, "lasting": lasting})
        staging.receive(iter([Shard("w", (4, 6), offsets, tensor) for offsets, tensor in pieces]))
        staging.apply()
        assert torch.equal(weight, wanted)
        assert torch.equal(staging.views["w"], wanted)
        return staging.adopted

    # columns
    assert not receives(((0, 0), memory[:12].view(4, 3)), ((0, 3), memory[12:24].view(4, 3)))
    assert not receives(((0, 0), memory[24:48].view(4, 6)), lasting=False)
    # not together
    assert not receives(((0, 0), memory[24:36].view(2, 6)), ((2, 0), memory[60:72].view(2, 6)))
    assert receives(((2, 0), memory[36:48].view(2, 6)), ((0, 0), memory[24:36].view(2, 6)))
    assert weight.data_ptr() == memory[24:].data_ptr()
    wanted = wanted + 1
    before = memory.clone()
    assert not receives(((0, 0), wanted[:, :3].contiguous()), ((0, 3), wanted[:, 3:].contiguous()))
    assert torch.equal(memory, before)


def test_blocks_of_a_weight_lie_in_their_order_and_changes_get_slack():
    def rows(name, start, n):
        return WeightBlock(name, (5, 3), (start, 0), (n, 3), "float32")

    by_rank = [[rows("b", 2, 3), rows("a", 0, 2)], [rows("a", 2, 3), rows("b", 0, 2)]]
    places, size = lay_out_blocks(by_rank)
    assert places == [[(24, 60), (64, 88)], [(88, 124), (0, 24)]]
    assert size == 128
    places, size = lay_out_blocks(by_rank, slack=128)
    assert places == [[(192, 384), (384, 576)], [(576, 768), (0, 192)]]
    assert size == 768
