"""Code that runs within the policy's turn, in a namespace that its cells share."""

import asyncio
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from ratchet.config.resolve import build, resolve
from ratchet.data.chat.builtin_tokenizers import character_tokenizer
from ratchet.data.chat.renderer import Renderer
from ratchet.environments.code.interpreter import Cell, find_cell, format_result
from ratchet.errors import DataError
from ratchet.experience.rollout.episode import EpisodePlayer
from ratchet.experience.rollout.manager import RolloutManager
from ratchet.protocols import Environment, Step
from ratchet.rewards.weighted_sum import compose_rewards
from ratchet.testing import check_environment
from ratchet.types import Completion, Failed, Message, Owner, Sampling, StopReason, Task

PROBLEMS = {"kind": "arithmetic", "digits": 2, "operators": ["*"]}
EXACT = compose_rewards((resolve("rewards", {"kind": "exact_match"}),))
TAGS = ("<code>", "</code>")
TASK = Task("t", (Message("user", "37*48="),), answer="1776", tag="arithmetic")


def section(**keys):
    return resolve("environment", {"kind": "code_interpreter", "problems": PROBLEMS, **keys})


class StoppedScript:
    """A policy that says what it is told to, and stops at stop strings."""

    version = 0

    def __init__(self, tokenizer, *turns):
        self.tokenizer, self.turns, self.prompts, self.stops = tokenizer, list(turns), [], []

    async def generate(self, tokens, sampling, media=()):
        self.prompts.append(self.tokenizer.decode(list(tokens), skip_special=False))
        self.stops.append(sampling.stop)
        ids = self.tokenizer.encode(turn := self.turns.pop(0))
        is_stopped = turn.endswith(sampling.stop) if sampling.stop else False
        ids = ids if is_stopped else [*ids, self.tokenizer.eos_ids[0]]
        zeros = np.zeros(len(ids), np.float32)
        reason = StopReason.STOP_STRING if is_stopped else StopReason.STOP_TOKEN
        return Completion(np.array(ids), zeros, zeros, np.zeros(len(ids), np.int32), reason)


def played(environment, *turns, template="turns"):
    tokenizer = character_tokenizer()
    script: Any = StoppedScript(tokenizer, *turns)
    player = EpisodePlayer(script, Renderer(tokenizer, template), max_context=2048)
    manager = RolloutManager(player, lambda: environment, EXACT)
    group = asyncio.run(manager.group(TASK, Sampling(), group_id="g", attempts=1))
    assert len(group.trajectories) == 1
    return group.trajectories[0], script


def run_cells(*cells, **keys):
    """Return what the policy sees after each cell, and the metrics of the last."""

    async def run():
        environment = build(section(**keys))
        await environment.reset(TASK)
        steps = [await environment.step(Message("assistant", cell)) for cell in cells]
        await environment.close()
        return steps

    steps = asyncio.run(run())
    texts: list[Any] = [step.messages[0].text if step.messages else None for step in steps]
    return texts, dict(steps[-1].metrics or {})


@pytest.mark.medium
@pytest.mark.parametrize("inline", [True, False])
def test_the_kit_with_the_reward_of_the_problems(inline):
    made = section(system="Use code.", inline=inline)
    reward = compose_rewards((resolve("rewards", {"kind": made.default_reward}),))
    check_environment(build(made), reward=reward, n=50)
    task = next(iter(build(made).tasks("train", seed=0)))
    assert [message.role for message in task.messages] == ["system", "user"]


@pytest.mark.medium
def test_results_continue_the_turn_and_belong_to_the_environment():
    turns = ("<code>x = 37</code>", "So <code>x * 48</code>", "1776")
    trajectory, script = played(build(section()), *turns)
    assert trajectory.reward == 1.0
    assert script.stops == [("</code>",)] * 3
    whole = "<code>x = 37</code>So <code>x * 48</code><result>1776</result>"
    assert script.prompts[2].endswith(whole)
    assert script.prompts[2].count("<assistant>") == script.prompts[0].count("<assistant>")
    decode = character_tokenizer().decode
    written = {
        owner: decode(trajectory.tokens[trajectory.owner == owner].tolist())
        for owner in (Owner.POLICY, Owner.ENVIRONMENT)
    }
    assert written[Owner.POLICY] == "".join(turns)
    assert written[Owner.ENVIRONMENT] == "<result>1776</result>"
    assert not trajectory.trainable[trajectory.owner == Owner.ENVIRONMENT].any()
    assert [message.role for message in trajectory.messages] == [
        *("user", "assistant", "inline", "assistant", "inline", "assistant")
    ]
    assert len(trajectory.turns) == 3
    assert (trajectory.metrics["cells"], trajectory.metrics["cell_errors"]) == (2, 0)


@pytest.mark.medium
def test_without_inline_the_result_is_a_message_of_the_user():
    trajectory, _ = played(build(section(inline=False)), "<code>37*48</code>", "1776")
    assert trajectory.reward == 1.0
    assert [message.role for message in trajectory.messages][2] == "user"
    assert trajectory.messages[2].text == "<result>1776</result>"
    texts, _ = run_cells("<code>x = 1</code>", "<code>x", inline=False)  # an endpoint's answer
    assert texts == ["<result></result>", "<result>1</result>"]


