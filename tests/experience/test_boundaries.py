"""What breaks costs what it should, and no more: an attempt for user code, the run for our own
machinery."""

import asyncio
import copy
import re

import anyio
import numpy as np
import pytest

from ratchet.algorithms.base import AlgoState
from ratchet.algorithms.config.named_policy_gradients import GRPOConfig
from ratchet.algorithms.policy_gradient import build_policy_gradient
from ratchet.data.packing import pack
from ratchet.errors import ConfigError, DataError, TrainingError
from ratchet.experience.rollout.environment_answers import guard_measure, guard_post_process
from ratchet.experience.rollout.episode import EpisodePlayer
from ratchet.experience.rollout.manager import RolloutManager
from ratchet.experience.rollout.metrics import measure_groups
from ratchet.experience.sources.offline import SupervisedSource, TextRenderer
from ratchet.experience.sources.rollouts import RolloutSource
from ratchet.experience.sources.tasks import TaskStream
from ratchet.protocols import Outputs, Step
from ratchet.testing.builders import make_group, make_trajectory
from ratchet.testing.fakes import FakeEnvironment, FakeGenerator, FakeReward, TextOnlyMixin
from ratchet.types import Failed, Message, Sampling, Scored, Task, Truncated
from ratchet.utils.user_code import run_guarded

EOS = 99
SAMPLING = Sampling(max_new_tokens=4, stop_ids=(EOS,), seed=5)


class Digits(TextOnlyMixin):
    def prompt(self, messages, tools=None):
        return [int(c) for m in messages for c in m.text]

    def parse(self, tokens, stop):
        return Message("assistant", "".join(str(t) for t in tokens if t != EOS))

    def supervised(self, messages, tools=None, *, train):
        return [1] * 12, [False] + [True] * 11


def play(environment, *, reward=None, answer=lambda tokens, sampling: [1, EOS], attempts=3):
    player = EpisodePlayer(FakeGenerator(answer), Digits(), max_context=64)
    manager = RolloutManager(
        player, lambda: copy.copy(environment), reward or FakeReward(lambda t, task: 1.0)
    )
    task = Task("t", (Message("user", "12"),))
    return asyncio.run(manager.group(task, SAMPLING, group_id="g", attempts=attempts)).trajectories


class Unshown:
    def __repr__(self):
        raise ValueError("repr")


@pytest.mark.parametrize(
    ("where", "returned", "said"),
    [
        (
            "reset",
            "text",
            "FakeEnvironment.reset returned 'text'. It must be a sequence of Messages",
        ),
        ("reset", None, "FakeEnvironment.reset returned None"),
        ("reset", [Message("user", None)], "Its content must be text or a sequence of Parts"),
        ("reset", [Message("user", 5)], "Its content must be text or a sequence of Parts"),
        ("step", 3, "FakeEnvironment.step returned 3. It must be a Step"),
        ("step", Unshown(), "returned a Unshown, whose __repr__ fails. It must be a Step"),
        ("step", Step(reward=Unshown(), done=True), "reward a Unshown, whose __repr__ fails"),
        ("step", Step(done=np.array([True, False])), "returned done=array([ True, False])"),
        ("step", Step(done="false"), "returned done='false'. It must be True or False"),
        ("step", Step(done=True, state_key=5), "the state_key 5. It must be text or None"),
        ("step", Step(done=True, state_key=["a"]), "the state_key ['a']. It must be text or None"),
        ("step", Step(done=True, metrics={1: 2.0}), "the metrics {1: 2.0}. They must be finite"),
        ("step", Step([Message("user", None)]), "Its content must be text or a sequence of Parts"),
        ("step", Step([Message("tool", "x", (), 5)]), "and its tool_call_id text or None"),
    ],
)
@pytest.mark.fault("R3")
def test_an_environment_that_returns_something_else_is_told_what_it_must_be(where, returned, said):
    async def answer(*arguments):
        return returned

    environment = FakeEnvironment()
    setattr(environment, where, answer)
    (trajectory,) = play(environment, attempts=1)
    assert isinstance(trajectory.outcome, Failed)
    assert said in trajectory.outcome.detail


