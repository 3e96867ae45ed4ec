"""Environments of the Open Reward Standard: faults of their servers are no rewards."""

from __future__ import annotations

import asyncio
import copy
import json
from pathlib import Path

import pytest
from command_line import ratchet
from environments.servers.open_reward_stub import STARTING, Stub, events, result
from environments.servers.started import started
from pages import written
from rewards.fake_http import HANG, Answer, serve

from ratchet.config.resolve import build, resolve
from ratchet.environments.servers.http_session import ServerFault
from ratchet.errors import ConfigError, DataError
from ratchet.testing import check_environment
from ratchet.types import Message, Part, ToolCall

CLIENTS = Path(__file__).parents[3] / ".venv" / "clients" / "bin"


@pytest.fixture
def play():
    def play(server, *messages, **keys):
        with serve(server) as server.fake:
            keys = {"kind": "open_reward", "url": server.fake.url, "timeout_s": 5, **keys}
            environment = build(resolve("environment", keys))

            async def attempt():
                task = next(environment.tasks("test", seed=0))
                player = copy.copy(environment)
                try:
                    prompt = await player.reset(task)
                    assert player.tools(task)[0]["function"]["name"] == "open"
                    return prompt, [await player.step(message) for message in messages]
                finally:
                    await player.close()

            return *asyncio.run(attempt()), server.fake.seen

    return play


CALL = Message("assistant", tool_calls=(ToolCall("call_0", "open", {}),))


def test_results_of_tools_bring_rewards_and_end_the_episode(play):
    refused = json.dumps({"ok": False, "error": "no key", "reason": "input_validation"})
    stub = Stub(call=(events(("end", refused)),), prompt=(STARTING,))
    hidden = Message("assistant", tool_calls=(ToolCall("call_1", "answer", {}),))
    prompt, steps, requests = play(stub, CALL, hidden, CALL)
    assert prompt == (Message("user", "Open it."),)
    assert [(step.reward, step.done) for step in steps] == [(0.0, False)] * 2 + [(0.5, True)]
    assert steps[1].messages[0].text == "Error: there is no tool 'answer'; there are open"
    assert steps[0].messages == (Message("tool", "Error: no key", tool_call_id="call_0"),)
    assert steps[0].metrics == {"tool_calls": 1.0, "tool_errors": 1.0}
    sessions = {headers.get("x-session-id") for _, headers, _ in requests[-5:]}
    assert sessions == {next(iter(sessions))} != {None}
    assert requests[-1][0] == "/delete"


def test_a_message_without_a_call_ends_the_episode(play):
    said = Message("assistant", "<think>Hm.</think>7")
    _, steps, requests = play(Stub(), said)
    assert (steps[0].reward, steps[0].done) == (0.5, True)
    assert requests[-2][2] == {"name": "answer", "input": {"text": "7"}}
    tools = {"tools": [{"name": "open", "description": "", "input_schema": {}}]}
    _, steps, _ = play(Stub(task_tools=tools), said)
    assert (steps[0].reward, steps[0].done) == (0.0, True)


def test_a_conversation_and_images_are_read(play):
    image = {"type": "image", "data": "AA==", "mimeType": "image/png"}
    conversation = [
        {"role": "system", "blocks": [{"type": "text", "text": "Be brief."}]},
        {"role": "user", "blocks": [image]},
        {
            "role": "assistant",
            "blocks": [
                {"type": "reasoning", "text": "Hm."},
                {"type": "tool_call", "id": "a", "name": "open", "input": {"n": 1}},
            ],
        },
        {
            "role": "user",
            "blocks": [
                {"type": "text", "text": "Go on."},
                {"type": "tool_result", "tool_call_id": "a", "blocks": [image]},
            ],
        },
    ]
    prompt, _, _ = play(Stub(messages=conversation))
    part = Part("image", "data:image/png;base64,AA==")
    assert prompt == (
        Message("system", "Be brief."),
        Message("user", (part,)),
        Message("assistant", "<think>Hm.</think>", (ToolCall("a", "open", {"n": 1}),)),
        Message("tool", (part,), tool_call_id="a"),
        Message("user", "Go on."),
    )


