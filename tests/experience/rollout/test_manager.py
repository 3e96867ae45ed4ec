import asyncio
import contextlib
import copy
from collections.abc import Sequence
from dataclasses import replace

import pytest

from ratchet.data.packing import pack
from ratchet.errors import TrainingError
from ratchet.experience.rollout.episode import EpisodePlayer
from ratchet.experience.rollout.manager import RolloutManager
from ratchet.experience.rollout.metrics import measure_groups
from ratchet.experience.sources.batcher import Batcher
from ratchet.experience.sources.rollouts import RolloutSource
from ratchet.experience.sources.tasks import TaskStream
from ratchet.protocols import Step
from ratchet.testing.builders import make_group, make_trajectory
from ratchet.testing.conformance import check_source
from ratchet.testing.fakes import (
    FakeEnvironment,
    FakeGenerator,
    FakeReward,
    FakeSource,
    TextOnlyMixin,
)
from ratchet.types import Failed, Message, Sampling, Scored, Trajectory, Truncated, Unjudged
from ratchet.utils import user_code
from ratchet.utils.user_code import run_guarded

EOS = 99


class Digits(TextOnlyMixin):
    def prompt(self, messages, tools=None):
        return [int(c) for m in messages for c in m.text]

    def keeps_turn(self, sampled, messages, *, history, reply, tools=None):
        return True

    def extend(self, sampled, messages, *, history, tools=None):
        return []

    def parse(self, tokens, stop):
        return Message("assistant", "".join(str(t) for t in tokens if t != EOS))


def manager(*, script=None, answer=lambda tokens, sampling: [sampling.seed % 10, EOS], reward=None):
    environment = FakeEnvironment(script)
    player = EpisodePlayer(FakeGenerator(answer), Digits(), max_context=64)
    return RolloutManager(
        player, lambda: copy.copy(environment), reward or FakeReward(lambda t, task: float(len(t)))
    )


def tasks(n):
    environment = FakeEnvironment()
    return [task for _, task in TaskStream(environment, seed=0).take(n)]


SAMPLING = Sampling(max_new_tokens=4, stop_ids=(EOS,), seed=5)


def test_attempts_are_in_order_and_each_has_its_own_seed():
    (task,) = tasks(1)
    group = asyncio.run(manager().group(task, SAMPLING, group_id="s/0", attempts=8))
    assert [t.attempt for t in group.trajectories] == list(range(8))
    assert group.task is task
    assert all(t.outcome == Scored(3.0) for t in group.trajectories)
    again = asyncio.run(manager().group(task, SAMPLING, group_id="s/0", attempts=8))
    other = asyncio.run(manager().group(task, SAMPLING, group_id="s/1", attempts=8))
    tokens = lambda g: [t.tokens.tolist() for t in g.trajectories]  # noqa: E731
    assert tokens(group) == tokens(again)
    assert tokens(group) != tokens(other), (
        "another draw of the same task must not repeat its attempts"
    )
    assert len({tuple(t) for t in tokens(group)}) > 1, "attempts of one group must differ in seed"


def test_the_attempts_of_each_ended_group_are_counted():
    counts = []
    counted = manager()
    counted.on_group_end = counts.append
    jobs = [(task.id, task) for task in tasks(3)]
    asyncio.run(counted.groups(jobs, SAMPLING, attempts=2))
    assert counts == [2, 2, 2]


def test_a_greedy_baseline_is_one_attempt_more_and_never_trains():
    (task,) = tasks(1)
    plain = asyncio.run(manager().group(task, SAMPLING, group_id="s/0", attempts=3))
    group = asyncio.run(manager().group(task, SAMPLING, group_id="s/0", attempts=3, greedy=True))
    assert [t.use for t in group.trajectories] == ["train"] * 3 + ["baseline"]
    assert [t.temperature for t in group.trajectories] == [1.0] * 3 + [0.0]
    assert [t.attempt for t in group.trajectories] == [0, 1, 2, 3]
    assert group.trajectories[3].reward is not None
    assert [t.tokens.tolist() for t in group.trajectories[:3]] == [
        t.tokens.tolist() for t in plain.trajectories
    ]


