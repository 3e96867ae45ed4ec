"""The real sources, manager and scheduler under a clock that jumps, with a generator that takes
simulated time."""

import asyncio
import itertools
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from statistics import fmean

import pytest
from experience.ledger_faults import find_ledger_faults
from support.clock import simulate

from ratchet.experience.async_rollouts.concurrency import ConcurrencyController
from ratchet.experience.async_rollouts.prefetch import PrefetchingSource
from ratchet.experience.async_rollouts.resumable_generator import ResumableGenerator
from ratchet.experience.async_rollouts.staleness_scheduler import (
    StalenessScheduler,
    get_max_in_flight,
)
from ratchet.experience.async_rollouts.tail_batching import AbortableGenerator, TailBatching
from ratchet.experience.rollout.manager import RolloutManager
from ratchet.experience.rollout.metrics import estimate_mean_length
from ratchet.experience.seeds import derive_seed
from ratchet.experience.sources.prompt_ledger import PromptLedger, read_ledger
from ratchet.experience.sources.rollouts import RolloutSource
from ratchet.experience.sources.tasks import TaskStream
from ratchet.testing.builders import make_trajectory
from ratchet.testing.fakes import FakeEnvironment, FakeGenerator
from ratchet.testing.simulated import SlowGenerator, compute_best_step_ends, draw_seconds
from ratchet.types import Sampling, StopReason

BATCH, ATTEMPTS, SLOTS = 8, 4, 32  # a step's requests fill all slots once
MEAN_S = 1.0


class Asks:
    """A player whose attempts are one request each."""

    def __init__(self, generator, sigma):
        self.generator, self.sigma = generator, sigma

    async def play(self, task, environment, sampling, *, attempt, prompt_cache=None):
        found = await self.generator.generate([1], sampling)
        seconds = draw_seconds(sampling.seed, MEAN_S, self.sigma)
        row = make_trajectory(
            [1], found.tokens.tolist(), attempt=attempt, version=int(found.versions[0])
        )
        return [replace(row, metrics={"seconds": seconds})]


class GoesOn(SlowGenerator):
    """A request that continues after an interruption takes the time that was left."""

    def __init__(self, config):
        super().__init__(config)
        self.spent_s = Counter()

    async def generate(self, tokens, sampling, media=()):
        seconds = draw_seconds(sampling.seed, MEAN_S, self.config.sigma)
        clock, aborted = asyncio.get_running_loop().time, self._aborted
        async with self._slots:
            begun = clock()
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds - self.spent_s[sampling.seed]):
                    await aborted.wait()
            self.spent_s[sampling.seed] += clock() - begun
        made = await FakeGenerator.generate(self, tokens, sampling)
        if not aborted.is_set():
            return made
        none = {name: getattr(made, name)[:0] for name in ("tokens", "logprobs", "versions")}
        return replace(made, stop=StopReason.ABORTED, log_kept_mass=made.logprobs[:0], **none)


