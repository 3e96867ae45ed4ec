"""Which task is next: by what is known of it, the same each time, and across an interruption."""

import asyncio
import random
from collections import Counter

import pytest

from ratchet.config.experience import CurriculumConfig
from ratchet.errors import DataError
from ratchet.experience.async_rollouts.prefetch import has_learning_signal
from ratchet.experience.sources.curriculum import Curriculum
from ratchet.experience.sources.rollouts import RolloutSource
from ratchet.experience.sources.tasks import TaskStream
from ratchet.testing.builders import make_trajectory
from ratchet.testing.fakes import FakeEnvironment
from ratchet.types import TEMPLATE_VARIABLES, Failed, Group, Message, Sampling, Task


class Levels(FakeEnvironment):
    """Ten tasks, over and over; the one that says 0 is the hardest."""

    def tasks(self, split, *, seed, start=0):
        for index in range(start, start + 10_000):
            digit = index % 10
            yield Task(
                f"t/{index}",
                (Message("user", str(digit)),),
                answer=digit,
                meta={"level": 9.5 - digit, "name": "x", "is_hard": True},
            )


def curriculum(seed=0, **keys):
    return Curriculum(Levels(), CurriculumConfig(**keys), tasks_per_step=4, seed=seed, examples=10)


def ended(task, *rewards):
    return Group(
        "g",
        task,
        tuple(
            make_trajectory([1], [2], reward=reward, attempt=i) for i, reward in enumerate(rewards)
        ),
    )


def play(stream, steps, learns=lambda digit, step: 0.0):
    """The digits that are drawn; attempts at each earn what `learns` says."""
    drawn = []
    for step in range(steps):
        taken = stream.take(4)
        drawn += [task.answer for _, task in taken]
        for _, task in taken:
            stream.observe(ended(task, learns(task.answer, step), 0.0))
    return drawn


def shares(stream, draws=4000):
    found = Counter(task.answer for _, task in stream.take(draws))
    return [found[digit] / draws for digit in range(10)]


def known(**keys):
    """Of which digit d succeeds d times of nine."""
    stream = curriculum(memory=0.0, explore=0.1, **keys)
    for task in stream._pool:
        stream.observe(ended(task, *[1.0] * task.answer, *[0.0] * (9 - task.answer)))
    return stream


@pytest.mark.medium
def test_tasks_come_as_often_as_their_success_rates_say():
    learnable = [d / 9 * (1 - d / 9) for d in range(10)]
    hard = [1 - d / 9 for d in range(10)]
    for prefer, worth in (("learnable", learnable), ("hard", hard)):
        expected = [0.1 / 10 + 0.9 * each / sum(worth) for each in worth]
        assert shares(known(prefer=prefer)) == pytest.approx(expected, abs=0.02)


def test_what_succeeds_half_of_the_time_comes_most():
    stream = curriculum()
    play(stream, 40, lambda digit, step: float(digit == 7))  # of two attempts one
    assert max(range(10), key=shares(stream).__getitem__) == 7
    assert stream.measure()["curriculum/tried_share"] == 1.0
    assert 0 < stream.measure()["curriculum/success_rate"] < 0.1


def test_nothing_to_prefer_is_drawn_evenly():
    stream = curriculum(memory=0.0)
    for task in stream._pool:
        stream.observe(ended(task, 1.0, 1.0))
    assert shares(stream) == pytest.approx([0.1] * 10, abs=0.02)


def test_failed_attempts_say_nothing_of_a_task():
    stream = curriculum(memory=0.0)
    (_, task), *_ = stream.take(1)
    stream.observe(Group("g", task, (make_trajectory([1], [2], outcome=Failed("timeout")),)))
    assert stream.measure() == {"curriculum/open_share": 1.0}


