"""A worker process of an environment or of a reward that is killed costs its own attempt, and no
baseline sees it."""

import asyncio
import copy
import os
import signal

import pytest
from experience.test_boundaries import EOS, SAMPLING, Digits

from ratchet.algorithms.base import AlgoState
from ratchet.algorithms.config.named_policy_gradients import GRPOConfig
from ratchet.algorithms.policy_gradient import build_policy_gradient
from ratchet.data.packing import pack
from ratchet.errors import TrainingError
from ratchet.experience.rollout.episode import EpisodePlayer
from ratchet.experience.rollout.manager import RolloutManager
from ratchet.experience.sources.batcher import Batcher
from ratchet.protocols import Step
from ratchet.testing.fakes import FakeEnvironment, FakeGenerator, FakeSource
from ratchet.types import Failed, Message, Scored, Task


async def asked(deaths):
    """What a `cat` in a process of its own says to "1"; the first `deaths` of these are killed
    before they can."""
    process = await asyncio.create_subprocess_exec(
        "cat", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    deaths[0] -= 1
    if deaths[0] >= 0:
        os.kill(process.pid, signal.SIGKILL)
        await process.wait()
    said, _ = await process.communicate(b"1" if deaths[0] < 0 else None)
    if not said:
        raise ConnectionError(f"the worker died with status {process.returncode}")
    return float(said)


class Worker(FakeEnvironment):
    def __init__(self, deaths):
        super().__init__()
        self.deaths = [deaths]  # copies share it

    async def step(self, message):
        return Step(reward=await asked(self.deaths), done=True)


class Grader:
    compares_attempts = False

    def __init__(self, deaths):
        self.deaths = [deaths]

    async def score(self, trajectories, task):
        return [Scored(await asked(self.deaths)) for _ in trajectories]


def group(environment, reward, *, retries, attempts=4):
    script = lambda tokens, sampling: [1, EOS]  # noqa: E731
    player = EpisodePlayer(FakeGenerator(script), Digits(), max_context=64)
    manager = RolloutManager(player, lambda: copy.copy(environment), reward, retries=retries)
    task = Task("t", (Message("user", "12"),))
    return asyncio.run(manager.group(task, SAMPLING, group_id="g", attempts=attempts))


def made(where, deaths):
    return (Worker(deaths), None) if where == "environment" else (FakeEnvironment(), Grader(deaths))


@pytest.mark.parametrize("where", ["environment", "reward"])
@pytest.mark.fault("P2", "P3")
def test_a_killed_worker_costs_its_attempt_which_no_statistic_sees(where):
    found = group(*made(where, 1), retries=0)
    failed = [row for row in found.trajectories if isinstance(row.outcome, Failed)]
    assert [row.outcome.kind for row in failed] == [where]
    assert "Traceback" in failed[0].outcome.detail
    assert "ConnectionError: the worker died with status -9" in failed[0].outcome.detail
    assert [row.reward for row in found.trajectories if row.is_usable] == [1.0] * 3
    batch = pack([found])
    assert (batch.n_sequences, batch.rewards_S.tolist()) == (3, [1.0] * 3), (
        "it neither trains nor is in the baseline"
    )
    weighed = build_policy_gradient(GRPOConfig(group_size=4)).advantage(batch, AlgoState())
    assert weighed.token_columns["advantages"].abs().max() == 0, (
        "three equal rewards: a 0 of the dead one would show"
    )


@pytest.mark.parametrize("where", ["environment", "reward"])
@pytest.mark.fault("P2", "P3", "P16")
def test_it_is_tried_again_within_bounds(where):
    assert [row.outcome for row in group(*made(where, 2), retries=2, attempts=1).trajectories] == [
        Scored(1.0)
    ]
    (row,) = group(*made(where, 3), retries=2, attempts=1).trajectories
    assert isinstance(row.outcome, Failed)


def test_the_run_stops_where_too_many_die_and_shows_why():
    most = group(*made("environment", 3), retries=0)
    with pytest.raises(
        TrainingError,
        match=r"(?s)3 of 4 attempts failed.*max_failed_share is 50%.*died with status -9",
    ):
        asyncio.run(Batcher(FakeSource([most]), groups_per_step=1).next(0))