async def run(
    steps,
    update_s,
    *,
    max_staleness=0,
    order="issued",
    slots=SLOTS,
    path=None,
    redundant=0,
    sigma=1.0,
    redundant_groups=0,
    tails=0,
    targets=None,
    player=Asks,
    environment=FakeEnvironment,
    during_update="continue",
    **filters,
):
    """(seconds of each step, the groups of each). sigma: 1 has a tail so heavy that of 32 requests
    the slowest takes 5 s."""
    made = GoesOn if during_update == "interrupt" else SlowGenerator
    generator = made(SlowGenerator.Config(mean_s=MEAN_S, sigma=sigma, slots=slots))
    asked = AbortableGenerator(generator) if tails else ResumableGenerator(generator)
    manager = RolloutManager(player(asked, sigma), environment, None, needs_reward=False)
    source = RolloutSource(
        TaskStream(environment(), seed=0),
        "sim",
        manager,
        sampling=Sampling(),
        seed=0,
        group_size=ATTEMPTS,
        redundant_attempts=redundant,
        redundant_groups=redundant_groups,
    )
    source.ledger = PromptLedger(path)
    most = get_max_in_flight(BATCH, max_staleness)
    concurrency = (
        None
        if targets is None
        else ConcurrencyController(groups_per_step=BATCH, max_groups=most, **targets)
    )
    bounds = {"groups_per_step": BATCH, "max_staleness": max_staleness, "end_step": steps}
    if tails:
        ahead = TailBatching(source, asked, extra_groups=tails, end_step=steps)
    elif redundant_groups:
        ahead = source
    else:
        scheduler = StalenessScheduler(**bounds, order=order, concurrency=concurrency)
        ahead = PrefetchingSource(
            source, scheduler, asked, during_update=during_update, replayable=True, **filters
        )
    clock, seconds, groups = asyncio.get_running_loop().time, [], []
    for step in range(steps):
        begun = clock()
        groups.append(await ahead.draw(BATCH, step))
        await asyncio.sleep(update_s)
        ahead.ack([group.id for group in groups[-1]], step)
        if targets is not None:
            ahead.adapt(groups[-1], step, {})
        await generator.commit(step + 1)
        seconds.append(clock() - begun)
    if isinstance(ahead, PrefetchingSource):
        await ahead.close()
    return seconds, groups


def bound(groups, update_s, slots=SLOTS):
    """Seconds a step that the slower side alone would take."""
    asked = [
        row.metrics["seconds"] for step in groups for group in step for row in group.trajectories
    ]
    return max(update_s, sum(asked) / slots / len(groups))


@pytest.mark.slow
@pytest.mark.parametrize("update_s", [1.0, 2.0])
def test_asynchronous_steps_take_what_the_slower_side_takes(update_s, tmp_path):
    """Where few attempts take longer than the steps that they may be late: here 0.03 % of them."""
    steps, slots, sigma = 60, 64, 0.5
    whole, _ = simulate(run(steps, update_s, slots=slots, sigma=sigma))
    path = tmp_path / "ledger.jsonl"
    seconds, groups = simulate(
        run(steps, update_s, max_staleness=4, order="ready", slots=slots, path=path, sigma=sigma)
    )
    assert sum(whole) / sum(seconds) > 1.8
    assert sum(seconds) / steps < 1.1 * bound(groups, update_s, slots)
    assert not find_ledger_faults(read_ledger(path), max_staleness=4)


@pytest.mark.slow
def test_by_turns_the_slowest_go_on_in_later_steps(tmp_path):
    """On one accelerator nothing is drawn during an update, and yet no step waits for the slowest.
    Training sees every attempt that it sees where each step waits for all."""
    steps, path = 30, tmp_path / "ledger.jsonl"
    whole, plain = simulate(run(steps, 1.0))
    turns = {"max_staleness": 4, "order": "ready", "during_update": "interrupt"}
    seconds, groups = simulate(run(steps, 1.0, path=path, slots=2 * SLOTS, **turns))
    assert sum(whole) / sum(seconds) > 2.5
    assert not find_ledger_faults(read_ledger(path), max_staleness=4)
    taken = [sorted(seconds_in(itertools.chain(*every))) for every in (plain, groups)]
    assert taken[0] == taken[1]


def share_of_bound(seconds, groups, update_s, slots, around=5):
    """Of the steps in the middle: the first find the generators empty, and for the last ones
    nothing is begun."""
    middle = slice(around, -around)
    return bound(groups[middle], update_s, slots) / fmean(seconds[middle])


@pytest.mark.slow
@pytest.mark.parametrize(("update_s", "least"), [(1.2, 0.9), (2.0, 0.85), (4.0, 0.98)])
def test_a_heavy_tail_costs_little_where_few_attempts_outlast_the_steps_that_they_may_be_late(
    update_s, least, tmp_path
):
    """A step's requests take 2 s of 16 slots, the slowest of them 5 s, and they may be four steps
    late. Where both sides take as long, each waits for the other at times."""
    steps, slots = 60, 16
    whole, _ = simulate(run(steps, update_s, slots=slots))
    path = tmp_path / "ledger.jsonl"
    seconds, groups = simulate(
        run(steps, update_s, max_staleness=4, order="ready", slots=slots, path=path)
    )
    assert sum(whole) / sum(seconds) > 1.8
    assert share_of_bound(seconds, groups, update_s, slots) > least
    assert not find_ledger_faults(read_ledger(path), max_staleness=4)


