"""Changes are applied bit by bit, once, in order, and to nothing else than what they were made
of."""

import asyncio
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from weight_sync.components import Kept, RowsRank, matrices
from weight_sync.processes import Processes
from weight_sync.test_failures import Tampering
from weight_sync.test_transfer import LINKS, assert_bit_equal

from ratchet.errors import DeltaRefused, WeightSyncError
from ratchet.models.weights.checksums import checksum
from ratchet.protocols import Shard
from ratchet.weight_sync import collective
from ratchet.weight_sync.delta import (
    ReceivedWeights,
    apply_changed_words,
    find_changed_words,
    forget,
    iterate_changes,
    view_as_words,
)
from ratchet.weight_sync.endpoints import LocalRank, WeightReceiver
from ratchet.weight_sync.shared_memory import SharedMemoryWeightSync
from ratchet.weight_sync.weight_blocks import describe_block

pytestmark = pytest.mark.slow

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int8,
    torch.bool,
    torch.float8_e4m3fn,
]


@st.composite
def bits(draw):
    """(old, new) of any bits, NaNs and zeros of either sign among them; often mostly equal."""
    dtype = draw(st.sampled_from(DTYPES))
    n = draw(st.integers(0, 40))
    size = n * dtype.itemsize
    most = 1 if dtype == torch.bool else 255
    old = draw(st.lists(st.integers(0, most), min_size=size, max_size=size))
    new = list(old)
    for at in draw(st.lists(st.integers(0, max(0, size - 1)), max_size=size)):
        new[at : at + 1] = [draw(st.integers(0, most))]
    return tuple(torch.tensor(x[:size], dtype=torch.uint8).view(dtype) for x in (old, new))


@given(bits())
def test_a_delta_makes_the_old_bits_the_new_ones(pair):
    old, new = pair
    found = find_changed_words(new, old)
    if found is None:
        changed = int((view_as_words(new) != view_as_words(old)).sum())
        assert changed * (4 + new.dtype.itemsize) >= new.numel() * new.dtype.itemsize
        return
    made = old.clone()
    apply_changed_words(made, *found)
    assert torch.equal(view_as_words(made), view_as_words(new))
    assert (found[0][1:] > found[0][:-1]).all()


@settings(deadline=None, max_examples=40)
@given(st.lists(bits(), min_size=1, max_size=4))
def test_what_a_rank_sends_of_any_change_is_what_the_receiver_gets(pairs):
    session, received = "property", ReceivedWeights()
    forget(session)
    try:
        for version, which in ((1, 0), (2, 1)):
            shards = [
                Shard(f"w{i}", tuple(p[which].shape), (0,), p[which]) for i, p in enumerate(pairs)
            ]
            taken = deliver(received, shards, session, version - 1 or None, version)
            assert all(
                torch.equal(view_as_words(a), view_as_words(b.tensor))
                for a, b in zip(taken, shards, strict=True)
            )
    finally:
        forget(session)


def deliver(received, shards, session, base, version, *, sent=None):
    """Applies what a rank sends, and commits. sent: what it sent before, again."""
    blocks = [[describe_block(shard, None) for shard in shards]]
    parts, numbers = sent or outgoing(shards, session, base, version)
    taken = received.apply_push(
        blocks, [parts], lambda rank, part: numbers[part], base=base, version=version
    )
    found = [tensor.clone() for *_, tensor in taken]
    received.version = version
    return found


def outgoing(shards, session, base, version):
    parts, numbers = [], {}
    for item in iterate_changes(iter(shards), None, session=session, base=base, version=version):
        parts.append(item.as_sent(len(parts), checksum(item.tensor.contiguous())))
        numbers[parts[-1]] = item.tensor.reshape(-1).clone()
    return parts, numbers


@pytest.fixture
def history():
    """A receiver with version 1, and the changes from 1 to 2 and from 2 to 3."""
    session, received = "history", ReceivedWeights()
    versions = {1: torch.zeros(100), 2: torch.zeros(100), 3: torch.zeros(100)}
    versions[2][7] = 1.0
    versions[3][[7, 8]] = torch.tensor([1.0, 2.0])
    shards = {version: [Shard("w", (100,), (0,), tensor)] for version, tensor in versions.items()}
    deliver(received, shards[1], session, None, 1)
    sent = {version: outgoing(shards[version], session, version - 1, version) for version in (2, 3)}
    yield received, shards, sent
    forget(session)


def test_changes_apply_once_and_in_order(history):
    received, shards, sent = history
    with pytest.raises(
        DeltaRefused, match="changes from version 2 to 3 were refused: the receiver has version 1"
    ):
        deliver(received, shards[3], "", 2, 3, sent=sent[3])
    deliver(received, shards[2], "", 1, 2, sent=sent[2])
    with pytest.raises(
        DeltaRefused, match="changes from version 1 to 2 were refused: the receiver has version 2"
    ):
        deliver(received, shards[2], "", 1, 2, sent=sent[2])
    with pytest.raises(DeltaRefused, match="from version 2 to 2"):
        deliver(received, shards[3], "", 2, 2, sent=sent[3])
    (found,) = deliver(received, shards[3], "", 2, 3, sent=sent[3])
    assert torch.equal(found, shards[3][0].tensor)


def test_what_comes_out_wrong_is_refused_and_nothing_applies_to_it_any_more(history):
    received, shards, sent = history
    received.blocks[0, 0][50] = 5.0
    with pytest.raises(
        WeightSyncError, match="weight 'w' of rank 0 has the wrong checksum after its changes"
    ):
        deliver(received, shards[2], "", 1, 2, sent=sent[2])
    with pytest.raises(DeltaRefused, match="the receiver has none"):
        deliver(received, shards[2], "", 1, 2, sent=sent[2])


