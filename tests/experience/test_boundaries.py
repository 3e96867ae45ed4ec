"""What breaks costs what it should, and no more: an attempt for user code, the run for our own machinery."""

import asyncio
import copy

import pytest

from ratchet.algorithms.base import AlgoState
from ratchet.algorithms.config.policy_gradient import GRPOConfig
from ratchet.algorithms.policy_gradient import build
from ratchet.data.packing import pack
from ratchet.errors import ConfigError, DataError
from ratchet.experience.episode import Player
from ratchet.experience.given import Rows, Writer
from ratchet.experience.manager import RolloutManager
from ratchet.experience.measure import measure_groups
from ratchet.experience.tasks import TaskStream
from ratchet.interfaces import Outputs, Step
from ratchet.testing.builders import make_group, make_trajectory
from ratchet.testing.fakes import FakeEnvironment, FakeGenerator, FakeReward
from ratchet.types import Failed, Message, Sampling, Scored, Task

EOS = 99
SAMPLING = Sampling(max_new_tokens=4, stop_ids=(EOS,), seed=5)


class Digits:
    def prompt(self, messages, tools=None):
        return [int(c) for m in messages for c in m.text]

    def parse(self, tokens, stop):
        return Message("assistant", "".join(str(t) for t in tokens if t != EOS))

    def supervised(self, messages, tools=None, *, train):
        return [1] * 12, [False] + [True] * 11


def play(environment, *, reward=None, answer=lambda tokens, sampling: [1, EOS], attempts=3):
    player = Player(FakeGenerator(answer), Digits(), max_context=64)
    manager = RolloutManager(player, lambda: copy.copy(environment), reward or FakeReward(lambda t, task: 1.0))
    task = Task("t", (Message("user", "12"),))
    return asyncio.run(manager.group(task, SAMPLING, group_id="g", attempts=attempts)).trajectories


@pytest.mark.parametrize(
    ("where", "returned", "said"),
    [
        ("reset", "text", "FakeEnvironment.reset gave 'text', it must be a sequence of Messages"),
        ("reset", None, "FakeEnvironment.reset gave None"),
        ("step", 3, "FakeEnvironment.step returned 3, it must be a Step"),
    ],
)
def test_an_environment_that_returns_something_else_is_told_what_it_must_be(where, returned, said):
    async def answer(*arguments):
        return returned

    environment = FakeEnvironment()
    setattr(environment, where, answer)
    (trajectory,) = play(environment, attempts=1)
    assert isinstance(trajectory.outcome, Failed)
    assert said in trajectory.outcome.detail


def test_an_environment_that_can_not_even_close_costs_its_attempt_alone():
    class Hopeless(FakeEnvironment):
        async def step(self, message):
            raise ValueError("step")

        async def close(self):
            raise OSError("close")

    assert {t.outcome.kind for t in play(Hopeless())} == {"environment"}


def test_a_reward_object_that_raises_fails_the_attempts_it_was_to_judge():
    class Broken:
        async def score(self, trajectories, task):
            raise RuntimeError("grader down")

    outcomes = [t.outcome for t in play(FakeEnvironment(), reward=Broken())]
    assert all(isinstance(o, Failed) and o.kind == "reward" and "grader down" in o.detail for o in outcomes)


def test_a_fault_of_the_generator_is_no_attempts_and_ends_the_run():
    def out_of_memory(tokens, sampling):
        raise MemoryError("KV cache")

    def refused(tokens, sampling):
        raise ConfigError("top_p=-1")

    with pytest.raises(MemoryError):
        play(FakeEnvironment(), answer=out_of_memory)
    with pytest.raises(ConfigError):
        play(FakeEnvironment(), answer=refused)


def test_the_environments_part_is_a_mean_over_all_attempts():
    rewards = iter([1.0, 0.0, 0.0, 0.0])
    environment = FakeEnvironment(lambda task, message: Step(reward=next(rewards), done=True))
    trajectories = play(environment, attempts=4)
    assert all(isinstance(t.outcome, Scored) for t in trajectories)
    assert measure_groups([make_group("g", trajectories)])["reward/environment"] == 0.25


def test_examples_are_distinct_and_as_many_as_the_data_hold():
    pool = TaskStream(FakeEnvironment(), seed=0, examples=50).take(20)
    assert len({task.messages for _, task in pool[:5]}) == 5  # the fake has five prompts
    assert {task.messages for _, task in pool[:5]} == {task.messages for _, task in pool[5:10]}


def test_which_examples_a_limit_leaves_does_not_depend_on_the_order_they_come_in():
    first, second = (TaskStream(FakeEnvironment(), seed=s, examples=3, pool_seed=7).take(3) for s in (1, 2))
    assert {task.id for _, task in first} == {task.id for _, task in second}


def test_a_supervised_row_longer_than_the_context_is_refused_by_name():
    rows = Rows(TaskStream(FakeEnvironment(), seed=0), "sft", Writer(Digits(), max_context=11), train="all")
    with pytest.raises(DataError, match="task echo/train/0: 12 tokens, but the model holds 11"):
        asyncio.run(rows.draw(1, 0))


def test_a_step_that_lost_groups_keeps_its_count_of_optimizer_steps():
    algorithm = build(GRPOConfig(group_size=2, minibatches=3, epochs=2))
    lone = pack([make_group("g", [make_trajectory([1], [2], reward=float(i), attempt=i) for i in range(2)])])
    minis = list(algorithm.split(algorithm.advantage(lone, AlgoState())))
    assert [mini.n_groups for mini in minis] == [0, 0, 1, 0, 0, 1]
    assert all(w.total == 0 for w in algorithm.weigh(minis[0], AlgoState()).weights.values())


def test_metrics_are_means_whatever_the_weighting():
    algorithm = build(GRPOConfig(group_size=2, weighting="fixed_length", fixed_length=8))
    batch = pack([make_group("g", [make_trajectory([1], [2, 3], reward=float(i), attempt=i) for i in range(2)])])
    weighed = algorithm.weigh(algorithm.advantage(batch, AlgoState()), AlgoState())
    term, _ = algorithm.losses["policy"]
    live = weighed.trainable_T.double() * -1.0

    _, metrics = term(Outputs(weighed.sequence_sum, logprobs=live, old_logprobs=live), weighed)
    assert float(metrics["ratio"]) == pytest.approx(1.0)
