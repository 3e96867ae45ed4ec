"""Whatever goes wrong on the way, the old version keeps serving, and the error says which weight of
which rank."""

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from weight_sync.components import Kept, RowsRank, matrices
from weight_sync.processes import Processes
from weight_sync.test_transfer import LINKS, assert_bit_equal

from ratchet.errors import ModelError, WeightSyncError
from ratchet.weight_sync import shared_memory
from ratchet.weight_sync.endpoints import LocalRank, WeightReceiver
from ratchet.weight_sync.shared_memory import SharedMemoryWeightSync


class Tampering(LocalRank):
    """Does something just before a method of the receiver."""

    def __init__(self, component, method, act):
        super().__init__(component)
        self.method, self.act = method, act

    async def call(self, method, /, *arguments):
        if method == self.method and self.act is not None:
            act, self.act = self.act, None
            act(*arguments)
        return await super().call(method, *arguments)


def flip_in_segment(session_at):
    """A bit of the second weight of rank 1."""

    def act(parts, *_):
        part = parts[1][1]
        (segments,) = shared_memory._MAPPED.values()
        (bytes_n,) = segments.values()
        bytes_n[shared_memory.HEADER + part.start + session_at] ^= 1

    return act


def flip_in_file(directory):
    def act(*_):
        (path,) = directory.glob("*/push-2-*/rank-1.safetensors")
        content = bytearray(path.read_bytes())
        content[-1] ^= 0x80
        path.write_bytes(content)

    return act


def serves(kept, version, wanted):
    assert kept.version == version
    assert_bit_equal(kept.held, wanted)


def push_then_fail(link, kept, ranks, version=2, **match):
    """The old weights stay; the push after that brings the new ones."""
    with pytest.raises(WeightSyncError, **match) as failed:
        asyncio.run(link.push(version))
    serves(kept, 1, matrices(0, 4, 6, 5))
    assert kept.staged == []
    asyncio.run(link.push(version + 1))
    serves(kept, version + 1, matrices(1, 4, 6, 5))
    return failed.value


@pytest.mark.medium
@pytest.mark.parametrize("at", [0, 31, 59])
def test_a_flipped_bit_in_the_segment_is_refused(at, ranks):
    kept = Kept()
    receiver = Tampering(WeightReceiver(kept), "", None)
    link = SharedMemoryWeightSync(ranks, receiver)
    shared_memory._MAPPED.clear()
    asyncio.run(link.push(1))
    ranks.ask("become", 1)
    receiver.method, receiver.act = "verify_and_stage", flip_in_segment(at)
    error = push_then_fail(
        link, kept, ranks, match="weight 'w1' differs from the one that rank 1 sent"
    )
    assert (error.tensor, error.rank) == ("w1", 1)
    asyncio.run(link.close())


def test_a_flipped_bit_in_a_file_is_refused(ranks, tmp_path):
    kept = Kept()
    receiver = Tampering(WeightReceiver(kept), "", None)
    link = LINKS["files"](ranks, receiver, tmp_path)
    asyncio.run(link.push(1))
    ranks.ask("become", 1)
    receiver.method, receiver.act = "verify_and_stage", flip_in_file(tmp_path)
    error = push_then_fail(link, kept, ranks, match="differs from the one that rank 1 sent")
    assert error.rank == 1


def test_a_file_that_is_cut_off_or_gone_is_refused(ranks, tmp_path):
    kept = Kept()
    receiver = Tampering(WeightReceiver(kept), "", None)
    link = LINKS["files"](ranks, receiver, tmp_path)
    asyncio.run(link.push(1))
    ranks.ask("become", 1)
    receiver.method = "verify_and_stage"

    def cut(*_):
        (path,) = tmp_path.glob("*/push-2-*/rank-0.safetensors")
        os.truncate(path, 100)

    receiver.act = cut
    push_then_fail(link, kept, ranks, match="of rank 0 can't be read from")
    assert len(list(tmp_path.glob("*/push-*"))) == 1, "old pushes are removed"


@pytest.mark.medium
@pytest.mark.parametrize("kind", LINKS)
@pytest.mark.fault("P20")
def test_a_rank_killed_in_the_middle_of_sending_is_named(kind, tmp_path):
    ranks, kept = Processes(2, "weight_sync.components:RowsRank"), Kept()
    link = LINKS[kind](ranks, LocalRank(WeightReceiver(kept)), tmp_path)
    try:
        asyncio.run(link.push(1))
        ranks.ask("die", 1, 2)
        with pytest.raises(WeightSyncError) as failed:
            asyncio.run(link.push(2))
    finally:
        ranks.close()
    assert failed.value.rank == 1
    serves(kept, 1, matrices(0, 4, 6, 5))
    link.senders = ranks = Processes(2, "weight_sync.components:RowsRank")
    try:
        ranks.ask("become", 1)
        asyncio.run(link.push(3))
        serves(kept, 3, matrices(1, 4, 6, 5))
        asyncio.run(link.close())
    finally:
        ranks.close()


@pytest.mark.parametrize("kind", LINKS)
def test_a_rank_that_raises_ends_the_push_and_nobody_waits_for_the_deadline(kind, ranks, tmp_path):
    kept = Kept()
    link = LINKS[kind](ranks, LocalRank(WeightReceiver(kept)), tmp_path)
    asyncio.run(link.push(1))
    ranks.ask("become", 1)
    ranks.ask("fail", 1, 2)
    try:
        with pytest.raises(WeightSyncError, match=r"out of memory|rank 1 (stopped sending|lost)"):
            asyncio.run(link.push(2))
    finally:
        ranks.ask("fail", None, None)
    serves(kept, 1, matrices(0, 4, 6, 5))
    asyncio.run(link.push(2))
    serves(kept, 2, matrices(1, 4, 6, 5))