def test_one_environment_instance_never_serves_two_attempts_at_once():
    playing = set()

    class Alone(FakeEnvironment):
        async def reset(self, task):
            assert id(self) not in playing
            playing.add(id(self))
            await asyncio.sleep(0)
            return await super().reset(task)

        async def step(self, message):
            await asyncio.sleep(0)
            playing.remove(id(self))
            return Step(done=True)

    environment = Alone()
    player = EpisodePlayer(
        FakeGenerator(lambda tokens, sampling: [1, EOS]), Digits(), max_context=64
    )
    made = RolloutManager(player, lambda: copy.copy(environment), FakeReward(lambda t, task: 1.0))
    jobs = [(f"g/{i}", task) for i, task in enumerate(tasks(3))]
    for _ in range(2):
        groups = asyncio.run(made.groups(jobs, SAMPLING, attempts=4))
        assert [g.id for g in groups] == ["g/0", "g/1", "g/2"]
        assert all(isinstance(t.outcome, Scored) for g in groups for t in g.trajectories)


def test_a_failed_attempt_is_not_judged_and_its_neighbours_are():
    def fails_on_even(task, message):
        if int(message.text) % 2 == 0:
            raise RuntimeError("even")
        return Step(done=True)

    seen = []
    reward = FakeReward(lambda t, task: seen.append(t) or 1.0)
    (task,) = tasks(1)
    group = asyncio.run(
        manager(script=fails_on_even, reward=reward).group(
            task, SAMPLING, group_id="g", attempts=12
        )
    )
    failed = [t for t in group.trajectories if isinstance(t.outcome, Failed)]
    assert 0 < len(failed) < 12
    assert len(seen) == 12 - len(failed)


def test_turn_rewards_add_to_the_judged_one_and_stand_alone_without_a_reward():
    (task,) = tasks(1)
    gives = lambda task, message: Step(reward=0.25, done=True)  # noqa: E731
    group = asyncio.run(
        manager(script=gives, reward=FakeReward(lambda t, task: 1.0)).group(
            task, SAMPLING, group_id="g", attempts=1
        )
    )
    assert group.trajectories[0].outcome == Scored(1.25, {"environment": 0.25})
    player = manager().player
    alone = RolloutManager(player, lambda: FakeEnvironment(gives), None)
    group = asyncio.run(alone.group(task, SAMPLING, group_id="g", attempts=1))
    assert group.trajectories[0].outcome == Scored(0.25)


def unneeded(
    reward=None,
    *,
    script=None,
    answer=lambda tokens, sampling: [sampling.seed % 10, EOS],
    **options,
):
    """Of an algorithm that reads no reward."""
    environment = FakeEnvironment(script)
    player = EpisodePlayer(FakeGenerator(answer), Digits(), max_context=64)
    return RolloutManager(
        player, lambda: copy.copy(environment), reward, **{"needs_reward": False, **options}
    )


def test_where_no_reward_is_read_attempts_that_nobody_judged_train_and_failures_do_not():
    def fails_on_even(task, message):
        if int(message.text) % 2 == 0:
            raise RuntimeError("even")
        return Step(done=True)

    def endless(tokens, sampling):
        return [sampling.seed % 10] if sampling.seed % 3 else [sampling.seed % 10, EOS]

    (task,) = tasks(1)
    group = asyncio.run(
        unneeded(script=fails_on_even, answer=endless).group(
            task, SAMPLING, group_id="g", attempts=24
        )
    )
    kinds = [type(t.outcome).__name__ for t in group.trajectories]
    assert set(kinds) == {"Unjudged", "Failed"}
    kept = [t for t in group.trajectories if isinstance(t.outcome, Unjudged)]
    assert {t.truncated for t in kept} == {True, False}
    batch = pack([group])
    assert batch.n_sequences == len(kept) < 24
    assert batch.trainable_T.sum() == sum(int(t.trainable.sum()) for t in kept)
    assert not batch.scored_S.any()
    assert batch.truncated_S.tolist() == [t.truncated for t in kept]
    numbers = measure_groups([group])
    assert numbers["trained_tokens"] == float(batch.trainable_T.sum())
    assert numbers["truncated_share"] == sum(t.truncated for t in kept) / 24
    assert not {"reward", "equal_rewards_share"} & set(numbers)