def test_a_demonstration_has_the_tokens_of_a_played_turn():
    renderer = Renderer(character_tokenizer(), "turns")
    environment = build(section())
    demonstration = environment.demonstration(TASK)
    messages = [*TASK.messages, *demonstration]
    tokens, trainable = renderer.supervised(messages, train="all")
    trajectory, _ = played(environment, "<code>37*48</code>", "1776")
    assert tokens == trajectory.tokens.tolist()
    assert trainable == trajectory.trainable.tolist()
    with pytest.raises(DataError, match="within the assistant's turn"):
        renderer.prompt(messages[:-1])
    with pytest.raises(DataError, match="no message of the assistant"):
        renderer.prompt([*TASK.messages, demonstration[1], demonstration[2]])


def test_a_later_turn_continues_the_same_trajectory():
    class AskedAgain(Environment):
        """Write inline text, then ask once more."""

        def tasks(self, split, *, seed, start=0):
            return iter(())

        async def reset(self, task):
            self.replies = [Message("inline", " inline "), Message("user", "again")]
            return task.messages

        async def step(self, message):
            return Step((self.replies.pop(0),)) if self.replies else Step(done=True)

    trajectory, script = played(AskedAgain(), "a", "b", "1776", template="chatml")
    assert "assistant\na" in script.prompts[1]
    assert script.prompts[2].endswith("again<|im_end|>\n<|im_start|>assistant\n")
    assert trajectory.metrics["forks"] == 0
    assert trajectory.reward == 1.0


class TooMuch(Environment):
    def tasks(self, split, *, seed, start=0):
        return iter([Task(split, (Message("user", split),))][start:])

    async def reset(self, task):
        return task.messages

    async def step(self, message):
        return Step((Message("inline", "a"), Message("user", "b")))


def test_inline_text_stands_alone():
    trajectory, _ = played(TooMuch(), "a")
    assert isinstance(trajectory.outcome, Failed)
    assert "inline messages stand alone" in trajectory.outcome.detail
    with pytest.raises(AssertionError, match="mixes inline text"):
        check_environment(TooMuch())


@pytest.mark.medium
def test_cells_share_a_namespace_and_failed_ones_keep_what_they_did():
    texts, metrics = run_cells(
        "<code>x = 3; y = 4</code>",
        "<code>x + y</code>",
        "<code>def square(n):\n    return n * n\nsquare(x)</code>",
        "<code>print('seen'); z = 9; 1/0</code>",
        "<code>z</code>",
        "<code>object()</code>",
        "<code>(</code>",
    )
    assert texts[:3] == ["", "<result>7</result>", "\n\n<result>\n9\n</result>"]
    assert texts[3] == "\n\n<result>\nseen\nZeroDivisionError('division by zero')\n</result>"
    assert texts[4:6] == ["<result>9</result>", "<result><object object at 0x...></result>"]
    assert "SyntaxError" in texts[6]
    assert metrics == {"cells": 1, "cell_errors": 1}


@pytest.mark.medium
def test_killed_cells_are_undone_and_limits_hold():
    texts, _ = run_cells(
        "<code>x = 1</code>",
        "<code>x = 2\nwhile True: pass</code>",
        "<code>import os; x = 3; os._exit(0)</code>",
        "<code>x, 'a' * 99</code>",
        "<code>x</code>",
        timeout_s=1,
        max_cells=4,
        max_chars=20,
    )
    assert "it took too long; nothing of this code was kept" in texts[1]
    assert "it ended the session's process; nothing" in texts[2]
    assert texts[3].startswith("\n\n<result>\n(1,\n 'aaa")
    assert "[cut after 20 characters]" in texts[3]
    assert texts[4] is None


ATTACKS = [
    ("open('/etc/passwd').read()", "Error"),
    ("import os; os.listdir('/')", "PermissionError"),
    ("import subprocess; subprocess.run(['ls'])", "PermissionError"),
    ("import socket; socket.create_connection(('127.0.0.1', 1))", "Error"),
    ("import sys; sys._getframe(2).f_locals['request']['cells'][:-1]", "[]"),
    ("import os; os.write(1, b'[\"forged\", null, null]')", "22"),
    ("[0] * 10**10", "MemoryError()"),
    ("class A:\n    def __repr__(self): raise SystemExit\nA()", "SystemExit()"),
]


@pytest.mark.parametrize(("code", "seen"), ATTACKS)
def test_cells_reach_nothing_outside(code, seen):
    (text,), _ = run_cells(f"<code>{code}</code>")
    assert seen in text
    assert "1776" not in text


@pytest.mark.medium
def test_replayed_cells_give_the_same_values():
    cells = ("<code>import random; a = random.random()</code>", "<code>a, random.random()</code>")
    assert run_cells(*cells)[0] == run_cells(*cells)[0]


@pytest.mark.parametrize(
    ("text", "cell"),
    [
        ("a <code>1</code>", Cell("1", "")),
        ("<code>1</code>\n", Cell("1", "\n")),
        ("<code>1<code>2</code>", Cell("2", "")),
        ("<code>1", None),
        ("1</code>", None),
        ("no code", None),
    ],
)
def test_code_is_found_between_its_tags(text, cell):
    assert find_cell(text, TAGS) == cell


def test_results_are_written_as_by_nemo_rl():
    tags = ("<result>", "</result>")
    assert format_result("3", Cell("1+2", ""), tags) == "<result>3</result>"
    assert format_result("3", Cell("x=1\nx+2", "\n"), tags) == "\n<result>\n3\n</result>"
    assert format_result("", Cell("x=1", ""), tags) == ""


def test_tags_must_differ():
    with pytest.raises(ValidationError, match="two different texts"):
        section(code_tags=["```", "```"])