@pytest.mark.parametrize("kind", LINKS)
def test_a_generator_that_refuses_keeps_what_it_has(kind, ranks, tmp_path):
    kept = Kept()
    link = LINKS[kind](ranks, LocalRank(WeightReceiver(kept)), tmp_path)
    asyncio.run(link.push(1))
    ranks.ask("become", 1)

    async def refuse(shards):
        raise ModelError("no room")

    kept.receive, receive = refuse, kept.receive
    with pytest.raises(
        WeightSyncError, match=re.escape("(a receiver compares checksums: ModelError: no room)")
    ):
        asyncio.run(link.push(2))
    serves(kept, 1, matrices(0, 4, 6, 5))
    kept.receive = receive
    asyncio.run(link.push(2))
    serves(kept, 2, matrices(1, 4, 6, 5))


def test_a_push_has_a_deadline(ranks):
    async def never(manifest):
        await asyncio.Event().wait()

    kept = Kept()
    link = SharedMemoryWeightSync(ranks, LocalRank(WeightReceiver(kept)))
    asyncio.run(link.push(1))
    kept.prepare, link.timeout_s = never, 0.05
    with pytest.raises(
        WeightSyncError, match=re.escape("(a receiver prepares: not finished after 0.05 s)")
    ):
        asyncio.run(link.push(2))
    assert kept.version == 1


def test_a_cancelled_push_rolls_back(ranks):
    class Slow(Kept):
        rolled_back = False

        async def prepare(self, manifest):
            preparing.set()
            await asyncio.Event().wait()

        async def rollback(self):
            self.rolled_back = True

    preparing = asyncio.Event()

    async def cancel(link):
        task = asyncio.create_task(link.push(1))
        await preparing.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    kept = Slow()
    asyncio.run(cancel(SharedMemoryWeightSync(ranks, LocalRank(WeightReceiver(kept)))))
    assert kept.rolled_back


def test_ranks_that_hold_other_blocks_than_they_said_are_refused(ranks):
    kept = Kept()
    link = SharedMemoryWeightSync(ranks, LocalRank(WeightReceiver(kept)))
    asyncio.run(link.push(1))
    link.senders = LocalRank(LocalRows(0, 1))
    with pytest.raises(WeightSyncError):
        asyncio.run(link.push(2))
    serves(kept, 1, matrices(0, 4, 6, 5))


class LocalRows(RowsRank):
    """Alone, and so with all the rows."""


def test_memory_of_another_host_is_not_mistaken_for_the_segment(tmp_path):
    file = tmp_path / "other"
    file.write_bytes(bytes(256))
    for path in (str(file), str(tmp_path / "absent")):
        with pytest.raises(WeightSyncError, match="must be on one host"):
            shared_memory._map_segment(path, "token", 128)


def segments(pids):
    """The segments that these processes still map."""
    found = []
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            found += [
                line
                for line in Path(f"/proc/{pid}/maps").read_text().splitlines()
                if "memfd:ratchet-" in line
            ]
    return found


DRIVER = textwrap.dedent(
    """
    import asyncio, sys, time
    sys.path[:0] = {path}
    from weight_sync.components import Kept, RowsRank
    from ratchet.weight_sync.endpoints import WeightReceiver, LocalRank
    from ratchet.weight_sync.shared_memory import SharedMemoryWeightSync

    class Rank(RowsRank):
        def __init__(self):
            super().__init__(0, 1)

    link = SharedMemoryWeightSync(LocalRank(Rank()), LocalRank(WeightReceiver(Kept())), run="killed")
    asyncio.run(link.push(1))
    print("pushed", flush=True)
    time.sleep(60)
    """
)


@pytest.mark.slow
def test_no_memory_is_left_behind_by_a_driver_that_was_killed():
    before = set(Path("/dev/shm").iterdir())
    code = DRIVER.format(path=[str(Path(__file__).parents[1])])
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
    ) as driver:
        assert driver.stdout is not None
        assert driver.stdout.readline() == "pushed\n"
        assert segments([driver.pid])
        driver.send_signal(signal.SIGKILL)
        driver.wait()
    assert segments([driver.pid]) == []
    assert not [
        path for path in set(Path("/dev/shm").iterdir()) - before if "ratchet-killed" in path.name
    ]


@pytest.mark.medium
def test_a_receiver_that_was_killed_is_named_and_another_gets_everything(ranks):
    receivers = Processes(1, "weight_sync.components:KeptIntake")
    link = SharedMemoryWeightSync(ranks, receivers, changes_only=True)
    asyncio.run(link.push(1))
    receivers.processes[0].kill()
    receivers.processes[0].join()
    with pytest.raises(WeightSyncError, match="rank 0 died"):
        asyncio.run(link.push(2))
    link.receivers = receivers = Processes(1, "weight_sync.components:KeptIntake")
    try:
        ranks.ask("become", 1)
        asyncio.run(link.push(3))
        ((version, held),) = receivers.ask("held")
        assert version == 3
        assert_bit_equal(held, matrices(1, 4, 6, 5))
    finally:
        receivers.close()