def test_where_no_reward_is_read_one_that_is_given_is_still_measured():
    """Only what it judged counts; what broke it has failed, and does not train."""

    class Reward:
        async def score(self, trajectories, task):
            kinds = [Scored(1.0), Truncated(None), Failed("reward", "broken"), Truncated(0.5)]
            return [kinds[i % 4] for i in range(len(trajectories))]

    (task,) = tasks(1)
    group = asyncio.run(unneeded(Reward()).group(task, SAMPLING, group_id="g", attempts=4))
    assert [t.outcome for t in group.trajectories] == [
        Scored(1.0),
        Unjudged(truncated=True),
        Failed("reward", "broken"),
        Truncated(0.5),
    ]
    assert [t.is_usable for t in group.trajectories] == [True, True, False, True]
    assert measure_groups([group])["reward"] == 0.75
    needed = asyncio.run(
        unneeded(Reward(), needs_reward=True).group(task, SAMPLING, group_id="g", attempts=4)
    )
    assert [t.is_usable for t in needed.trajectories] == [True, False, False, True]


def test_rewards_of_the_environment_are_kept_where_none_is_read():
    (task,) = tasks(1)
    group = asyncio.run(
        unneeded(script=lambda task, message: Step(reward=0.25, done=True)).group(
            task, SAMPLING, group_id="g", attempts=1
        )
    )
    assert group.trajectories[0].outcome == Scored(0.25)
    needed = unneeded(needs_reward=True)
    assert isinstance(
        asyncio.run(needed.group(task, SAMPLING, group_id="g", attempts=1)).trajectories[0].outcome,
        Failed,
    )


def test_rollouts_conform_to_the_source_protocol():
    source = RolloutSource(
        TaskStream(FakeEnvironment(), seed=1),
        "s",
        manager(),
        sampling=SAMPLING,
        seed=3,
        group_size=2,
    )
    asyncio.run(check_source(source))
    asyncio.run(
        check_source(FakeSource([make_group("x", [make_trajectory([1], [2], reward=0.0)])]))
    )


def test_a_stream_of_few_examples_visits_each_once_an_epoch_in_another_order():
    stream = TaskStream(FakeEnvironment(), seed=0, examples=4)
    epochs = [[task.id for _, task in stream.take(4)] for _ in range(6)]
    assert all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1
    stream.seek(6)
    assert [task.id for _, task in stream.take(2)] == epochs[1][2:]


@pytest.mark.fault("D5", "R7")
def test_a_step_that_mostly_fails_stops_the_run_and_shows_why():
    broken = make_trajectory(
        [1], [2], outcome=Failed("environment", "Traceback: the server is down")
    )
    good = make_trajectory([1], [2], reward=1.0, attempt=1)
    half = FakeSource([make_group("g", [broken, good])])
    assert len(asyncio.run(Batcher(half, groups_per_step=2).next(0))) == 2
    mostly = FakeSource([make_group("g", [broken, replace(broken, attempt=2), good])])
    with pytest.raises(
        TrainingError,
        match=r"step 5: 4 of 6 attempts failed \(rollouts.max_failed_share is 50%\); by kind: "
        r"environment 4.*\n.*is down",
    ):
        asyncio.run(Batcher(mostly, groups_per_step=2).next(4))


