"""Episodes with tools: a scripted policy solves them, and a tiny one learns to."""

import asyncio
import json
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest

from ratchet.config.resolve import build, resolve
from ratchet.data.chat.builtin_tokenizers import character_tokenizer
from ratchet.data.chat.renderer import Renderer
from ratchet.environments.tool_use.environment import ToolUse
from ratchet.errors import DataError
from ratchet.experience.rollout.episode import EpisodePlayer
from ratchet.experience.rollout.manager import RolloutManager
from ratchet.rewards.weighted_sum import compose_rewards
from ratchet.sandbox import SandboxError
from ratchet.testing import check_environment
from ratchet.types import Completion, Failed, Message, Sampling, Scored, StopReason, Task, ToolCall

TEMPLATE = """\
{%- for m in messages -%}
{{- "<" + m.role + ">" + m.content -}}
{%- for call in m.tool_calls or [] -%}
{{- '{"name": "' + call.function.name + '", "parameters": ' + call.function.arguments | tojson + "}" -}}
{%- endfor -%}
{%- if m.role == "assistant" -%}{{- eos_token -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "<assistant>" -}}{%- endif -%}"""
EXACT = compose_rewards((resolve("rewards", {"kind": "exact_match"}),))
PROBLEMS = {"kind": "arithmetic", "digits": 2, "operators": ["*"]}


def section(**keys):
    return resolve(
        "environment",
        {"kind": "tool_use", "problems": PROBLEMS, "tools": [{"kind": "calculator"}], **keys},
    )


def written_call(name="calculator", **arguments):
    return json.dumps({"name": name, "parameters": arguments})


class Script:
    """A policy that says what it was told to, turn by turn."""

    version = 0

    def __init__(self, tokenizer, *turns):
        self.tokenizer, self.turns, self.prompts = tokenizer, list(turns), []

    async def generate(self, tokens, sampling, media=()):
        self.prompts.append(self.tokenizer.decode(list(tokens), skip_special=False))
        ids = [*self.tokenizer.encode(self.turns.pop(0)), self.tokenizer.eos_ids[0]]
        zeros = np.zeros(len(ids), np.float32)
        return Completion(
            np.array(ids), zeros, zeros, np.zeros(len(ids), np.int32), StopReason.STOP_TOKEN
        )


def played(environment, task, *turns, reward=None):
    tokenizer = character_tokenizer()
    script = Script(tokenizer, *turns)
    player = EpisodePlayer(script, Renderer(tokenizer, TEMPLATE), max_context=2048)
    manager = RolloutManager(player, lambda: environment, reward)
    group = asyncio.run(manager.group(task, Sampling(), group_id="g", attempts=1))
    return group.trajectories[-1], script


@pytest.mark.medium
def test_the_kit_with_the_reward_of_the_problems():
    made = section(system="Use the calculator.")
    reward = compose_rewards((resolve("rewards", {"kind": made.default_reward}),))
    check_environment(build(made), reward=reward)
    task = next(iter(build(made).tasks("train", seed=0)))
    assert [message.role for message in task.messages] == ["system", "user"]


def test_a_scripted_policy_calls_the_calculator_and_answers():
    environment = build(section())
    task = Task("t", (Message("user", "37*48="),), answer="1776", tag="arithmetic")
    trajectory, script = played(
        environment, task, written_call(expression="37*48"), "1776", reward=EXACT
    )
    assert trajectory.outcome == Scored(1.0, {"exact_match": 1.0})
    assert script.prompts[1].endswith("<eos><tool>1776<assistant>")
    assert (trajectory.metrics["tool_calls"], trajectory.metrics["tool_errors"]) == (1, 0)
    call = trajectory.messages[1].tool_calls[0]
    assert (call.name, dict(call.arguments), trajectory.messages[2].tool_call_id) == (
        "calculator",
        {"expression": "37*48"},
        call.id,
    )


def test_a_policy_may_learn_from_what_went_wrong_with_its_calls():
    environment = build(section())
    task = Task("t", (Message("user", "37*48="),), answer="1776")
    turns = (
        written_call("calc"),
        written_call(expr="1"),
        written_call(expression="37*"),
        written_call(expression="37*48"),
    )
    trajectory, _ = played(
        environment,
        task,
        *turns,
        "1776",
        reward=compose_rewards((resolve("rewards", {"kind": "exact_match"}),)),
    )
    assert trajectory.reward == 1.0
    assert (trajectory.metrics["tool_calls"], trajectory.metrics["tool_errors"]) == (4, 3)
    told = [message.text for message in trajectory.messages if message.role == "tool"]
    assert told == [
        "Error: there is no tool 'calc'; there are calculator",
        "Error: the argument 'expression' is missing; the tool takes expression",
        "Error: the expression ends too early",
        "1776",
    ]


