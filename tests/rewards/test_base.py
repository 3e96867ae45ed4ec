import asyncio
import functools
import os
import sys

import numpy as np
import pytest

from ratchet.errors import ConfigError
from ratchet.rewards.answers.exact_match import ExactMatch, ExactMatchConfig
from ratchet.rewards.base import FunctionReward, answer_text, as_reward
from ratchet.testing import answered, check_reward, conversation
from ratchet.types import Cancelled, Failed, Message, Scored, Task, Truncated
from ratchet.utils.user_frames import describe_user_error

TASK = Task("t/0", (Message("user", "say hello"),), answer="hello")


def length(trajectory, task):
    return len(answer_text(trajectory))


async def async_length(trajectory, task):
    await asyncio.sleep(0)
    return len(answer_text(trajectory))


def two_parts(trajectory, task):
    return {"length": len(answer_text(trajectory)), "bonus": 0.5}


def judge(reward, *texts, outcome=None):
    return asyncio.run(
        as_reward(reward).score([answered(TASK, text, outcome) for text in texts], TASK)
    )


def test_a_number_is_scored_under_the_functions_name():
    assert judge(length, "four", "") == [Scored(4.0, {"length": 4.0}), Scored(0.0, {"length": 0.0})]
    assert judge(async_length, "four") == [Scored(4.0, {"async_length": 4.0})]


def test_named_parts_sum_to_the_reward():
    assert judge(two_parts, "four") == [Scored(4.5, {"length": 4.0, "bonus": 0.5})]


def test_a_function_that_changes_its_task_changes_it_for_no_other_attempt():
    task = Task("t", (Message("user", "?"),), answer=[1.0], meta={"tests": [2.0]})
    reward = FunctionReward(lambda row, task: task.answer.pop() + task.meta["tests"].pop(), "used")
    outcomes = asyncio.run(reward.score([answered(task, "a"), answered(task, "b")], task))
    assert [outcome.reward for outcome in outcomes] == [3.0, 3.0]
    assert (task.answer, task.meta) == ([1.0], {"tests": [2.0]})


def test_a_given_name_replaces_the_functions():
    assert judge(FunctionReward(length, "chars"), "four") == [Scored(4.0, {"chars": 4.0})]
    assert judge(functools.partial(length), "four") == [Scored(4.0, {"length": 4.0})]


def test_an_object_with_call_is_named_by_its_class():
    class Judge:
        def __call__(self, trajectory, task):
            return 1.0

    assert judge(Judge(), "x") == [Scored(1.0, {"Judge": 1.0})]


@pytest.mark.parametrize("value", [True, 1, 1.0, np.float32(1.0), np.int64(1)])
def test_every_kind_of_finite_number_is_accepted_and_becomes_a_float(value):
    (outcome,) = judge(FunctionReward(lambda trajectory, task: value, "n"), "x")
    assert outcome == Scored(1.0, {"n": 1.0})
    assert type(outcome.reward) is float
    assert type(outcome.parts["n"]) is float


@pytest.mark.parametrize(
    "value",
    [
        float("nan"),
        float("inf"),
        None,
        "1.0",
        [1.0],
        1j,
        {},
        {"a": float("-inf")},
        {"a": None},
        {"a": 1e308, "b": 1e308},
        10**400,
    ],
)
@pytest.mark.fault("R4")
def test_anything_else_fails_the_attempt_and_names_function_and_value(value):
    def odd(trajectory, task):
        return value

    (outcome,) = judge(odd, "x")
    assert isinstance(outcome, Failed)
    assert outcome.kind == "reward"
    assert "odd" in outcome.detail
    assert "task 't/0'" in outcome.detail
    assert value == 10**400 or repr(value) in outcome.detail


def test_parts_that_need_not_sum_to_the_reward():
    assert judge(lambda trajectory, task: Scored(1, {"tried": 3, "share": 0.5}), "x") == [
        Scored(1.0, {"tried": 3.0, "share": 0.5})
    ]
    for verdict in (Scored(float("nan")), Scored(1.0, {"share": float("inf")})):
        (outcome,) = judge(lambda trajectory, task, verdict=verdict: verdict, "x")
        assert isinstance(outcome, Failed)
        assert "must return a finite float" in outcome.detail


