"""Environment classes of TRL are played as GRPOTrainer plays them."""

import asyncio
import copy
import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from ratchet.config.resolve import build, resolve
from ratchet.errors import ConfigError, DataError
from ratchet.testing import check_environment
from ratchet.types import Message, ToolCall
from ratchet.utils.user_code import UserCodeFailed, run_guarded

FILE = Path(__file__).with_name("trl_environments.py")


def section(factory="Counter", **keys):
    if isinstance(factory, str):
        factory = f"{FILE}:{factory}"
    return resolve("environment", {"kind": "trl", "factory": factory, **keys})


def call(name, **arguments):
    return Message("assistant", tool_calls=(ToolCall("call_0", name, arguments),))


def play(environment, *messages, task=None):
    """The prompt and the steps of one attempt."""

    async def attempt():
        prompt = await environment.reset(task or next(environment.tasks("train", seed=0)))
        return prompt, [await environment.step(message) for message in messages]

    return asyncio.run(attempt())


def texts(steps):
    return [message.text for step in steps for message in step.messages]


@pytest.fixture
def rows(tmp_path):
    """A dataset environment, with a column that `reset` gets."""
    file = tmp_path / "rows.jsonl"
    lines = [{"prompt": f"Count {n}.", "target": n, "environment": "count"} for n in (2, 5)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return {"kind": "dataset", "train": str(file), "test_share": 0.0, "shuffle": False}


def test_methods_are_tools_and_reset_gets_the_row(rows):
    environment = build(section(problems=rows))
    task = next(environment.tasks("train", seed=0))
    assert [tool["function"]["name"] for tool in environment.tools(task)] == ["add", "fail", "show"]
    parameters = environment.tools(task)[0]["function"]["parameters"]
    assert parameters["properties"]["amount"] == {
        "type": "integer",
        "description": "How much to add.",
    }
    done = Message("assistant", "done")
    prompt, steps = play(environment, call("add", amount=2), call("show"), done, task=task)
    assert prompt[-1].text == "Count 2. Reach 2."
    assert texts(steps) == ["2", "at 2"]
    assert (steps[-1].done, steps[-1].reward) == (True, 1.0)
    assert steps[-1].metrics == {"Counter": 1.0}


def test_errors_of_tools_are_told_to_the_policy_in_trls_words():
    environment = build(section())
    _, steps = play(environment, call("fail"), call("_helper"), call("add", wrong=1))
    first, second, third = texts(steps)
    assert first == "{'error': 'out of order'}"
    assert second == "{'error': 'Tool _helper not found.'}"
    assert "unexpected keyword argument 'wrong'" in third
    assert [step.metrics["tool_errors"] for step in steps] == [1, 1, 1]


def test_the_environment_makes_its_own_prompt_without_problems():
    environment = build(section(test_tasks=2))
    prompt, _ = play(environment)
    assert [message.text for message in prompt] == [" Reach 3."]
    assert len(list(environment.tasks("test", seed=0))) == 2


def test_an_instance_is_reset_for_each_attempt_and_a_copy_has_its_own():
    environment = build(section())
    other = copy.copy(environment)
    play(environment, call("add", amount=3))
    play(environment)
    play(other)
    assert (environment._instance.episodes, other._instance.episodes) == (2, 1)
    assert (environment._instance.value, environment._instance is other._instance) == (0, False)


def test_the_attempt_ends_after_the_last_turn_with_calls():
    environment = build(section(max_calling_turns=1))
    _, steps = play(environment, call("add", amount=1), call("add", amount=1))
    assert [step.done for step in steps] == [False, True]
    assert steps[-1].reward == pytest.approx(-0.2)


def test_reward_functions_get_the_instance():
    environment = build(section("Silent", reward_funcs=[f"{FILE}:words_said"]))
    _, steps = play(environment, call("say", word="a"), call("say", word="b"), Message("assistant"))
    assert (steps[-1].reward, steps[-1].metrics) == (2.0, {"words_said": 2.0})
    assert environment._instance.row == {"prompt": [{"role": "user", "content": ""}]}


def test_an_attempt_that_was_cut_off_is_judged_too():
    environment = build(section())
    play(environment, call("add", amount=3))
    messages = [Message("user", " Reach 3."), Message("assistant", "unfini")]
    assert asyncio.run(environment.reward_cut_attempt(messages)) == 1.0


def test_a_row_chooses_its_class(rows):
    names = {"count": f"{FILE}:Counter", "say": f"{FILE}:Silent"}
    environment = build(section(names, problems=rows))
    task = next(environment.tasks("train", seed=0))
    assert len(environment.tools(task)) == 3
    play(environment, task=task)
    task.meta["environment"] = "other"
    with pytest.raises(DataError, match=r"environment='other' is not in environment\.factory"):
        asyncio.run(environment.reset(task))


def test_a_call_that_does_not_end_fails_the_attempt():
    environment = build(section("Slow", timeout_s=0.01))
    with pytest.raises(UserCodeFailed, match=r"Slow.wait gave no answer within environment.time"):
        asyncio.run(run_guarded(lambda: wait_for(environment)))


async def wait_for(environment):
    await environment.reset(next(environment.tasks("train", seed=0)))
    await environment.step(call("wait"))


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        ("NoReset", "NoReset is not an environment of TRL: it has no method `reset`"),
        ("Untyped", "Untyped.add can't be a tool: .*Give each parameter a type"),
    ],
)
def test_a_class_that_is_no_environment_is_refused(factory, words):
    with pytest.raises(ConfigError, match=words):
        build(section(factory))


def test_a_path_that_names_nothing_is_refused():
    with pytest.raises(ValidationError, match="has no 'Countre'; did you mean"):
        section("Countre")


def test_only_a_class_with_a_reward_judges():
    assert section("Counter").returns_rewards
    assert not section("Silent").returns_rewards
    assert section("Silent", reward_funcs=[f"{FILE}:words_said"]).returns_rewards


@pytest.mark.medium
def test_it_keeps_the_contract_of_environments():
    check_environment(build(section(problems={"kind": "arithmetic"})))