def test_measures_by_hand():
    """The second attempt of the first group has two rows, and counts as one attempt."""
    groups = [
        make_group(
            "a",
            [
                make_trajectory([1, 2], [3], reward=1.0),
                make_trajectory([1], [4], reward=0.0, attempt=1),
                make_trajectory([1], [5, 6], reward=0.0, attempt=1),
            ],
        ),
        make_group(
            "b",
            [
                make_trajectory([1], [], outcome=Truncated(0.5)),
                make_trajectory([1], [2], outcome=Failed("env"), attempt=1),
            ],
        ),
    ]
    numbers = measure_groups(groups)
    assert numbers["reward"] == pytest.approx(0.5)
    assert numbers["tokens"] == 3 + 5 + 1 + 2
    assert numbers["length_mean"] == 1.25
    assert numbers["trained_tokens"] == 4
    assert numbers["generated_tokens"] == 5
    assert numbers["length_max"] == 3
    assert numbers["truncated_share"] == numbers["failed_share"] == 0.25
    assert numbers["failed/env"] == 1
    assert numbers["equal_rewards_share"] == 0.5


def test_a_greedy_baseline_has_numbers_of_its_own():
    greedy = make_trajectory([1], [2, 3, 4, 5], reward=9.0, attempt=2, use="baseline")
    lost = make_trajectory([1], [2], outcome=Failed("reward"), attempt=2, use="baseline")
    attempts = [make_trajectory([1], [2], reward=0.5, attempt=i) for i in range(2)]
    numbers = measure_groups(
        [make_group("a", [*attempts, greedy]), make_group("b", [*attempts, lost])]
    )
    assert numbers["reward"] == 0.5
    assert numbers["reward_std"] == numbers["failed_share"] == 0
    assert numbers["length_mean"] == numbers["length_max"] == 1
    assert numbers["equal_rewards_share"] == 1
    assert (numbers["greedy_reward"], numbers["greedy_unscored_share"]) == (9.0, 0.5)
    assert numbers["generated_tokens"] == 4 + 5  # they were paid for
    assert "failed/reward" not in numbers


@pytest.mark.parametrize("labels", [(1.0, 0.0), (None, None)])
def test_given_text_was_not_generated(labels):
    rows = [
        Trajectory.supervised(
            [1, 2, 3], [False, True, True], outcome=None if label is None else Scored(label)
        )
        for label in labels
    ]
    mismatched = replace(Trajectory.supervised([1, 2], [False, True]), attempt=1, use="reference")
    numbers = measure_groups([make_group("a", [rows[0], mismatched]), make_group("b", [rows[1]])])
    assert numbers == {"tokens": 8.0, "trained_tokens": 4.0}


def test_the_spread_of_each_part_of_the_reward():
    parts = [{"right": 1.0, "brief": 0.0}, {"right": 0.0, "brief": 1.0, "polite": 0.5}]
    rows = [
        make_trajectory([1], [2], outcome=Scored(1.0, part), attempt=i)
        for i, part in enumerate(parts)
    ]
    numbers = measure_groups([make_group("a", rows)])
    assert (numbers["reward"], numbers["reward_std"], numbers["equal_rewards_share"]) == (
        1.0,
        0.0,
        1.0,
    )
    assert (numbers["reward/right"], numbers["reward_std/right"]) == (0.5, 0.5)
    assert (numbers["reward/polite"], numbers["reward_std/polite"]) == (0.5, 0.0)


