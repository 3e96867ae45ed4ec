"""Groups that are trained on again: which, how often, and what the ledger says of them."""

import asyncio
import copy

import pytest
from experience.ledger_faults import find_ledger_faults

from ratchet.config.experience import ReplayConfig
from ratchet.experience.rollout.metrics import measure_groups
from ratchet.experience.sources.batcher import Batcher
from ratchet.experience.sources.prompt_ledger import PromptLedger, read_ledger
from ratchet.experience.sources.replay_buffer import ReplayBuffer
from ratchet.testing.builders import make_group, make_trajectory
from ratchet.testing.fakes import FakeSource
from ratchet.types import Failed


class Fresh(FakeSource):
    """Group i has rewards 0 and i % 4; the weights of the step drew it."""

    def __init__(self, ledger):
        super().__init__([make_group("x", ())])
        self.ledger = ledger

    async def draw(self, n, version):
        drawn = await super().draw(n, version)
        self.ledger.note("issued", [group.id for group in drawn], version=version)
        return [make_group(one.id, self.rows(number_of(one.id), version)) for one in drawn]

    def rows(self, number, version):
        return [
            make_trajectory([1], [2, 3], reward=i * (number % 4), attempt=i, version=version)
            for i in range(2)
        ]

    def ack(self, ids, step):
        super().ack(ids, step)
        if step >= 0:
            self.ledger.note("trained", ids, step=step)


def number_of(name):
    return int(name.partition("/")[2])


def replay(path=None, **keys):
    ledger = PromptLedger(path)
    return ReplayBuffer(Fresh(ledger), ReplayConfig(**keys), ledger=ledger, seed=0)


async def play(source, steps, first=0):
    """The groups of each step."""
    taken = []
    for step in range(first, first + steps):
        taken.append(await source.draw(4, step))
        source.ack([group.id for group in taken[-1]], step)
    return taken


def again(taken):
    return [[group.id for group in groups if group.n_uses] for groups in taken]


def test_a_step_has_its_own_groups_and_some_of_earlier_ones():
    taken = asyncio.run(play(replay(groups=3), 6))
    assert [len([g for g in groups if not g.n_uses]) for groups in taken] == [4] * 6, (
        "as many new ones as without"
    )
    assert [len(names) for names in again(taken)] == [0, 3, 3, 3, 3, 3]
    uses = {}
    for groups in taken:
        assert len({group.id for group in groups}) == len(groups)
        for group in groups:
            assert group.n_uses == uses.get(group.id, 0)
            uses[group.id] = group.n_uses + 1
    assert max(uses.values()) > 2


def test_what_is_too_old_is_not_replayed_and_the_ledger_holds_it(tmp_path):
    path = tmp_path / "ledger.jsonl"
    asyncio.run(play(replay(path, groups=4, max_age=2, priority="uniform"), 12))
    lines = list(read_ledger(path))
    ages = [line["step"] - line["version"] for line in lines if line["event"] == "replayed"]
    assert (min(ages), max(ages)) == (1, 2)
    assert not find_ledger_faults(iter(lines), max_staleness=0, max_age=2)
    assert find_ledger_faults(iter(lines), max_staleness=0, max_age=1)


def test_groups_without_a_signal_are_kept_only_where_any_will_do():
    spread, uniform = (
        again(asyncio.run(play(replay(priority=priority), 4))) for priority in ("spread", "uniform")
    )
    silent = [
        [name for names in taken for name in names if number_of(name) % 4 == 0]
        for taken in (spread, uniform)
    ]
    assert not silent[0]
    assert silent[1]


def test_chances_go_by_the_spread_of_rewards():
    """Of groups with standard deviations of 0, 0.5, 1 and 1.5 one a step: by their shares of the
    sum."""
    source, counts = replay(groups=1), [0, 0, 0, 0]
    asyncio.run(play(source, 1))
    for step in range(600):
        (group,) = source._sample_replayed(step)
        counts[number_of(group.id)] += 1
    assert [count / 600 for count in counts] == pytest.approx([0, 1 / 6, 2 / 6, 3 / 6], abs=0.05)


@pytest.mark.medium
@pytest.mark.parametrize(
    ("key", "low", "high"),
    [("groups", 1, 2), ("max_age", 1, 3), ("capacity", 3, 20), ("priority", "uniform", "spread")],
)
def test_each_key_changes_what_is_replayed(key, low, high):
    keys = {"groups": 2, "max_age": 9}
    a, b = (again(asyncio.run(play(replay(**{**keys, key: value}), 8))) for value in (low, high))
    assert a != b
    assert again(asyncio.run(play(replay(**{**keys, key: high}), 8))) == b


def test_it_goes_on_where_it_was_with_the_same_groups():
    async def run():
        whole = await play(replay(groups=3), 8)
        first, second = replay(groups=3), replay(groups=3)
        await play(first, 4)
        state = copy.deepcopy(await first.snapshot())
        await first.draw(4, 4)  # and the process dies
        await second.restore(state)
        return whole[4:], await play(second, 4, first=4)

    wanted, found = asyncio.run(run())
    for a, b in zip(wanted, found, strict=True):
        assert [(group.id, group.n_uses) for group in a] == [
            (group.id, group.n_uses) for group in b
        ]
        for one, other in zip(a, b, strict=True):
            rows = [
                [
                    (row.tokens.tolist(), row.versions.tolist(), row.outcome)
                    for row in g.trajectories
                ]
                for g in (one, other)
            ]
            assert rows[0] == rows[1]


def test_what_is_refused_is_drawn_again_and_what_is_replayed_stays():
    async def run():
        source = replay(groups=2, priority="uniform")
        await play(source, 1)
        drawn = await source.draw(4, 1)
        source.nack([group.id for group in drawn], "lost")
        return drawn, await source.draw(4, 1)

    drawn, once_more = asyncio.run(run())
    assert [group.id for group in once_more] == [group.id for group in drawn]


def test_metrics_and_the_share_of_failures_are_of_new_groups():
    class Failing(Fresh):
        def rows(self, number, version):
            fails = make_trajectory([1], [2], outcome=Failed("timeout"), attempt=2)
            return [*super().rows(number, version), *([fails] if version == 0 else [])]

    async def run():
        ledger = PromptLedger()
        source = ReplayBuffer(
            Failing(ledger), ReplayConfig(groups=4, priority="uniform"), ledger=ledger, seed=0
        )
        batcher = Batcher(source, groups_per_step=4, max_failed_share=0.9)
        batcher.ack(await batcher.next(0), 0)
        groups = await batcher.next(1)
        batcher.ack(groups, 1)
        return groups, batcher

    groups, batcher = asyncio.run(run())
    numbers = measure_groups(groups)
    assert numbers["failed_share"] == 0.0
    assert numbers["generated_tokens"] == 4 * 2 * 2
    assert numbers["trained_tokens"] == 8 * 2 * 2
    assert batcher.measure(groups) == {
        "replay/share": 0.5,
        "replay/kept": 8.0,
        "replay/uses_mean": 1.0,
    }
    assert batcher._recent[1] == ([], 8)
