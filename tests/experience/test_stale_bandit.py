"""Where stale attempts mislead: a bandit whose good arm hides the best one, trained by the real
loop, scheduler and losses.

Three arms pay 1, 0.8 and 0; a softmax policy begins with 8 %, 52 % and 40 % on them. Against the
mean reward of 0.5 the second arm looks good, until the third is gone: then the mean is 0.8, and the
second arm's advantage nothing. That takes a few steps. REINFORCE on attempts that are k steps old
goes on for k more with what was true before: in the mean of its gradient, sum_a mu(a) A(a) grad log
pi(a) with the sampler's mu, the second arm's part is mu A = 0.52 x 0.30 = 0.16, the first's 0.08 x
0.50 = 0.04. At rate 6 the second logit gains 6 x 0.12 x 8 = 5.8 on the first within a lag of 8: the
best arm, 300 times rarer than it was, is not drawn any more, and nothing brings it back. Weights
pi(a) / mu(a) make the mean the gradient at the present weights again, whatever the lag: as in
synchronous training, the second arm rises only as long as that is right.
"""

import random

import numpy as np
import pytest
import torch
from support.clock import simulate

from ratchet.config.resolve import build, resolve
from ratchet.experience.async_rollouts.prefetch import PrefetchingSource
from ratchet.experience.async_rollouts.resumable_generator import ResumableGenerator
from ratchet.experience.async_rollouts.staleness_scheduler import StalenessScheduler
from ratchet.experience.rollout.manager import RolloutManager
from ratchet.experience.sources.batcher import Batcher
from ratchet.experience.sources.rollouts import RolloutSource
from ratchet.experience.sources.tasks import TaskStream
from ratchet.protocols import WeightSync
from ratchet.testing.builders import make_trajectory
from ratchet.testing.fakes import FakeEnvironment, FakeGenerator, FakeLearner
from ratchet.testing.simulated import SlowLearner
from ratchet.training.loop import train
from ratchet.training.run import StageRun
from ratchet.types import Completion, Sampling, StopReason

PAYS, BEGINS = (1.0, 0.8, 0.0), (0.08, 0.52, 0.4)
RATE, LAG, STEPS, BATCH, ATTEMPTS = 6.0, 8, 50, 4, 8


class Arms(FakeGenerator):
    """Draws an arm by the weights that were pushed last."""

    def __init__(self, logits):
        super().__init__(lambda tokens, sampling: [])
        self.logprobs = logits.log_softmax(-1).tolist()

    async def generate(self, tokens, sampling, media=()):
        (arm,) = random.Random(sampling.seed).choices(range(len(PAYS)), np.exp(self.logprobs))
        return Completion(
            tokens=np.asarray([arm]),
            logprobs=np.asarray([self.logprobs[arm]], dtype=np.float32),
            log_kept_mass=np.zeros(1, dtype=np.float32),
            versions=np.asarray([self.version], dtype=np.int32),
            stop=StopReason.LENGTH,
        )


class Pulls:
    """A player whose attempts are one arm each."""

    def __init__(self, generator):
        self.generator = generator

    async def play(self, task, environment, sampling, *, attempt, prompt_cache=None):
        found = await self.generator.generate([0], sampling)
        (arm,) = found.tokens.tolist()
        logprobs, version = found.logprobs.tolist(), int(found.versions[0])
        return [
            make_trajectory(
                [0], [arm], reward=PAYS[arm], logprobs=logprobs, attempt=attempt, version=version
            )
        ]


class Copies(WeightSync):
    """A link."""

    def __init__(self, learner, generator):
        self.learner, self.generator = learner, generator

    async def push(self, version):
        self.generator.logprobs = self.learner.logits.detach().log_softmax(-1).tolist()
        await self.generator.commit(version)


def trained(seed, *, max_staleness, correction):
    """(the policy's share of the best arm after training, staleness of each step's attempts)"""
    learner = FakeLearner(len(PAYS), lr=RATE)
    with torch.no_grad():
        learner.logits.copy_(torch.tensor(BEGINS).log())
    generator = Arms(learner.logits.detach())
    asked = ResumableGenerator(generator)
    manager = RolloutManager(Pulls(asked), FakeEnvironment, None)
    stream = TaskStream(FakeEnvironment(), seed=seed)
    source = RolloutSource(
        stream, "bandit", manager, sampling=Sampling(), seed=seed, group_size=ATTEMPTS
    )
    scheduler = StalenessScheduler(
        groups_per_step=BATCH, max_staleness=max_staleness, end_step=STEPS
    )
    ahead = PrefetchingSource(source, scheduler, asked, during_update="continue", replayable=True)
    section = {
        "kind": "policy_gradient",
        "group_size": ATTEMPTS,
        "advantage": {"kind": "group_relative", "scale": "none"},
        "loss": {"kind": "reinforce"},
        "correction": correction,
    }
    staleness = []
    run = StageRun(
        name="bandit",
        algorithm=build(resolve("algorithm", section)),
        # while it works, what has begun is drawn: in no time
        roles={"policy": SlowLearner(learner, 1.0)},
        batcher=Batcher(ahead, groups_per_step=BATCH),
        weight_sync=Copies(learner, generator),
        start_step=0,
        first_step=0,
        end_step=STEPS,
        observers=(
            lambda step, metrics: staleness.append(metrics.get("rollout/staleness_mean", 0.0)),
        ),
    )
    simulate(train(run))
    return float(learner.logits.detach().softmax(-1)[0]), staleness


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_stale_attempts_end_at_the_wrong_arm_and_corrected_ones_at_the_best(seed):
    synchronous, _ = trained(seed, max_staleness=0, correction=None)
    plain, staleness = trained(seed, max_staleness=LAG, correction=None)
    corrected, alike = trained(seed, max_staleness=LAG, correction={})
    assert staleness == alike
    assert staleness[LAG:] == [LAG] * (STEPS - LAG), "each attempt is as old as it may be"
    assert synchronous > 0.95
    assert corrected > 0.95
    assert plain < 0.01


@pytest.mark.medium
def test_it_is_the_lag_that_misleads():
    share, staleness = trained(0, max_staleness=1, correction=None)
    assert staleness[1:] == [1] * (STEPS - 1)
    assert share > 0.95