def test_levels_of_effort_are_tasks_with_rates_of_their_own():
    class Efforts(FakeEnvironment):
        def tasks(self, split, *, seed, start=0):
            for i in range(start, 1000):
                meta = {TEMPLATE_VARIABLES: {"reasoning_effort": ("low", "high")[i % 2]}}
                yield Task(f"t/{i}", (Message("user", "1"),), meta=meta)

    config = CurriculumConfig(memory=0.0)
    stream = Curriculum(Efforts(), config, tasks_per_step=4, seed=0, examples=2)
    for task, rewards in zip(stream._pool, ([1.0, 0.0], [0.0, 0.0]), strict=True):
        stream.observe(ended(task, *rewards))
    assert stream._rates_N.tolist() == [0.5, 0.0]
    pending = stream.take(4)
    assert stream.restore(stream.snapshot(pending)) == pending


def test_easy_tasks_come_first_and_all_in_the_end():
    stream = curriculum(prefer="even", difficulty="level", start_share=0.2, full_by_step=20)
    drawn = play(stream, 60)
    assert set(drawn[:4]) <= {9, 8}, "the easiest fifth"
    assert min(drawn[:40]) >= 4, "0.2 + 0.8 / 2 of the tasks"
    assert set(drawn[80:]) == set(range(10))
    assert stream.measure()["curriculum/open_share"] == 1.0


@pytest.mark.parametrize(
    ("key", "low", "high", "around"),
    [
        ("prefer", "learnable", "hard", {}),
        ("explore", 0.1, 1.0, {}),
        ("memory", 0.1, 0.9, {}),
        ("success", 0.5, 0.9, {}),
        ("difficulty", None, "level", {}),
        ("start_share", 0.1, 0.5, {"difficulty": "level"}),
        ("full_by_step", 5, 50, {"difficulty": "level"}),
    ],
)
def test_each_key_changes_what_is_drawn(key, low, high, around):
    learns = lambda digit, step: 0.6 if digit < 5 else float(digit < 8)  # noqa: E731
    a, b = (play(curriculum(**around, **{key: value}), 20, learns) for value in (low, high))
    assert a != b
    assert play(curriculum(**around, **{key: high}), 20, learns) == b


@pytest.mark.parametrize("name", ["name", "depth", "is_hard"])
def test_a_difficulty_that_is_no_number_is_refused(name):
    with pytest.raises(
        DataError,
        match=rf"difficulty={name} is not a number in the meta of task t/0 \(it has level, "
        r"name, is_hard\)",
    ):
        curriculum(difficulty=name)


def test_what_waits_keeps_its_tasks_whatever_was_learned_since():
    def source():
        stream = curriculum(memory=0.2)
        return RolloutSource(stream, "s", None, sampling=Sampling(), seed=0, group_size=2)  # pyright: ignore[reportArgumentType]

    async def run():
        first, second = source(), source()
        play(first.stream, 5, lambda digit, step: float(digit % 2))
        jobs = first.take(6, version=0)
        first.ack([name for name, _ in jobs[:2]], step=0)
        play(first.stream, 5, lambda digit, step: float(digit % 3))
        await second.restore(await first.snapshot())
        assert [second.claim(name)[1] for name, _ in jobs[2:]] == [task for _, task in jobs[2:]]
        assert play(second.stream, 5) == play(first.stream, 5)

    asyncio.run(run())


@pytest.mark.medium
@pytest.mark.parametrize(("prefer", "teach"), [(None, 0.3), ("learnable", 0.88), ("hard", 0.27)])
def test_more_groups_teach(prefer, teach):
    """Of ten tasks five never succeed, two always, three half of the time. The share of groups of 8
    whose rewards differ."""
    draw = random.Random(0)
    chances = [0.0] * 5 + [1.0] * 2 + [0.5] * 3
    stream = (
        TaskStream(Levels(), seed=0, examples=10) if prefer is None else curriculum(prefer=prefer)
    )
    groups = []
    for _, task in (taken for _ in range(200) for taken in stream.take(4)):
        rewards = [float(draw.random() < chances[task.answer]) for _ in range(8)]
        groups.append(ended(task, *rewards))
        stream.observe(groups[-1])
    assert sum(map(has_learning_signal, groups)) / len(groups) == pytest.approx(teach, abs=0.02)
