"""Tail batching under a clock that jumps: an attempt takes a second a token, and how many it has is
known by its task."""

import asyncio
import json
from collections import Counter
from contextlib import suppress
from dataclasses import replace

import pytest
from experience.ledger_faults import find_ledger_faults
from hypothesis import given, settings
from hypothesis import strategies as st
from support.clock import simulate

from ratchet.experience.async_rollouts import tail_batching
from ratchet.experience.async_rollouts.tail_batching import (
    AbortableGenerator,
    TailBatching,
    TokenCounter,
)
from ratchet.experience.rollout.manager import RolloutManager
from ratchet.experience.sources.prompt_ledger import PromptLedger, read_ledger
from ratchet.experience.sources.rollouts import RolloutSource
from ratchet.experience.sources.tasks import TaskStream
from ratchet.testing.builders import make_trajectory
from ratchet.testing.conformance import check_source
from ratchet.testing.fakes import FakeEnvironment, FakeGenerator
from ratchet.types import Sampling, StopReason


class Ticking(FakeGenerator):
    """A token a second, `max_new_tokens` of them, or those that it has when it is aborted."""

    def __init__(self):
        super().__init__(lambda tokens, sampling: [7] * sampling.max_new_tokens)
        self.aborted = asyncio.Event()

    async def generate(self, tokens, sampling, media=()):
        aborted, begun = self.aborted, asyncio.get_running_loop().time()
        with suppress(TimeoutError):
            await asyncio.wait_for(aborted.wait(), sampling.max_new_tokens)
        ticked = int(asyncio.get_running_loop().time() - begun)
        done = await super().generate(tokens, replace(sampling, max_new_tokens=ticked), media)
        return replace(done, stop=StopReason.ABORTED) if aborted.is_set() else done

    def abort(self):
        self.aborted.set()
        self.aborted = asyncio.Event()


class Counts:
    """A player whose attempts are one request each."""

    def __init__(self, generator, lengths):
        self.generator, self.lengths = generator, lengths

    async def play(self, task, environment, sampling, *, attempt, prompt_cache=None):
        number = int(task.id.rpartition("/")[2])
        wanted = self.lengths[number % len(self.lengths)] + attempt
        found = await self.generator.generate([1], replace(sampling, max_new_tokens=wanted))
        return [
            make_trajectory(
                [1], found.tokens.tolist(), attempt=attempt, version=int(found.versions[0])
            )
        ]


def made(lengths, *, extra_groups, end_step, path=None, attempts=1):
    generator = Ticking()
    asked = AbortableGenerator(generator)
    manager = RolloutManager(Counts(asked, lengths), FakeEnvironment, None, needs_reward=False)
    source = RolloutSource(
        TaskStream(FakeEnvironment(), seed=0),
        "s",
        manager,
        sampling=Sampling(),
        seed=0,
        group_size=attempts,
    )
    source.ledger = PromptLedger(path)
    return TailBatching(source, asked, extra_groups=extra_groups, end_step=end_step), generator


async def trained(source, generator, n, steps):
    """Of each step: the numbers of its groups, its seconds, and what it measured."""
    clock, found = asyncio.get_running_loop().time, []
    for step in steps:
        begun = clock()
        groups = await source.draw(n, step)
        source.ack([group.id for group in groups], step)
        versions = {int(row.versions.max()) for group in groups for row in group.trajectories}
        assert versions == {step}, "all attempts have the newest weights"
        numbers = {
            name.removeprefix("tails/"): value for name, value in source.measure(groups).items()
        }
        found.append(
            ([int(group.id.rpartition("/")[2]) for group in groups], clock() - begun, numbers)
        )
        await generator.commit(step + 1)
    return found


def measured(deferred, wasted, waiting):
    return {"deferred": deferred, "wasted_tokens": wasted, "waiting": waiting}


def test_by_hand(tmp_path):
    """Two groups a step, and one more is begun. 0 and 2 are ready after 2 s, 1 has two of its five
    tokens by then. 4 and 3 are after 3 s, and 5 waits with 1. Two that were deferred are a step: it
    takes the 5 s that the longer one takes. Then two prompts are left to begin, and no more, so the
    last step has nobody to defer."""
    path = tmp_path / "ledger.jsonl"
    source, generator = made([1, 5, 2, 3, 1, 4, 6, 2], extra_groups=1, end_step=4, path=path)
    assert simulate(trained(source, generator, 2, range(4))) == [
        ([0, 2], 2.0, measured(1, 2, 1)),
        ([3, 4], 3.0, measured(1, 3, 2)),
        ([1, 5], 5.0, measured(0, 0, 0)),
        ([6, 7], 6.0, measured(0, 0, 0)),
    ]
    lines = list(read_ledger(path))
    assert not find_ledger_faults(iter(lines), max_staleness=0)
    assert [(line["event"], line["id"]) for line in lines[:6]] == [
        *(("issued", f"s/{i}") for i in range(3)), ("deferred", "s/1"), ("trained", "s/0"), ("trained", "s/2"),
    ]  # fmt: skip
    assert [(line["event"], line.get("version", line.get("step"))) for line in lines if line["id"] == "s/1"] == [
        ("issued", 0), ("deferred", 0), ("issued", 2), ("trained", 2),
    ]  # fmt: skip