@pytest.mark.parametrize("method", ["reset", "step"])
def test_an_environment_with_a_plain_method_is_told_to_make_it_async(method):
    environment = FakeEnvironment()
    setattr(environment, method, lambda *_: Step(done=True))
    (trajectory,) = play(environment, attempts=1)
    assert isinstance(trajectory.outcome, Failed)
    said = f"FakeEnvironment.{method} is not async. Write `async def {method}`"
    assert said in trajectory.outcome.detail


def test_numbers_of_a_step_are_pythons_and_the_counts_of_an_attempt_its_own():
    class Numpy(FakeEnvironment):
        async def step(self, message):
            metrics = {"turns": np.float32(7), "moves": np.int64(2)}
            return Step(reward=np.float32(0.5), done=np.bool_(True), metrics=metrics)

        async def reward_cut_attempt(self, messages):
            return np.float32(0.25)

    (row,) = play(Numpy(), attempts=1)
    (turn,) = row.turns
    assert [type(value) for value in (turn.reward, turn.terminated)] == [float, bool]
    assert {name: row.metrics[name] for name in ("turns", "environment_turns", "moves")} == {
        "turns": 1.0,
        "environment_turns": 7.0,
        "moves": 2.0,
    }
    (cut,) = play(Numpy(), answer=lambda tokens, sampling: [1] * 4, attempts=1)
    assert type(cut.turns[-1].reward) is float


@pytest.mark.parametrize(
    ("method", "returned", "said"),
    [
        ("measure", None, "Broken.measure must return a dict of numbers by name, but raised"),
        ("measure", {1: 2.0}, "Broken.measure returned {1: 2.0}"),
        ("measure", {"a": "x"}, "Broken.measure returned {'a': 'x'}"),
        ("post_process", None, "Broken.post_process must return a sequence of Groups, but raised"),
        ("post_process", [1], "Broken.post_process returned [1]"),
    ],
)
def test_what_an_environment_makes_of_a_step_is_checked(method, returned, said):
    class Broken(FakeEnvironment):
        pass

    setattr(Broken, method, lambda self, groups: returned)
    guard = {"measure": guard_measure, "post_process": guard_post_process}[method]
    with pytest.raises(TrainingError, match=re.escape(said)):
        guard(Broken())([])


def test_an_environment_that_can_not_even_close_costs_its_attempt_alone():
    class Hopeless(FakeEnvironment):
        async def step(self, message):
            raise ValueError("step")

        async def close(self):
            raise OSError("close")

    assert {t.outcome.kind for t in play(Hopeless())} == {"environment"}


@pytest.mark.fault("R9")
def test_what_an_environment_changes_in_its_task_reaches_neither_other_attempts_nor_the_reward():
    class Changes(FakeEnvironment):
        async def reset(self, task):
            task.meta["seen"] += 1
            task.answer.append(task.meta["seen"])
            return await super().reset(task)

    player = EpisodePlayer(
        FakeGenerator(lambda tokens, sampling: [1, EOS]), Digits(), max_context=64
    )
    reward = FakeReward(lambda trajectory, task: float(task.meta["seen"] + len(task.answer)))
    task = Task("t", (Message("user", "12"),), answer=[], meta={"seen": 0})
    group = asyncio.run(
        RolloutManager(player, Changes, reward).group(task, SAMPLING, group_id="g", attempts=3)
    )
    assert [row.reward for row in group.trajectories] == [0.0] * 3
    assert (task.answer, task.meta) == ([], {"seen": 0})