@pytest.mark.medium
@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ({"create": Answer("boom", 500)}, "create answered 500: boom"),
        ({"create_session": "{}"}, "which is not a session"),
        ({"task_tools": {"tools": [1]}}, "which is not a list of tools"),
        ({"messages": [{"role": "user"}]}, "which is not a conversation"),
        ({"prompt": '["x"]'}, "which is not a list of blocks"),
        ({"prompt": STARTING}, "prompt answered 503"),
        ({"call": HANG}, "did not answer within 0.3 s"),
        ({"call": events(("task_id", "1"))}, "a stream of events without an end"),
        ({"call": events(("error", "KeyError"))}, "call failed: KeyError"),
        ({"call": events(("end", "{"))}, "which is no JSON"),
        ({"call": events(("end", '{"ok": true}'))}, "which is not a result of a tool"),
        ({"call": events(("end", result(reward="1")))}, "must be a finite number"),
        ({"call": events(("end", '{"ok": false, "reason": "name_collision"}'))}, "that failed"),
        ({"call": events(("end", result(reward=1).replace("true", "1")))}, "that failed"),
    ],
)
def test_a_fault_of_a_server_fails_the_attempt(play, fault, sentence):
    # A short limit is only for those that wait for it: on a busy machine others would meet it.
    waits = HANG in fault.values() or STARTING in fault.values()
    with pytest.raises(ServerFault, match=sentence):
        play(Stub(**fault), CALL, timeout_s=0.3 if waits else 5)


def test_splits_are_held_out_or_refused(play):
    many = Stub(num_tasks={"num_tasks": 40})
    play(many, test_split=None)
    with pytest.raises(ConfigError, match=r"has no split 'validation', only train, test\."):
        play(Stub(), test_split="validation")
    with pytest.raises(ValueError, match="test_split=train is the training split too"):
        play(Stub(), test_split="train")
    with pytest.raises(ConfigError, match="the server has box"):
        play(Stub(), environment="chest")
    wrong_counts = ({"num_tasks": count} for count in ("?", 2.5, True, -1, 10**12))
    for answer in (*wrong_counts, Answer("boom", 500)):
        with pytest.raises(DataError):
            play(Stub(num_tasks=answer))
    with pytest.raises(DataError, match="gave no answer: InvalidURL"):
        play(Stub(), url="http://[::1")


@pytest.fixture
def letters_server(repository, tmp_path, monkeypatch, require):
    """The address of the page's server, in the official package."""
    require(str(CLIENTS / "python"), "the environment of clients, which `make` installs")
    monkeypatch.chdir(tmp_path)
    written(repository / "docs" / "integrations" / "open-reward.md", tmp_path)
    with started(CLIENTS / "python", "letters_server.py") as url:
        yield url


@pytest.mark.slow
def test_a_server_of_the_package_trains(letters_server, tmp_path):
    environment = build(resolve("environment", {"kind": "open_reward", "url": letters_server}))
    check_environment(environment, n=4)
    look = Message("assistant", tool_calls=(ToolCall("call_0", "look", {}),))
    wrong = Message("assistant", tool_calls=(ToolCall("call_1", "glance", {}),))

    async def attempt():
        prompt = await environment.reset(next(environment.tasks("test", seed=0)))
        steps = [await environment.step(m) for m in (look, wrong, Message("assistant", "xx.."))]
        await environment.close()
        return prompt[0].text, steps

    prompt, steps = asyncio.run(attempt())
    assert prompt == "Write the letters that `look` tells."
    assert [message.text for message in steps[0].messages] == ["xyz"]
    assert [step.reward for step in steps] == [0.1, 0.0, 0.5]
    assert steps[1].metrics == {"tool_calls": 1.0, "tool_errors": 1.0}
    trained = ratchet(
        "train", "with_letters.yaml", "threads=1", f"environment.url={letters_server}"
    )
    assert trained.returncode == 0, trained.stdout + trained.stderr
    (metrics,) = tmp_path.glob("runs/*/metrics.jsonl")
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert max(line.get("rollout/reward", 0.0) for line in lines) > 0
