"""How many groups are under way: the controller alone, and around the real scheduler in simulated
time."""

import math
from collections import deque
from dataclasses import replace
from statistics import fmean

import pytest
from experience.ledger_faults import find_ledger_faults
from experience.test_simulated import BATCH, run
from hypothesis import given, settings
from hypothesis import strategies as st
from support.clock import simulate

from ratchet.experience.async_rollouts.concurrency import ConcurrencyController
from ratchet.experience.rollout.metrics import measure_staleness
from ratchet.experience.seeds import derive_seed
from ratchet.experience.sources.prompt_ledger import read_ledger
from ratchet.testing.builders import make_trajectory


def test_by_hand():
    """Of 16 groups a step an eighth is 2: so many more where nothing of the target is used, one
    more where half is."""
    held = ConcurrencyController(groups_per_step=16, max_groups=48, staleness=2.0)
    assert held.groups == 16
    held.update(waited=True, staleness=0.0)
    assert held.level == 18.0
    held.update(waited=True, staleness=1.0)
    assert held.level == 19.0
    held.update(waited=False, staleness=1.0)
    assert held.level == 19.0, "who does not wait needs no more"
    held.update(waited=False, staleness=3.0)
    assert held.level == 18.0, "and gets fewer where the target is exceeded"
    held.update(waited=True, staleness=100.0)
    assert held.level == 16.0, "by 2 at most"
    held.update(waited=True, staleness=4.0)
    assert held.level == 16.0, "a step's groups are the fewest"


def test_the_target_that_is_nearer_decides():
    held = ConcurrencyController(groups_per_step=16, max_groups=48, staleness=2.0, mismatch=0.1)
    held.update(waited=True, staleness=1.0, mismatch=0.0)
    assert held.level == 17.0
    held.update(waited=True, staleness=0.0, mismatch=0.075)
    assert held.level == 17.5
    held.update(waited=True, staleness=0.0, mismatch=0.15)
    assert held.level == 16.5
    held.update(waited=False, staleness=0.0, mismatch=math.inf)
    assert held.level == 16.0


@pytest.mark.parametrize("mismatch", [None, math.nan])
def test_a_step_that_was_not_measured_changes_nothing(mismatch):
    held = ConcurrencyController(groups_per_step=16, max_groups=48, mismatch=0.1)
    held.update(waited=True, staleness=9.0, mismatch=mismatch)
    assert held.level == 16.0
    held.update(waited=True, staleness=9.0, mismatch=0.0)
    assert held.level == 18.0, "staleness has no target here"


@settings(max_examples=100, deadline=None)
@given(
    groups_per_step=st.integers(1, 32),
    ahead=st.integers(1, 8),
    target=st.floats(0.25, 3.0),
    power=st.sampled_from([1, 2]),
    share=st.floats(0.3, 1.0),
)
def test_it_holds_a_target_that_answers_late(groups_per_step, ahead, target, power, share):
    """What begins now is trained on when all that is before it has been. Mismatch grows with that,
    or with its square, by a factor that nobody knows."""
    held = ConcurrencyController(
        groups_per_step=groups_per_step, max_groups=groups_per_step * (ahead + 1), mismatch=target
    )
    levels = deque([held.groups] * 40, maxlen=40)
    measured = []
    for _ in range(400):
        began = levels[-1 - round(levels[-1] / groups_per_step)]
        measured.append((share * (began / groups_per_step - 1)) ** power)
        held.update(waited=True, staleness=0.0, mismatch=measured[-1])
        levels.append(held.groups)
        assert groups_per_step <= held.groups <= held.max_groups
    reachable = min(target, (share * ahead) ** power)
    grain = (share * (began / groups_per_step - 1 + 1 / groups_per_step)) ** power - measured[
        -1
    ]  # of one group
    assert abs(fmean(measured[-100:]) - reachable) < 0.1 * target + grain


# --- around the scheduler


class InParts:
    """A player whose attempts are two requests each, one after the other: their tokens may be of
    two versions."""

    def __init__(self, generator, sigma):
        self.generator = generator

    async def play(self, task, environment, sampling, *, attempt, prompt_cache=None):
        asked = [replace(sampling, seed=derive_seed(sampling.seed, part)) for part in range(2)]
        found = [await self.generator.generate([1], own) for own in asked]
        row = make_trajectory([1], [0, 0], attempt=attempt)
        row.versions[-2:] = [int(one.versions[0]) for one in found]
        return [row]


def played(update_s, max_staleness, path=None, steps=60, **options):
    """(seconds, mean staleness) of a step, but for those at the beginning and at the end."""
    course = run(
        steps,
        update_s,
        max_staleness=max_staleness,
        order="ready",
        slots=64,
        player=InParts,
        path=path,
        **options,
    )
    seconds, groups = simulate(course)
    behind = [
        measure_staleness(taken, step).get("staleness_mean", 0.0)
        for step, taken in enumerate(groups)
    ]
    middle = slice(20, steps - 8)
    return fmean(seconds[middle]), fmean(behind[middle])


FAST, SLOW = 0.5, 8.0  # seconds of an update; of an attempt 2 s in the mean


@pytest.mark.medium
@pytest.mark.parametrize(
    ("update_s", "max_staleness", "target", "seconds", "behind"),
    [
        (FAST, 1, None, 4.01, 0.73),
        (FAST, 4, 0.75, 2.87, 0.75),
        (FAST, 4, None, 1.73, 3.30),
        (SLOW, 4, 0.5, 11.04, 0.50),
        (SLOW, 4, 2.0, 8.00, 1.24),
        (SLOW, 4, None, 8.00, 3.99),
    ],
)
def test_what_a_step_takes_and_how_stale_it_is(
    update_s, max_staleness, target, seconds, behind, tmp_path
):
    """A fast learner always waits, and gets the target: less for the slowest attempts than under a
    tighter bound that leaves it as stale. A slow one waits for a target that is low; else it gets
    no more than it needs, and loses no time."""
    path = tmp_path / "ledger.jsonl"
    targets = None if target is None else {"staleness": target}
    found = played(update_s, max_staleness, targets=targets, path=path)
    assert found == (pytest.approx(seconds, rel=0.01), pytest.approx(behind, abs=0.01))
    assert not find_ledger_faults(read_ledger(path), max_staleness=max_staleness)


@pytest.mark.medium
def test_the_same_course_each_time_and_never_more_than_the_bound_allows():
    found = [
        simulate(run(30, 0.5, max_staleness=0.5, player=InParts, targets={"staleness": 0.4}))
        for _ in range(2)
    ]
    assert found[0][0] == found[1][0]
    groups = [group for taken in found[0][1] for group in taken]
    assert [group.id for group in groups] == [f"sim/{number}" for number in range(30 * BATCH)], (
        "the oldest first, each once"
    )
    late = [
        step - row.versions.max()
        for step, taken in enumerate(found[0][1])
        for group in taken
        for row in group.trajectories
    ]
    assert max(late) <= 1