@pytest.mark.fault("R13")
def test_where_every_attempt_is_cut_off_there_is_no_nan_and_nothing_to_learn():
    rows = play(
        FakeEnvironment(),
        answer=lambda tokens, sampling: [1] * sampling.max_new_tokens,
        reward=Unable(),
    )
    group = make_group("g", rows)
    assert measure_groups([group])["truncated_share"] == 1.0
    batch = build_policy_gradient(GRPOConfig(group_size=3)).advantage(pack([group]), AlgoState())
    assert batch.token_columns["advantages"].abs().sum() == 0


class Unable:
    """Leaves what was cut off as it is, without a reward."""

    async def score(self, trajectories, task):
        return [Truncated() for _ in trajectories]


def test_a_reward_object_that_raises_fails_the_attempts_it_was_to_judge():
    class Broken:
        async def score(self, trajectories, task):
            raise RuntimeError("grader down")

    outcomes = [t.outcome for t in play(FakeEnvironment(), reward=Broken())]
    assert all(
        isinstance(o, Failed) and o.kind == "reward" and "grader down" in o.detail for o in outcomes
    )


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
    first, second = (
        TaskStream(FakeEnvironment(), seed=s, examples=3, pool_seed=7).take(3) for s in (1, 2)
    )
    assert {task.id for _, task in first} == {task.id for _, task in second}


def test_a_supervised_row_longer_than_the_context_is_refused_by_name():
    rows = SupervisedSource(
        TaskStream(FakeEnvironment(), seed=0),
        "sft",
        TextRenderer(Digits(), max_context=11),
        train="all",
    )
    with pytest.raises(DataError, match="task echo/train/0: 12 tokens, but the model holds 11"):
        asyncio.run(rows.draw(1, 0))


def test_a_step_that_lost_groups_keeps_its_count_of_optimizer_steps():
    algorithm = build_policy_gradient(GRPOConfig(group_size=2, minibatches=3, epochs=2))
    lone = pack(
        [make_group("g", [make_trajectory([1], [2], reward=float(i), attempt=i) for i in range(2)])]
    )
    minis = list(algorithm.split(algorithm.advantage(lone, AlgoState())))
    assert [mini.n_groups for mini in minis] == [0, 0, 1, 0, 0, 1]
    assert all(w.total == 0 for w in algorithm.weigh(minis[0], AlgoState()).weights.values())


def test_metrics_are_means_whatever_the_weighting():
    algorithm = build_policy_gradient(
        GRPOConfig(group_size=2, weighting="fixed_length", fixed_length=8)
    )
    batch = pack(
        [
            make_group(
                "g", [make_trajectory([1], [2, 3], reward=float(i), attempt=i) for i in range(2)]
            )
        ]
    )
    weighed = algorithm.weigh(algorithm.advantage(batch, AlgoState()), AlgoState())
    term, _ = algorithm.losses["policy"]
    live = weighed.trainable_T.double() * -1.0

    _, metrics = term(Outputs(weighed.sequence_sum, logprobs=live, old_logprobs=live), weighed)
    assert float(metrics["ratio"]) == pytest.approx(1.0)


# --- what breaks, hangs or returns nonsense costs its attempt, and is tried again within bounds


def manage(
    environment=None,
    reward=None,
    *,
    timeout_s=None,
    retries=0,
    answer=lambda tokens, sampling: [1, EOS],
):
    player = EpisodePlayer(FakeGenerator(answer), Digits(), max_context=64, timeout_s=timeout_s)
    environment = environment or FakeEnvironment()
    made = lambda: copy.copy(environment)  # noqa: E731
    return RolloutManager(
        player, made, reward or FakeReward(lambda t, task: 1.0), judge_timeout_s=timeout_s, retries=retries
    )  # fmt: skip


def outcomes(manager, attempts=3, **options):
    task = Task("t", (Message("user", "12"),))
    group = asyncio.run(manager.group(task, SAMPLING, group_id="g", attempts=attempts, **options))
    return [t.outcome for t in group.trajectories]


def test_user_code_may_cancel_a_group_of_tasks_of_anyio():
    async def cancel():
        async with anyio.create_task_group() as group:
            group.start_soon(anyio.sleep_forever)
            group.cancel_scope.cancel()
        return "done"

    assert asyncio.run(run_guarded(cancel)) == "done"


