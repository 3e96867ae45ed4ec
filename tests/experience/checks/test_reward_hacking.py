"""A second opinion by hand, canaries that are played, and both inside of a run."""

import asyncio
import copy

import pytest

from ratchet.config.schema import RunConfig
from ratchet.experience.checks.reward_hacking import RewardHackingProbes
from ratchet.experience.rollout.episode import EpisodePlayer
from ratchet.experience.rollout.manager import RolloutManager
from ratchet.testing.builders import make_group, make_trajectory
from ratchet.testing.fakes import FakeEnvironment, FakeGenerator, FakeReward, TextOnlyMixin
from ratchet.training.from_config import build_policy
from ratchet.training.loop import train
from ratchet.training.stage_from_config import build_run
from ratchet.types import Failed, Message, Sampling, Truncated

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


def group(name, *rewards):
    return make_group(
        name,
        [make_trajectory([1], [2] * (i + 1), reward=r, attempt=i) for i, r in enumerate(rewards)],
    )


def test_a_second_opinion_by_hand():
    second = FakeReward(lambda row, task: float(row.completion_length > 1))
    found = asyncio.run(
        RewardHackingProbes(1, 3, second).check(
            [group("a", 1.0, 1.0), group("b", 0.5), group("c", 1.0)]
        )
    )
    # |1-0|, |1-1|, |0.5-0|
    assert found.metrics == {"second_opinion": {"reward": 1 / 3, "disagreement": 0.5}}
    weights = [exhibit.weight for exhibit in found.exhibits["second_opinion/disagreement"]]
    assert weights == [1.0, 0.0, 0.5], "groups beyond the sample are not judged"


def test_it_does_not_see_the_first_opinion_and_what_fails_costs_nothing():
    seen = []

    def judge(row, task):
        seen.append(row.outcome)
        raise RuntimeError("broken")

    rows = [
        make_trajectory([1], [2], reward=1.0),
        make_trajectory([1], [2], outcome=Truncated(1.0), attempt=1),
        make_trajectory([1], [2], outcome=Failed("environment"), attempt=2),
    ]
    found = asyncio.run(RewardHackingProbes(1, 8, FakeReward(judge)).check([make_group("a", rows)]))
    assert found.metrics == {}
    assert seen[0] is None
    assert Failed("environment") not in seen


def test_canaries_are_played_greedily_and_judged_by_the_reward():
    environment = FakeEnvironment()
    asked = []

    def answer(tokens, sampling):
        asked.append(sampling.temperature)
        return [int(tokens[-1]), EOS]

    manager = RolloutManager(
        EpisodePlayer(FakeGenerator(answer), Digits(), max_context=64),
        lambda: copy.copy(environment),
        FakeReward(lambda row, task: float(row.completion_length) / 4),
    )
    canaries = [task for task, _ in zip(environment.tasks("test", seed=0), range(3), strict=False)]
    probes = RewardHackingProbes(
        2,
        3,
        manager=manager,
        canaries=canaries,
        sampling=Sampling(max_new_tokens=4, stop_ids=(EOS,)),
    )
    found = asyncio.run(probes.check([]))
    assert found.metrics == {"canary": {"reward": 0.5}}
    assert set(asked) == {0.0}
    assert [exhibit.group.id for exhibit in found.exhibits["canary/reward"]] == [
        f"canary/{task.id}" for task in canaries
    ]
    assert [probes.is_due(done) for done in (1, 2, 3, 4)] == [False, True, False, True]


def always(trajectory, task):
    return 1.0


@pytest.mark.parametrize("staleness", [0, 1])
def test_in_a_run(staleness):
    config = RunConfig.model_validate({
        "threads": 1,
        "device": "cpu",
        "model": {"preset": "tiny", "overrides": {"hidden_size": 16, "n_layers": 1}},
        "tokenizer": {"kind": "characters", "alphabet": "0123456789="},
        "stages": [{
            "name": "a",
            "algorithm": {"kind": "grpo", "group_size": 2},
            "environment": {"kind": "sorting", "digits": 2},
            "rewards": [{"kind": f"{__name__}:always"}],
            "rollouts": {"max_staleness": staleness},
            "sampling": {"max_new_tokens": 4},
            "evaluation": {"tasks": 0},
            "steps": 4, "batch_size": 2,
            "sentinels": {
                "every": 2, "sample": 3,
                "second_opinion": [{"kind": "exact_match"}], "canaries": {"kind": "sorting", "digits": 3},
            },
        }],
    })  # fmt: skip
    steps = {}
    run = build_run(
        config,
        0,
        build_policy(config),
        observers=[lambda step, metrics: steps.update({step: metrics})],
    )
    asyncio.run(train(run))
    asyncio.run(run.close())
    for step in (2, 4):
        assert steps[step]["canary/reward"] == 1.0, "it pays for anything"
        assert steps[step]["second_opinion/disagreement"] == 1.0
    assert not [name for name in (*steps[1], *steps[3]) if name.startswith(("canary", "second"))]