def ends_undisturbed(steps, update_s, slots, *, max_staleness=4, sigma=1.0):
    """Of the same requests, where nothing else takes time and a group begins only when a slot is
    free."""
    scheduler = StalenessScheduler(
        groups_per_step=BATCH, max_staleness=max_staleness, end_step=steps, order="ready"
    )

    def seconds(group, attempt):
        return draw_seconds(derive_seed(0, f"sim/{group}", attempt), MEAN_S, sigma)

    return compute_best_step_ends(
        scheduler, attempts=ATTEMPTS, slots=slots, update_s=update_s, seconds=seconds
    )


@pytest.mark.slow
@pytest.mark.parametrize("update_s", [1.2, 2.0, 4.0])
def test_the_scheduler_comes_close_to_a_run_without_any_delay_of_its_own(update_s):
    steps, slots = 120, 16
    seconds, _ = simulate(run(steps, update_s, max_staleness=4, order="ready", slots=slots))
    assert ends_undisturbed(steps, update_s, slots)[-1] > 0.9 * sum(seconds)


@pytest.mark.slow
def test_two_sides_alike_can_not_both_be_busy_all_the_time_under_a_bound_on_staleness():
    """More slack brings them closer to it; without a tail they are busy but for the first step's
    requests."""
    shares = []
    for max_staleness in (1, 2, 4, 8):
        ends = ends_undisturbed(1000, 2.0, 16, max_staleness=max_staleness)
        shares.append(2.0 / (ends[-1] / 1000))
    assert shares == sorted(shares)
    assert shares[0] < 0.6
    assert 0.75 < shares[2] < 0.85, "within 10 % of it nobody comes"
    assert 0.9 < shares[3] < 1.0
    assert ends_undisturbed(10, 2.0, 16, sigma=0.0) == [4.0 + 2.0 * step for step in range(10)]


def test_undisturbed_by_hand():
    """Two slots, groups of two requests, one group a step, each update takes 3 s. The second
    request of the second group takes 10 s. One step of staleness: it begins at 1 s with the weights
    of step 0, and step 1 needs it, at 11 s. While that waits, the third group may not begin: two
    steps' groups are under way until step 0 has trained, at 4 s. Then it takes the slot that is
    free, from 4 s to 6 s, both requests one after the other."""
    scheduler = StalenessScheduler(groups_per_step=1, max_staleness=1, end_step=3, order="ready")
    long = {(1, 1): 10.0}
    ends = compute_best_step_ends(
        scheduler, attempts=2, slots=2, update_s=3.0, seconds=lambda *which: long.get(which, 1.0)
    )
    assert ends == [4.0, 14.0, 17.0]


@pytest.mark.medium
def test_attempts_that_outlast_those_steps_hold_it_up():
    """Slots for two steps' requests at once: a step would take 0.5 s, and many an attempt takes
    longer than four of them."""
    seconds, groups = simulate(run(40, 0.3, max_staleness=4, order="ready", slots=64))
    assert share_of_bound(seconds, groups, 0.3, 64) < 0.5


@pytest.mark.slow
def test_a_part_of_a_step_ahead_gains_a_part():
    """Half of the next step's groups are under way while the learner works: they are as stale as
    with 1, and half as many."""
    found = {}
    for ahead in (0, 0.5, 1):
        seconds, groups = simulate(run(40, 1.0, max_staleness=ahead, slots=2 * SLOTS, sigma=0.5))
        late = [
            step - row.versions.max()
            for step, taken in enumerate(groups)
            for group in taken
            for row in group.trajectories
        ]
        found[ahead] = sum(seconds), max(late), fmean(late)
    assert found[0][0] > 1.1 * found[0.5][0] > 1.1**2 * found[1][0]
    assert [found[ahead][1] for ahead in (0, 0.5, 1)] == [0, 1, 1]
    assert found[0.5][2] < 0.6 * found[1][2]