class Faulty(FakeEnvironment):
    """Breaks in `step` in its first attempts, then is well."""

    def __init__(self, breaks, times):
        super().__init__()
        self.breaks, self.left = breaks, [times]  # copies share it

    async def step(self, message):
        self.left[0] -= 1
        return await self.breaks() if self.left[0] >= 0 else Step(done=True)


async def exits():
    raise SystemExit(3)


async def exits_in_its_own_task():  # as libraries that score by asyncio.gather
    await asyncio.gather(exits(), asyncio.sleep(0))


async def cancels():
    raise asyncio.CancelledError


async def hangs():
    await asyncio.Event().wait()


async def not_a_number():
    return Step(reward=float("nan"), done=True)


async def silent():
    return Step()


async def too_large():  # two of them sum to infinity
    return Step(reward=1e308, done=True)


async def too_large_a_metric():
    return Step(done=True, metrics={"m": -1e308})


@pytest.mark.parametrize(
    "breaks",
    [
        exits,
        exits_in_its_own_task,
        cancels,
        hangs,
        not_a_number,
        silent,
        too_large,
        too_large_a_metric,
    ],
)
@pytest.mark.fault("R1", "R2", "R4")
def test_whatever_an_environment_does_costs_its_attempt_and_is_tried_again(breaks):
    timeout_s = 0.02 if breaks is hangs else None
    kinds = [
        getattr(o, "kind", "") for o in outcomes(manage(Faulty(breaks, 1), timeout_s=timeout_s))
    ]
    assert kinds == ["timeout" if breaks is hangs else "environment", "", ""]
    assert outcomes(manage(Faulty(breaks, 2), timeout_s=timeout_s, retries=2), 1) == [Scored(1.0)]
    assert isinstance(
        outcomes(manage(Faulty(breaks, 3), timeout_s=timeout_s, retries=2), 1)[0], Failed
    )


def test_an_attempt_tried_again_is_drawn_with_the_same_seed():
    seen = []
    answer = lambda tokens, sampling: seen.append(sampling.seed) or [1, EOS]  # noqa: E731
    outcomes(manage(Faulty(exits, 1), retries=1, answer=answer), 1)
    assert len(seen) == 2
    assert len(set(seen)) == 1


def test_a_timeout_names_what_was_waited_for():
    (outcome,) = outcomes(manage(Faulty(hangs, 1), timeout_s=0.02), 1)
    assert outcome.detail == "not over after 0.02 s and 1 turns, waiting for the environment"


def test_data_that_can_not_be_rendered_are_not_tried_again():
    class Refuses(Digits):
        def prompt(self, messages, tools=None):
            self.asked = getattr(self, "asked", 0) + 1
            raise DataError("no such role")

    manager = manage(retries=5)
    renderer = Refuses()
    manager.player = EpisodePlayer(
        FakeGenerator(lambda tokens, sampling: [1, EOS]), renderer, max_context=64
    )
    assert [o.kind for o in outcomes(manager, 1)] == ["data"]
    assert renderer.asked == 1


class Grader:
    """Breaks when it is asked the first `times`."""

    def __init__(self, breaks, times, *, compares_attempts):
        self.breaks, self.left, self.asked = breaks, times, []
        self.compares_attempts = compares_attempts

    async def score(self, trajectories, task):
        self.asked.append(len(trajectories))
        self.left -= 1
        return await self.breaks() if self.left >= 0 else [Scored(1.0) for _ in trajectories]


async def too_few():
    return []


async def no_outcome():
    return [1.0]


async def infinite():
    return [Scored(float("inf"))]


async def no_part():
    return [Scored(1.0, {"a": None})]


async def overflowing():  # the mean of two is infinite
    return [Scored(1e308)]