def test_a_position_outside_of_the_block_is_refused():
    with pytest.raises(WeightSyncError, match="outside of its block"):
        apply_changed_words(
            torch.zeros(3),
            torch.tensor([3], dtype=torch.int32),
            torch.tensor([1], dtype=torch.int32),
        )


# --- through a link

WHOLE = 4 * 30 * 4  # bytes of four matrices


@pytest.mark.parametrize("through", ["files", "shared_memory", "collective"])
def test_a_push_is_whole_where_changes_would_not_apply(through, ranks, tmp_path):
    kept = Kept()
    receiver = LocalRank(WeightReceiver(kept))
    link = LINKS[f"delta by {through.replace('_', ' ')}"](ranks, receiver, tmp_path)

    def pushed(version):
        asyncio.run(link.push(version))
        assert kept.version == version
        assert asyncio.run(link.audit()) == []
        return link.sent_bytes

    assert pushed(1) == WHOLE
    assert pushed(2) == 0, "nothing has changed"
    assert pushed(2) == WHOLE, "the same version again"
    assert pushed(1) == WHOLE, "an earlier version, as after a checkpoint was loaded"
    assert pushed(3) == 0
    kept.version = 9
    assert pushed(10) == WHOLE, "somebody else gave the generator version 9"
    ranks.ask("become", 1)
    assert pushed(11) == WHOLE, "everything has changed"
    assert_bit_equal(kept.held, matrices(1, 4, 6, 5))
    receiver.component = WeightReceiver(kept)
    assert pushed(12) == WHOLE, "a receiver that has forgotten"


class Cut:
    """A connection from a rank that ends with the next message."""

    def broadcast(self, *_):
        return self

    def wait(self):
        raise RuntimeError("Connection closed by peer")


def test_what_a_failed_push_has_left_is_not_sent_by_a_whole_one(monkeypatch):
    monkeypatch.setattr(collective.CollectiveTransport, "write", lambda _, parts, rank: list(parts))
    transport = collective.CollectiveTransport("left", changes_only=True)
    old, new = (Shard("w", (4,), (0,), torch.full((4,), value)) for value in (0.0, 1.0))
    transport.stage_changes(iter([old]), 0, base=1, version=2)
    (part,) = transport.send(iter([new]), 0, base=None, version=3)
    assert torch.equal(part.tensor, torch.ones(4))
    forget("left")


def cut_connections(receiver, link):
    for member, (key, groups) in collective._GROUPS.items():
        collective._GROUPS[member] = key, [Cut() for _ in groups]


def flip_at_receiver(receiver, link):
    view_as_words(receiver.component._received[link.transport.session].blocks[0, 0])[3] ^= 1


def refuse_once(receiver, link):
    def refuse(*_):
        raise WeightSyncError("weight 'w0' differs from the one that rank 0 sent")

    receiver.method, receiver.act = "verify_and_stage", refuse


@pytest.mark.parametrize(
    ("through", "fault", "reason"),
    [
        ("files", flip_at_receiver, "wrong checksum after its changes"),
        ("files", refuse_once, "differs from the one that rank 0 sent"),
        ("shared memory", refuse_once, "differs from the one that rank 0 sent"),
        ("collective", flip_at_receiver, "wrong checksum after its changes"),
        ("collective", cut_connections, "rank 0 stopped sending"),
    ],
)
def test_changes_that_are_lost_are_followed_by_a_whole_push(
    through, fault, reason, ranks, tmp_path, caplog
):
    kept = Kept()
    receiver = Tampering(WeightReceiver(kept), "", None)
    link = LINKS[f"delta by {through}"](ranks, receiver, tmp_path)
    asyncio.run(link.push(1))
    ranks.ask("touch")
    wanted = matrices(0, 4, 6, 5)
    wanted["w0"][0, 0] += 1
    asyncio.run(link.push(2))
    assert link.sent_bytes == 8, "a position and a value"
    assert_bit_equal(kept.held, wanted)
    ranks.ask("touch")
    wanted["w0"][0, 0] += 1
    fault(receiver, link)
    asyncio.run(link.push(3))
    assert re.search(f"changes from version 2 to 3 were not applied.*{reason}", caplog.text)
    assert (kept.version, link.sent_bytes) == (3, WHOLE)
    assert_bit_equal(kept.held, wanted)
    ranks.ask("touch")
    asyncio.run(link.push(4))
    assert (kept.version, link.sent_bytes) == (4, 8), "changes apply again"
    asyncio.run(link.close())


def test_a_rank_that_was_started_anew_sends_all_that_it_has(ranks):
    kept = Kept()
    link = SharedMemoryWeightSync(ranks, LocalRank(WeightReceiver(kept)), changes_only=True)
    asyncio.run(link.push(1))
    link.senders = other = Processes(2, "weight_sync.components:RowsRank")
    try:
        asyncio.run(link.push(2))
    finally:
        other.close()
    assert link.sent_bytes == WHOLE
    assert_bit_equal(kept.held, matrices(0, 4, 6, 5))


def test_rows_of_ranks_are_those_of_the_whole():
    shards = [list(RowsRank(rank, 2).weights()) for rank in (0, 1)]
    assert torch.equal(torch.cat([own[0].tensor for own in shards]), matrices(0, 4, 6, 5)["w0"])