@pytest.mark.medium
def test_the_same_course_each_time():
    first, again = (simulate(run(12, 0.5, max_staleness=2, order="ready")) for _ in range(2))
    assert first[0] == again[0]
    assert [[g.id for g in step] for step in first[1]] == [
        [g.id for g in step] for step in again[1]
    ]


def seconds_in(groups):
    return [row.metrics["seconds"] for group in groups for row in group.trajectories]


@pytest.mark.medium
def test_what_is_ready_first_is_shorter_and_nothing_is_left_out():
    """Steps begin with short attempts, and end with the same ones as without staleness: no length
    is missing from training."""
    steps = 12
    _, plain = simulate(run(steps, 0.2))
    _, ready = simulate(run(steps, 0.2, max_staleness=4, order="ready"))
    assert fmean(seconds_in(ready[0])) < 0.7 * fmean(seconds_in(plain[0])), (
        "the bias of the first step"
    )
    everything = [
        sorted(seconds_in(group for step in taken for group in step)) for taken in (plain, ready)
    ]
    assert everything[0] == everything[1]


@pytest.mark.medium
@pytest.mark.parametrize(
    ("redundant", "kept", "off"), [(1, 0.65, 0.1), (2, 0.52, 0.1), (4, 0.38, 0.3)]
)
def test_the_bias_of_redundant_attempts_is_known_from_those_that_were_kept(redundant, kept, off):
    """Lengths have a mean of 1, with a heavy tail. What is kept is far shorter; with what is known
    of those that were cancelled the mean of all is found again, but for the tail of which nothing
    was kept."""
    _, taken = simulate(run(30, 0.2, redundant=redundant, slots=2 * SLOTS))
    lengths = [seconds_in([group]) for step in taken for group in step]
    assert fmean(length for group in lengths for length in group) == pytest.approx(kept, abs=0.05)
    assert estimate_mean_length(lengths, [redundant] * len(lengths)) == pytest.approx(
        MEAN_S, abs=off
    )


def test_the_mean_of_lengths_some_of_which_are_only_known_to_be_longer():
    assert estimate_mean_length([[1, 2, 6]], [0]) == 3.0
    assert estimate_mean_length([[1, 2]], [1]) == pytest.approx((1 + 2 + 2) / 3), (
        "nothing longer is known"
    )
    assert estimate_mean_length([[1], [3]], [1, 0]) == pytest.approx((1 + 3 + 3) / 3)
    assert estimate_mean_length([[1], [3, 5], []], [1, 0, 2]) == pytest.approx(
        (1 + 3 + 5 + (3 + 5) / 2) / 4
    )


@pytest.mark.medium
def test_redundant_groups_leave_out_no_more_than_so_many():
    """The slowest come again with each step and are late again; all others are trained on."""
    steps, redundant = 30, 2
    _, taken = simulate(run(steps, 0.2, redundant_groups=redundant))
    trained = {int(group.id.partition("/")[2]) for step in taken for group in step}
    assert len(trained) == steps * BATCH
    assert len(set(range(steps * BATCH + redundant)) - trained) == redundant
    assert fmean(seconds_in(group for step in taken for group in step)) > 0.9 * MEAN_S


def seconds_begun(groups):
    """Of the attempts of the first so many groups, whether they were trained on or not."""
    return [
        draw_seconds(derive_seed(0, f"sim/{group}", attempt), MEAN_S, 1.0)
        for group in range(groups)
        for attempt in range(ATTEMPTS)
    ]