@pytest.mark.parametrize(
    "breaks",
    [exits, exits_in_its_own_task, hangs, too_few, no_outcome, infinite, no_part, overflowing],
)
@pytest.mark.fault("R4")
def test_whatever_a_reward_does_costs_the_attempt_it_was_asked_about(breaks):
    timeout_s = 0.02 if breaks is hangs else None
    grader = Grader(breaks, 1, compares_attempts=False)
    found = outcomes(manage(reward=grader, timeout_s=timeout_s))
    assert grader.asked == [1, 1, 1]
    assert sorted(type(o).__name__ for o in found) == ["Failed", "Scored", "Scored"]
    assert {o.kind for o in found if isinstance(o, Failed)} == {
        "timeout" if breaks is hangs else "reward"
    }
    assert (
        outcomes(
            manage(
                reward=Grader(breaks, 2, compares_attempts=False), timeout_s=timeout_s, retries=2
            )
        )
        == [Scored(1.0)] * 3
    )


def test_judging_a_group_again_leaves_what_was_judged():
    class Half:
        def __init__(self):
            self.asked = 0

        async def score(self, trajectories, task):
            self.asked += 1
            return [
                Scored(float(self.asked)) if i or self.asked > 1 else Failed("sandbox")
                for i in range(len(trajectories))
            ]

    reward = Half()
    assert outcomes(manage(reward=reward, retries=3)) == [Scored(2.0), Scored(1.0), Scored(1.0)]
    assert reward.asked == 2


def test_an_environment_that_hangs_while_it_closes_does_not_hold_up_the_run(monkeypatch, caplog):
    class Stuck(Faulty):
        async def close(self):
            await hangs()

    monkeypatch.setattr("ratchet.experience.rollout.environment_answers.CLOSE_TIMEOUT_S", 0.02)
    assert [type(o).__name__ for o in outcomes(manage(Stuck(exits, 1)), 2)] == ["Failed", "Scored"]
    assert "Stuck.close has not ended after 0.02 s" in caplog.text


# --- redundancy


def test_redundant_attempts_are_cancelled_once_enough_have_ended_well():
    closed = []

    class Slow(FakeEnvironment):
        async def step(self, message):
            if message.text == "0":
                raise ValueError("broken")
            if message.text in ("1", "2"):
                await hangs()
            for _ in range(20):  # the failed attempt ends first
                await asyncio.sleep(0)
            return Step(done=True)

        async def close(self):
            closed.append(self)

    turn = iter(range(6))
    manager = manage(Slow(), answer=lambda tokens, sampling: [next(turn), EOS])
    task = Task("t", (Message("user", "12"),))
    group = asyncio.run(manager.group(task, SAMPLING, group_id="g", attempts=3, redundant=3))
    assert [(t.attempt, type(t.outcome).__name__) for t in group.trajectories] == [
        (0, "Failed"), (3, "Scored"), (4, "Scored"), (5, "Scored"),
    ]  # fmt: skip
    assert len(closed) == 3  # of the failed one and of those that were cancelled


def test_redundant_groups_that_were_late_are_drawn_again():
    late = {"echo/train/1"}

    class Slow(FakeEnvironment):
        async def step(self, message):
            if self.task.id in late:
                await hangs()
            return Step(done=True)

    stream = TaskStream(Slow(), seed=0)
    source = RolloutSource(
        stream,
        "s",
        manage(Slow()),
        sampling=SAMPLING,
        seed=1,
        group_size=2,
        redundant_attempts=0,
        redundant_groups=1,
    )

    async def two_steps():
        first = [group.id for group in await source.draw(2, 0)]
        late.clear()
        return first, [group.id for group in await source.draw(2, 1)], await source.snapshot()

    first, second, state = asyncio.run(two_steps())
    assert first == ["s/0", "s/2"]
    assert second[0] == "s/1"
    assert sorted([*first, *second]) == ["s/0", "s/1", "s/2", "s/3"]
    assert state == {"position": 5, "pending": [0, 1, 2, 3, 4], "ledger": 0}