def test_turns_with_calls_are_bounded():
    environment = build(section(max_calling_turns=2))
    task = Task("t", (Message("user", "1*1="),), answer="1")
    calls = [written_call(expression="1")] * 3
    trajectory, _ = played(environment, task, *calls, reward=EXACT)
    assert trajectory.reward == 0.0
    assert trajectory.metrics["tool_calls"] == 2


class Unwell:
    name, description = "unwell", "Its machinery is broken."
    parameters = {"type": "object", "properties": {}}  # noqa: RUF012

    def call(self):
        raise SandboxError("no room left")


def test_broken_machinery_fails_the_attempt():
    made = section(tools=[{"kind": f"{__name__}:Unwell"}])
    trajectory, _ = played(
        build(made),
        Task("t", (Message("user", "?"),), answer="1"),
        *[written_call("unwell")] * 5,
    )
    assert isinstance(trajectory.outcome, Failed)
    assert "no room left" in trajectory.outcome.detail


class Sorted:
    name, description = "sort", "Sorts numbers, in the place where they are."
    parameters = {  # noqa: RUF012
        "type": "object",
        "properties": {"numbers": {"type": "array"}},
        "required": ["numbers"],
    }

    def call(self, numbers):
        numbers.sort()
        return numbers


def test_a_tool_that_changes_its_arguments_leaves_the_call_as_it_was_written():
    made = section(tools=[{"kind": f"{__name__}:Sorted"}])
    task = Task("t", (Message("user", "?"),), answer="1")
    trajectory, _ = played(
        build(made), task, written_call("sort", numbers=[3, 1]), "1", reward=EXACT
    )
    assert trajectory.messages[1].tool_calls[0].arguments == {"numbers": [3, 1]}
    assert trajectory.messages[2].text == "[1, 3]"


def test_a_demonstration_asks_for_what_the_prompt_says_or_there_is_none():
    environment = ToolUse(section(problems={"kind": "sorting", "digits": 3}))
    task = next(iter(environment.tasks("train", seed=0)))
    with pytest.raises(DataError, match="no demonstration with tools"):
        environment.demonstration(replace(task, messages=(Message("user", "312="),)))
    plain = build(section())
    call, result, answer = plain.demonstration(Task("t", (Message("user", "07*08="),), answer="56"))
    assert call.tool_calls == (ToolCall("call_0", "calculator", {"expression": "07*08"}),)
    assert (result.text, answer.text) == ("56", "56")


# --- questions


@pytest.fixture
def qa(tmp_path):
    rows = [{"question": f"Where does person {i} live?", "answer": f"town {i}"} for i in range(40)]
    (tmp_path / "qa.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    facts = [{"text": f"Person {i} lives in town {i}.", "title": f"Person {i}"} for i in range(40)]
    (tmp_path / "facts.jsonl").write_text("".join(json.dumps(fact) + "\n" for fact in facts))
    search = {"kind": "search", "corpus": str(tmp_path / "facts.jsonl"), "results": 1}
    return {"kind": "qa", "train": str(tmp_path / "qa.jsonl"), "tools": [search]}


def test_questions_are_answered_by_searching(qa, tmp_path):
    made = resolve("environment", qa)
    environment = build(made)
    check_environment(environment)
    task = next(
        task for task in islice(environment.tasks("train", seed=0), 40) if task.answer == "town 7"
    )
    reward = compose_rewards((resolve("rewards", made.default_reward),))
    trajectory, script = played(
        environment, task, written_call("search", query="person 7"), "Town 7", reward=reward
    )
    assert trajectory.reward == 1.0
    assert "<tool>[1] Person 7\nPerson 7 lives in town 7.<assistant>" in script.prompts[1]
    test = tmp_path / "test.jsonl"
    test.write_text((tmp_path / "qa.jsonl").read_text().splitlines()[3] + "\n")
    with pytest.raises(DataError, match="line 1: this question is also in"):
        list(build(resolve("environment", {**qa, "test": str(test)})).tasks("test", seed=0))