def test_the_last_step_fills_what_was_deferred_with_new_ones():
    source, generator = made([1, 5, 2, 3], extra_groups=1, end_step=2)
    found = simulate(trained(source, generator, 2, range(2)))
    assert [numbers for numbers, _, _ in found] == [[0, 2], [1, 3]]
    assert found[1][2] == measured(0, 0, 0)


def test_groups_that_are_ready_together_beyond_a_step_are_deferred_too():
    """What was drawn for them is wasted whole."""
    source, generator = made([2], extra_groups=2, end_step=9, attempts=2)
    (found,) = simulate(trained(source, generator, 2, range(1)))
    assert found == ([0, 1], 3.0, measured(2, 2 * (2 + 3), 2))


def test_a_resumed_run_goes_on_with_those_that_were_deferred(tmp_path):
    lengths = [1, 5, 2, 3, 1, 4, 6, 2]
    whole, generator = made(lengths, extra_groups=1, end_step=4)
    wanted = simulate(trained(whole, generator, 2, range(4)))

    async def killed_and_resumed(path):
        first, generator = made(lengths, extra_groups=1, end_step=4, path=path)
        found = await trained(first, generator, 2, range(1))
        state = json.loads(json.dumps(await first.snapshot()))
        await trained(first, generator, 2, range(1, 2))  # which nobody saved
        second, generator = made(lengths, extra_groups=1, end_step=4, path=path)
        await second.restore(state)
        await generator.commit(1)
        return [*found, *await trained(second, generator, 2, range(1, 4))]

    path = tmp_path / "ledger.jsonl"
    assert simulate(killed_and_resumed(path)) == wanted
    lines = list(read_ledger(path))
    assert not find_ledger_faults(iter(lines), max_staleness=0)
    assert Counter(line["event"] for line in lines) == {
        "issued": 8 + 2,
        "deferred": 2,
        "trained": 8,
    }


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 4),
    extra_groups=st.integers(1, 9),
    steps=st.integers(1, 9),
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=20),
)
def test_each_prompt_is_trained_on_once_and_none_is_left(n, extra_groups, steps, lengths):
    source, generator = made(lengths, extra_groups=extra_groups, end_step=steps)
    found = simulate(trained(source, generator, n, range(steps)))
    assert sorted(number for numbers, _, _ in found for number in numbers) == list(range(n * steps))
    assert found[-1][2]["waiting"] == 0
    assert max(numbers["waiting"] for _, _, numbers in found) < n + extra_groups, (
        "they do not pile up"
    )


def test_it_conforms_to_the_source_protocol():
    """In a stage of two steps: in a longer one, who comes again may be deferred again."""
    simulate(check_source(made([1, 5, 2, 3, 1], extra_groups=1, end_step=2)[0]))


# --- what attempts ask


def test_requests_of_no_group_are_neither_counted_nor_held_up():
    async def scene():
        generator = Ticking()
        asked = AbortableGenerator(generator)
        await asked.abort_requests()
        passed = await asked.generate([1], Sampling(max_new_tokens=3))
        return len(passed.tokens), generator.aborted.is_set()

    assert simulate(scene()) == (3, False)


def test_who_asks_after_the_cut_waits_until_it_is_cancelled():
    """An attempt whose environment is slow comes back late: it must draw nothing that nobody
    counts."""

    async def scene():
        generator = Ticking()
        asked, drawn = AbortableGenerator(generator), TokenCounter()
        tail_batching.CURRENT_COUNTER.set(drawn)
        running = asyncio.create_task(asked.generate([1], Sampling(max_new_tokens=9)))
        await asyncio.sleep(4)
        await asked.abort_requests()
        late = asyncio.create_task(asked.generate([1], Sampling(max_new_tokens=1)))
        await asyncio.sleep(100)
        assert not running.done()
        assert not late.done()
        for task in (running, late):
            task.cancel()
        asked.accept_requests()
        return (
            drawn.tokens,
            len(generator.requests),
            len((await asked.generate([1], Sampling(max_new_tokens=1))).tokens),
        )

    assert simulate(scene()) == (4, 1, 1)


def test_a_generator_that_does_not_answer_an_abort_is_not_waited_for(caplog):
    class Deaf(Ticking):
        def abort(self): ...

    async def scene():
        asked, clock = AbortableGenerator(Deaf()), asyncio.get_running_loop().time
        tail_batching.CURRENT_COUNTER.set(TokenCounter())
        running = asyncio.create_task(asked.generate([1], Sampling(max_new_tokens=10_000)))
        await asyncio.sleep(1)
        await asked.abort_requests()
        running.cancel()
        return clock()

    assert simulate(scene()) == pytest.approx(1 + tail_batching.ABORT_TIMEOUT_S)
    assert "1 aborted requests have not returned" in caplog.text
