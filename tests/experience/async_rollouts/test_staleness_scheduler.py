"""The scheduler alone, against groups that take any time."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ratchet.experience.async_rollouts.staleness_scheduler import StalenessScheduler
from ratchet.types import Group, Task

TASK = Task("t", ())


def play(scheduler, durations, steps):
    """Trains `steps` steps; group i is ready durations[i] events after it began. Gives what each
    step took."""
    clock, ends, taken = 0, {}, []
    for step in range(steps):
        for _ in range(scheduler.count_startable(step)):
            issue = scheduler.begin(step, f"g/{scheduler.n_started}", TASK)
            ends[issue] = clock + durations[issue.number % len(durations)]
        while (chosen := scheduler.choose(step)) is None:
            clock += 1
            for issue in [one for one in ends if ends[one] <= clock]:
                scheduler.mark_ready(issue, Group(issue.id, TASK, ()))
                del ends[issue]
            assert clock < 10_000, "it waits for ever"
        clock += random.Random(step).randrange(5)
        taken.append(chosen)
    return taken


@settings(max_examples=300, deadline=None)
@given(
    groups_per_step=st.integers(1, 5),
    max_staleness=st.integers(0, 4) | st.sampled_from([0.25, 0.5, 0.7, 1.5]),
    order=st.sampled_from(["issued", "ready"]),
    durations=st.lists(st.integers(0, 60), min_size=1, max_size=30),
    steps=st.integers(1, 12),
)
def test_every_group_is_trained_on_once_and_in_time(
    groups_per_step, max_staleness, order, durations, steps
):
    scheduler = StalenessScheduler(
        groups_per_step=groups_per_step, max_staleness=max_staleness, end_step=steps, order=order
    )
    taken = play(scheduler, durations, steps)
    assert all(len(chosen) == groups_per_step for chosen in taken)
    numbers = [issue.number for chosen in taken for issue in chosen]
    assert sorted(numbers) == list(range(groups_per_step * steps)), (
        "each once, and none is begun for nothing"
    )
    staleness = [step - issue.version for step, chosen in enumerate(taken) for issue in chosen]
    assert min(staleness) >= 0
    assert max(staleness) <= math.ceil(max_staleness)
    if order == "issued":
        assert numbers == sorted(numbers)
    assert not scheduler.unfinished
    assert not scheduler.ready_groups


def test_without_staleness_a_step_takes_what_it_began():
    for order in ("issued", "ready"):
        taken = play(
            StalenessScheduler(groups_per_step=3, max_staleness=0, end_step=4, order=order),
            [5, 0, 9],
            4,
        )
        assert [[issue.version for issue in chosen] for chosen in taken] == [
            [step] * 3 for step in range(4)
        ]


def test_the_ready_go_first_and_the_slow_are_waited_for_when_they_are_due():
    scheduler = StalenessScheduler(groups_per_step=2, max_staleness=2, end_step=10, order="ready")
    slow, *others = [
        scheduler.begin(0, f"g/{i}", TASK) for i in range(scheduler.count_startable(0))
    ]
    for issue in others:
        scheduler.mark_ready(issue, Group(issue.id, TASK, ()))
    assert scheduler.choose(0) == others[:2]
    assert scheduler.choose(1) == others[2:4]
    assert scheduler.choose(2) is None, "the slow one is due"
    scheduler.mark_ready(slow, Group(slow.id, TASK, ()))
    assert scheduler.choose(2) == [slow, others[4]]


@pytest.mark.parametrize("order", ["issued", "ready"])
def test_what_is_dropped_makes_room(order):
    scheduler = StalenessScheduler(groups_per_step=2, max_staleness=0, end_step=3, order=order)
    first, second = (scheduler.begin(0, f"g/{i}", TASK) for i in range(2))
    assert scheduler.count_startable(0) == 0
    scheduler.drop(first)
    assert scheduler.count_startable(0) == 1
    third = scheduler.begin(0, "g/2", TASK)
    for issue in (third, second):
        scheduler.mark_ready(issue, Group(issue.id, TASK, ()))
    assert scheduler.choose(0) == [second, third]