@pytest.mark.medium
@pytest.mark.parametrize(
    ("more", "gain", "redundant_gain", "redundant_mean"),
    [(2, 1.29, 1.11, 0.98), (4, 1.37, 1.18, 0.95)],
)
def test_tail_batching_waits_seldom_and_leaves_nothing_out(
    more, gain, redundant_gain, redundant_mean, tmp_path
):
    """With slots for all attempts of a step it takes as long as its longest. Training sees the very
    attempts that it sees where each step waits for them. Redundant groups gain less, as the slowest
    of all soon fill the places that are to spare, and are never seen."""
    steps, path = 30, tmp_path / "ledger.jsonl"
    options = {
        "plain": {},
        "tails": {"tails": more, "path": path},
        "redundant": {"redundant_groups": more},
    }
    found = {
        name: simulate(run(steps, 0.2, slots=(BATCH + more) * ATTEMPTS, **own))
        for name, own in options.items()
    }
    plain_s, tails_s, redundant_s = (sum(seconds) for seconds, _ in found.values())
    assert plain_s / tails_s == pytest.approx(gain, abs=0.01)
    assert plain_s / redundant_s == pytest.approx(redundant_gain, abs=0.01)
    trained = {
        name: sorted(seconds_in(group for step in taken for group in step))
        for name, (_, taken) in found.items()
    }
    assert trained["tails"] == trained["plain"] == sorted(seconds_begun(steps * BATCH))
    share = fmean(trained["redundant"]) / fmean(seconds_begun(steps * BATCH + more))
    assert share == pytest.approx(redundant_mean, abs=0.01)
    assert_deferred_once(path, steps)


def assert_deferred_once(path, steps):
    """At most; and each prompt was trained on once, and issued once more than it was deferred."""
    lines = list(read_ledger(path))
    assert not find_ledger_faults(iter(lines), max_staleness=0)
    issued, deferred, trained = (
        Counter(line["id"] for line in lines if line["event"] == event)
        for event in ("issued", "deferred", "trained")
    )
    assert set(trained) == {f"sim/{number}" for number in range(steps * BATCH)}
    assert set(trained.values()) == set(deferred.values()) == {1}
    assert issued == trained + deferred


@pytest.mark.medium
def test_no_more_groups_are_replaced_than_max_replaced_says(tmp_path, caplog):
    """Where none teaches anything a step takes what there is, after so many tries."""
    for tries in (1, 3):
        caplog.clear()
        path = tmp_path / f"{tries}.jsonl"
        simulate(run(5, 0.2, path=path, has_signal=lambda group: False, max_replaced=tries))
        events = Counter(line["event"] for line in read_ledger(path))
        assert events["trained"] == 5 * BATCH
        assert events["filtered"] == 5 * BATCH * tries
        (warning,) = (m for m in caplog.messages if "group_filter" in m)
        assert f"rollouts.max_replaced={tries} times" in warning


@pytest.mark.medium
def test_redundant_attempts_are_biased_to_what_is_short():
    """The first 4 of 8 take far less time than attempts do in the mean: whoever wants no bias sets
    max_staleness instead."""
    _, plain = simulate(run(30, 0.2))
    _, first = simulate(run(30, 0.2, redundant=ATTEMPTS))
    own, kept = (
        fmean(seconds_in(group for step in taken for group in step)) for taken in (plain, first)
    )
    assert own == pytest.approx(MEAN_S, rel=0.1)
    assert kept < 0.55 * own


class OneRow(FakeEnvironment):
    """The same task, by its id and its prompt, over and over."""

    def tasks(self, split, *, seed, start=0):
        yield from itertools.repeat(next(super().tasks(split, seed=seed)))


@pytest.mark.fault("D6")
def test_one_task_at_several_positions_is_several_groups(tmp_path):
    """They are told apart, drawn apart, and each is trained on once."""
    path = tmp_path / "ledger.jsonl"
    _, taken = simulate(run(6, 0.5, max_staleness=2, order="ready", path=path, environment=OneRow))
    groups = [group for step in taken for group in step]
    assert {group.task.id for group in groups} == {"echo/train/0"}
    assert {group.id for group in groups} == {f"sim/{position}" for position in range(6 * BATCH)}
    assert len(set(seconds_in(groups))) == len(groups) * ATTEMPTS, (
        "no attempt repeats another one's draw"
    )
    assert not find_ledger_faults(read_ledger(path), max_staleness=2)
    assert Counter(
        line["id"] for line in read_ledger(path) if line["event"] == "trained"
    ) == Counter(g.id for g in groups)