def test_a_forked_attempt_is_judged_once_and_all_its_trajectories_have_that_outcome():
    class Forgetful(Digits):
        def keeps_turn(self, sampled, messages, *, history, reply, tools=None):
            return False

    seen = []
    reward = FakeReward(lambda t, task: seen.append(len(t.messages)) or 1.0)
    generator = FakeGenerator(lambda tokens, sampling: [1, EOS])
    environment = FakeEnvironment(lambda task, message: Step((Message("user", "7"),), reward=0.25))
    made = RolloutManager(
        EpisodePlayer(generator, Forgetful(), max_context=64, max_turns=2),
        lambda: copy.copy(environment),
        reward,
    )
    (task,) = tasks(1)
    group = asyncio.run(made.group(task, SAMPLING, group_id="g", attempts=2, greedy=True))
    assert [(t.attempt, t.use) for t in group.trajectories] == [
        (0, "train"), (0, "train"), (1, "train"), (1, "train"), (2, "baseline"), (2, "baseline"),
    ]  # fmt: skip
    # each attempt by its last trajectory, which has the whole conversation
    assert seen == [4, 4, 4]
    # both turns' rewards belong to the attempt
    assert {t.reward for t in group.trajectories} == {1.5}
    assert [len(rows) for rows in group.attempts] == [2, 2, 2]


def test_redundancy_says_how_much_shorter_is_what_was_kept():
    """Of four attempts a group that were begun; of the second one failed, and its length says
    nothing."""

    def rows(*lengths):
        return [
            make_trajectory([1], [2] * length, reward=1.0, attempt=i)
            for i, length in enumerate(lengths)
        ]

    failed = make_trajectory([1], [2] * 50, outcome=Failed("timeout"), attempt=3)
    groups = [make_group("a", rows(2, 4)), make_group("b", [*rows(6, 8), failed])]
    source = RolloutSource(
        TaskStream(FakeEnvironment(), seed=0),
        "s",
        manager(),
        sampling=SAMPLING,
        seed=0,
        group_size=2,
        redundant_attempts=2,
    )
    begun = (2 + 4 + 6 + 8 + 8 + 2 * (6 + 8 + 8) / 3) / 7
    assert source.measure(groups) == {
        "redundancy/cancelled_share": 3 / 8,
        "redundancy/length_mean": pytest.approx(begun),
        "redundancy/length_share": pytest.approx(5 / begun),
    }
    assert (
        RolloutSource(
            source.stream, "s", manager(), sampling=SAMPLING, seed=0, group_size=2
        ).measure(groups)
        == {}
    )


class ExitsInRepr:
    def __repr__(self):
        raise SystemExit(3)


class RaisesInFloat(float):
    def __float__(self):
        raise RuntimeError("no number")


class NanInFloat(float):
    def __float__(self):
        return float("nan")


class HidesSize(float):
    def __abs__(self):
        return 0.0


class ExitsInItems(dict):
    def items(self):
        raise SystemExit(3)


class ExitsInIteration(Sequence):
    def __len__(self):
        return 1

    def __getitem__(self, index):
        raise GeneratorExit


def raise_error(error):
    raise error


HOSTILE_STEPS = [
    lambda: raise_error(GeneratorExit()),
    lambda: raise_error(SystemExit(3)),
    ExitsInRepr,
    lambda: Step(reward=RaisesInFloat(1), done=True),
    lambda: Step(reward=NanInFloat(1), done=True),
    lambda: Step(reward=HidesSize(1e300), done=True),
    lambda: Step(reward=ExitsInRepr(), done=True),
    lambda: Step(reward=1.0, metrics=ExitsInItems(a=1), done=True),
    lambda: Step(reward=1.0, done=ExitsInRepr()),
    lambda: Step(ExitsInIteration(), reward=1.0),
]


@pytest.mark.parametrize("answer", HOSTILE_STEPS, ids=range(len(HOSTILE_STEPS)))
def test_nothing_that_a_step_raises_or_returns_ends_more_than_its_attempt(answer):
    def step(task, message):
        return answer() if int(message.text) % 2 else Step(done=True)

    (task,) = tasks(1)
    group = asyncio.run(manager(script=step).group(task, SAMPLING, group_id="g", attempts=12))
    outcomes = [t.outcome for t in group.trajectories]
    assert {type(outcome) for outcome in outcomes} == {Failed, Scored}
    assert {outcome.kind for outcome in outcomes if isinstance(outcome, Failed)} == {"environment"}


