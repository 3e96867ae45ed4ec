"""Reward functions of other libraries judge as they do there, and a fault of theirs is not a reward."""

import asyncio
import re
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import ValidationError

from ratchet.config.resolve import build, resolve
from ratchet.rewards.integrations.trl import TRLReward
from ratchet.rewards.weighted_sum import NOT_APPLICABLE, compose_rewards
from ratchet.testing import answered
from ratchet.testing.rewards import conversation
from ratchet.types import Failed, Message, Scored, Task, ToolCall, Truncated
from ratchet.utils.user_frames import describe_user_error

HERE = Path(__file__).parent
TRL = HERE / "trl_rewards.py"
VERL = HERE / "verl_rewards.py"
SUM = Task("t/0", (Message("user", "2+3="),), answer="5", meta={"prompt": "2+3=", "answer": "5"})
CHAT = Task("t/1", (Message("user", "2+3="),), answer="5")
WORD = Task("t/2", (Message("user", "Say it."),), answer="5")
ROW = Task(
    "t/3",
    (Message("user", "2+3="),),
    meta={
        "data_source": "openai/gsm8k",
        "reward_model": {"style": "rule", "ground_truth": "5"},
        "extra_info": {"split": "train"},
    },
)


def section(kind, function, **keys):
    file = TRL if kind == "trl" else VERL
    return resolve("rewards", {"kind": kind, "function": f"{file}:{function}", **keys})


def score(kind, function, task, *texts, outcome=None, **keys):
    reward = build(section(kind, function, **keys))
    return asyncio.run(reward.score([answered(task, text, outcome) for text in texts], task))


def rewards(outcomes):
    assert all(isinstance(outcome, Scored) for outcome in outcomes), outcomes
    return [outcome.reward for outcome in outcomes]


def test_a_trl_function_gets_text_for_a_text_prompt():
    assert rewards(score("trl", "exact", SUM, "5", "6", " 5 ")) == [1, 0, 1]


@pytest.mark.parametrize("function", ["polite", "longer"])
def test_a_trl_function_gets_messages_for_a_conversation(function):
    expected = {"polite": [0.5, 0.0], "longer": [8, 2]}[function]
    assert rewards(score("trl", function, CHAT, "5 please", "no")) == expected


def test_metrics_that_a_trl_function_logs_are_parts():
    first, _ = score("trl", "polite", CHAT, "5 please", "no")
    assert first == Scored(0.5, {"polite_share": 0.5})


def test_the_form_of_prompts_can_be_set():
    assert rewards(score("trl", "longer", SUM, "55", conversational=True)) == [2]
    (failed,) = score("trl", "longer", SUM, "55", conversational=False)
    assert failed.kind == "reward"


def test_a_function_that_makes_the_reward_function_gets_its_arguments():
    assert rewards(score("trl", "make_length", CHAT, "5", "555", factory_kwargs={"limit": 2})) == [
        1,
        0,
    ]


def test_a_truncated_attempt_is_judged_as_trl_does():
    (outcome,) = score("trl", "exact", SUM, "5", outcome=Truncated())
    assert outcome == Truncated(1.0)


def test_a_failed_attempt_keeps_its_outcome_and_is_not_judged():
    failed = Failed("environment", "lost")
    reward = build(section("trl", "exact"))
    rows = [answered(SUM, "5", failed), answered(SUM, "5")]
    assert asyncio.run(reward.score(rows, SUM)) == [failed, Scored(1.0)]


def test_none_leaves_the_other_rewards_alone():
    both = compose_rewards([section("trl", "only_sums"), section("trl", "longer")])
    (outcome,) = asyncio.run(both.score([answered(WORD, "abcd")], WORD))
    assert outcome == Scored(4.0, {"longer": 4.0})
    (outcome,) = asyncio.run(both.score([answered(CHAT, "5")], CHAT))
    assert set(outcome.parts) == {"only_sums", "longer"}


def test_an_attempt_without_any_reward_is_neither_scored_nor_failed():
    alone = compose_rewards([section("trl", "only_sums")])
    (outcome,) = asyncio.run(alone.score([answered(WORD, "abcd")], WORD))
    assert outcome == NOT_APPLICABLE
    assert not answered(WORD, "abcd", outcome).is_usable


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (
            "too_few",
            r"too_few \(.*trl_rewards\.py, line \d+\) returned 1 rewards for 2 completions",
        ),
        ("broken", r"KeyError: 'no such column' \(.*trl_rewards\.py, line \d+, in broken\)"),
        ("a_dict", r"a_dict .* returned \{0: 1.0, 1: 1.0\} for 2 completions"),
        ("some_bytes", "returned b'.*' for 2 completions"),
        ("pairs", "it must be a finite number"),
        ("generator_that_breaks", "KeyError: 'no such row'"),
        ("shrinking", "returned 1 rewards for 2 completions"),
    ],
)
def test_a_fault_of_a_trl_function_fails_its_group(function, words):
    outcomes = score("trl", function, CHAT, "5", "6")
    assert [outcome.kind for outcome in outcomes] == ["reward", "reward"]
    assert re.search(words, describe_user_error(outcomes[0].detail))