def test_an_exception_fails_its_trajectory_alone_with_the_traceback():
    def fragile(trajectory, task):
        return 1 / len(answer_text(trajectory))

    good, broken, also_good = judge(fragile, "x", "", "xy")
    assert good == Scored(1.0, {"fragile": 1.0})
    assert also_good == Scored(0.5, {"fragile": 0.5})
    assert isinstance(broken, Failed)
    assert "ZeroDivisionError" in broken.detail
    assert "1 / len(answer_text(trajectory))" in broken.detail


def test_cancellation_is_not_swallowed():
    async def slow(trajectory, task):
        await asyncio.sleep(60)

    async def judged():
        async with asyncio.timeout(0.01):
            await as_reward(slow).score([answered(TASK, "hello")], TASK)

    with pytest.raises(TimeoutError):
        asyncio.run(judged())


def test_truncated_stays_truncated_and_failures_are_never_judged():
    assert judge(length, "four", outcome=Truncated(None)) == [Truncated(4.0, {"length": 4.0})]
    for outcome in (Failed("engine", "gone"), Cancelled("stale")):
        assert judge(length, "four", outcome=outcome) == [outcome]


def test_async_judgements_of_a_group_overlap():
    arrived = []

    async def meeting(trajectory, task):
        arrived.append(trajectory)
        while len(arrived) < 3:  # ends only if all three run at once
            await asyncio.sleep(0)
        return 1.0

    assert len(judge(meeting, "a", "b", "c")) == 3


def test_a_reward_passes_as_it_is_and_no_reward_is_refused():
    reward = ExactMatch(ExactMatchConfig())
    assert as_reward(reward) is reward
    with pytest.raises(ConfigError, match="3 is not a reward: give a function"):
        as_reward(3)  # pyright: ignore[reportArgumentType]


def test_the_last_assistant_message_is_the_answer():
    turns = [
        Message("user", "q"),
        Message("assistant", "first"),
        Message("tool", "data"),
        Message("assistant", "last"),
    ]
    assert answer_text(conversation(turns)) == "last"
    assert answer_text(conversation([*turns, Message("user", "thanks")])) == "last"


def test_a_trajectory_without_an_answer_fails_instead_of_earning_0():
    reward = ExactMatch(ExactMatchConfig())
    (outcome,) = asyncio.run(reward.score([conversation(TASK.messages)], TASK))
    assert isinstance(outcome, Failed)
    assert "no assistant message" in outcome.detail


@pytest.mark.parametrize("end", [os.getpid, lambda: sys.exit(0)])
def test_a_process_that_a_reward_forks_does_not_come_back_as_a_second_run(end, capfd):
    """It would train and write into the run's files too."""
    children = []

    def fork(trajectory, task):
        child = os.fork()
        if not child:
            end()
        else:
            children.append(child)
        return 1.0

    back = judge(fork, "a")
    if not children:
        os._exit(7)  # the forked process did come back
    assert back == [Scored(1.0, {"fork": 1.0})]
    assert os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]) == 1
    assert "forked process" in capfd.readouterr().err


def test_a_long_message_is_kept_in_part():
    def fail(trajectory, task):
        raise ValueError("x" * 1_000_000)

    (outcome,) = judge(fail, "a")
    assert isinstance(outcome, Failed)
    assert len(outcome.detail) < 200_000
    assert len(describe_user_error(outcome.detail)) < 5000


def test_functions_keep_the_contract_of_rewards():
    check_reward(FunctionReward(length), TASK, good="longer", bad="long")
    check_reward(FunctionReward(async_length), TASK, good="longer", bad="long")


def test_exact_match():
    reward = ExactMatch(ExactMatchConfig())
    check_reward(reward, TASK, good="hello", bad="Hello")
    texts = ["hello", " hello\n", "hello!", "hell", ""]
    assert [o.reward for o in judge(reward, *texts)] == [1.0, 1.0, 0.0, 0.0, 0.0]
    assert judge(reward, "hello", outcome=Truncated(None)) == [Truncated(0.0, {"exact_match": 0.0})]


def test_exact_match_needs_an_answer_to_compare_with():
    (outcome,) = asyncio.run(
        ExactMatch(ExactMatchConfig()).score([answered(TASK, "")], Task("t/1", TASK.messages))
    )
    assert isinstance(outcome, Failed)
    assert "task 't/1' has no answer" in outcome.detail