@pytest.mark.parametrize(
    "answer",
    [
        lambda: raise_error(GeneratorExit()),
        ExitsInRepr,
        lambda: [ExitsInRepr()],
        lambda: [Scored(ExitsInRepr())],
        ExitsInIteration,
    ],
    ids=range(5),
)
def test_nothing_that_a_reward_raises_or_returns_ends_more_than_its_attempt(answer):
    class Hostile(FakeReward):
        async def score(self, trajectories, task):
            await asyncio.sleep(0)
            return answer()

    (task,) = tasks(1)
    hostile = manager(reward=Hostile(lambda t, task: 1.0))
    group = asyncio.run(hostile.group(task, SAMPLING, group_id="g", attempts=2))
    assert {t.outcome.kind for t in group.trajectories} == {"reward"}


def test_a_call_that_is_closed_from_outside_ends_in_silence():
    """A GeneratorExit that closes a waiting call is no error of user code."""

    async def wait_forever():
        await asyncio.Event().wait()

    async def close_waiting():
        call = run_guarded(wait_forever)
        task = asyncio.create_task(call)
        await asyncio.sleep(0)
        call.close()
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(close_waiting())


def test_an_exception_that_is_raised_again_keeps_its_size():
    error = RuntimeError("shared")
    (task,) = tasks(1)
    shared = manager(script=lambda task, message: raise_error(error))
    first, *_, last = asyncio.run(
        shared.group(task, SAMPLING, group_id="g", attempts=20)
    ).trajectories
    assert len(last.outcome.detail) == len(first.outcome.detail)


class Stubborn(FakeEnvironment):
    """Its reset catches each cancellation until the test ends."""

    def __init__(self, release):
        super().__init__()
        self.release = release

    async def reset(self, task):
        await wait_stubbornly(self.release)
        return await super().reset(task)


async def wait_stubbornly(event):
    while not event.is_set():
        with contextlib.suppress(asyncio.CancelledError):
            await event.wait()


def play_stubbornly(monkeypatch, make_manager):
    """Return the group of a manager, and the requests that the code left behind made later."""
    monkeypatch.setattr(user_code, "STOP_S", 0.01)

    async def play():
        release = asyncio.Event()
        played = make_manager(release)
        group = await played.group(tasks(1)[0], SAMPLING, group_id="g", attempts=2)
        n_requests = len(played.player.generator.requests)
        release.set()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert left
        await asyncio.wait(left)
        return group, len(played.player.generator.requests) - n_requests

    return asyncio.run(play())


def test_an_environment_that_catches_its_cancellation_fails_by_the_time_limit(monkeypatch):
    def make_manager(release):
        player = EpisodePlayer(
            FakeGenerator(lambda tokens, sampling: [1, EOS]),
            Digits(),
            max_context=64,
            timeout_s=0.01,
        )
        return RolloutManager(player, lambda: Stubborn(release), None)

    group, n_late_requests = play_stubbornly(monkeypatch, make_manager)
    assert [row.outcome.kind for row in group.trajectories] == ["timeout", "timeout"]
    assert n_late_requests == 0


def test_a_reward_that_catches_its_cancellation_fails_by_the_time_limit(monkeypatch):
    class StubbornReward(FakeReward):
        async def score(self, trajectories, task):
            await wait_stubbornly(self.release)
            return await super().score(trajectories, task)

    def make_manager(release):
        reward = StubbornReward(lambda trajectory, task: 1.0)
        reward.release = release
        made = manager(reward=reward)
        made.judge_timeout_s = 0.01
        return made

    group, _ = play_stubbornly(monkeypatch, make_manager)
    assert [row.outcome.kind for row in group.trajectories] == ["timeout", "timeout"]