def test_odd_metrics_of_a_trl_function_are_left_out():
    outcomes = score("trl", "odd_metrics", CHAT, "5", "6")
    assert outcomes == [Scored(1.0, {"mixed": 2.0})] * 2


def test_a_value_that_is_no_number_fails_its_attempt():
    failed, scored = score("trl", "not_a_number", CHAT, "5", "6")
    assert failed.kind == "reward"
    assert "trl_rewards.py, line" in failed.detail
    assert scored == Scored(1.0)


def test_a_trl_function_sees_tool_calls_and_answers_as_trl_writes_them():
    call = ToolCall("call_0", "add", {"a": 2})
    seen = []

    def judge(prompts, completions, **kwargs):
        seen.append((prompts, completions))
        return [1.0]

    row = conversation(
        (
            *CHAT.messages,
            Message("assistant", tool_calls=(call,)),
            Message("tool", "5", tool_call_id="call_0"),
            Message("assistant", "5"),
        )
    )
    asyncio.run(TRLReward(judge, "judge").score([replace(row, metrics={"turns": 2})], CHAT))
    ((prompts, completions),) = seen
    assert prompts == [[{"role": "user", "content": "2+3="}]]
    function = {"name": "add", "arguments": {"a": 2}}
    assert completions == [
        [
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"type": "function", "function": function}],
            },
            {"role": "tool", "content": "5", "name": "add"},
            {"role": "assistant", "content": "5"},
        ]
    ]


def test_the_version_of_the_weights_is_trls_global_step():
    assert rewards(score("trl", "by_step", CHAT, "5")) == [0]


def test_a_verl_function_gets_the_columns_of_its_row():
    right, wrong = score("verl", "compute_score", ROW, "2+3 is #### 5", "#### 6")
    assert right == Scored(1.0, {"acc": 1.0})
    assert wrong == Scored(0.0, {"acc": 0.0})


def test_reward_kwargs_are_passed_to_a_verl_function():
    (outcome,) = score("verl", "compute_score", ROW, "#### 5", reward_kwargs={"scale": 2.0})
    assert outcome.reward == 2.0


def test_an_async_verl_function_may_return_a_tensor():
    assert rewards(score("verl", "compute_score_async", CHAT, "5", "6")) == [1, 0]


def test_a_dict_without_a_score_and_a_row_without_truth_fail():
    (outcome,) = score("verl", "without_score", ROW, "5")
    assert "returned a dict without 'score': it has acc" in outcome.detail
    task = Task("t/4", (Message("user", "2+3="),))
    (outcome,) = score("verl", "without_score", task, "5")
    assert "task t/4: neither reward_model.ground_truth nor an answer" in outcome.detail


@pytest.mark.parametrize(
    ("kind", "function", "keys", "reward"),
    [
        ("verl", "uses_up", {"reward_kwargs": {"spare": [3.0]}}, 6.0),
        ("openrlhf", "uses_up_labels", {}, 1.0),
        ("trl", "uses_up", {}, 2.0),
    ],
)
def test_a_function_that_changes_its_row_changes_it_for_no_other_attempt(
    kind, function, keys, reward
):
    tests = [2.0]
    row = Task(
        "t/5",
        (Message("user", "2+3="),),
        answer=[1.0],
        meta={"extra_info": {"tests": tests}, "tests": tests},
    )
    assert rewards(score(kind, function, row, "5", "6", **keys)) == [reward, reward]
    assert (row.answer, tests) == ([1.0], [2.0])


@pytest.mark.parametrize("kind", ["verl", "openrlhf"])
def test_stop_iteration_in_a_thread_fails_the_attempt_in_place_of_hanging(kind):
    (outcome,) = score(kind, "finds_nothing", CHAT, "5")
    assert isinstance(outcome, Failed)
    assert "return next(iter([]))" in outcome.detail


def test_an_openrlhf_function_returns_a_dict_or_a_tensor():
    right, wrong = score("openrlhf", "reward_func", CHAT, "5", "6")
    assert right == Scored(1.0, {"length": 7.0, "scores": 2.0})
    assert wrong == Scored(0.0, {"length": 7.0, "scores": 0.0})
    assert rewards(score("openrlhf", "reward_tensor", CHAT, "=5", "6")) == [1, 0]


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (f"{TRL}:exakt", "has no 'exakt'; did you mean"),
        ("nowhere/rewards.py:exact", "can't be imported (FileNotFoundError"),
        ("exact", "is not the path of a class or function"),
        (f"{TRL}:__doc__", "is not a function"),
    ],
)
def test_a_wrong_function_is_refused_before_the_run(function, words):
    with pytest.raises(ValidationError) as error:
        resolve("rewards", {"kind": "trl", "function": function})
    assert words in str(error.value)


def test_rewards_are_named_after_their_functions():
    both = compose_rewards([section("trl", "exact"), section("trl", "longer", weight=0.1)])
    assert both.weights == {"exact": 1.0, "longer": 0.1}
