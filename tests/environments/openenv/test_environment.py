"""Environments on OpenEnv's servers: what the server says counts, and its faults are no rewards."""

from __future__ import annotations

import asyncio
import copy
import json
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import ratchet
from environments.openenv.stub_server import StubServer
from pages import written
from pydantic import ValidationError

from ratchet.config.resolve import build, resolve
from ratchet.environments.openenv.environment import format_observation
from ratchet.environments.openenv.process import ServerProcess
from ratchet.environments.openenv.session import OpenEnvError, read_schema
from ratchet.errors import ConfigError, DataError
from ratchet.types import Message, ToolCall

CLIENTS = Path(__file__).parents[3] / ".venv" / "clients" / "bin"


@pytest.fixture
def server():
    server = StubServer()
    yield server
    server.close()


def make(server, **keys):
    return build(
        resolve("environment", {"kind": "openenv", "url": server.url, "timeout_s": 5, **keys})
    )


def say(text):
    return Message("assistant", text)


def call(number, name="call_0"):
    return Message("assistant", tool_calls=(ToolCall(name, "add", {"number": number}),))


async def play(environment, *messages, index=3):
    task = next(environment.tasks("test", seed=0, start=index))
    try:
        prompt = await environment.reset(task)
        return prompt, [await environment.step(message) for message in messages]
    finally:
        await environment.close()


def test_an_episode_of_texts(server):
    environment = make(server, prompt="Sum {sum}. {observation}", reset={"level": 2})
    prompt, steps = asyncio.run(play(environment, say("2"), say("no"), say("7")))
    assert prompt[0].text == 'Sum 3. {"sum": 3}'
    assert [step.reward for step in steps] == [0.5, 0.0, 0.5]
    assert [step.done for step in steps] == [False, False, True]
    assert [message.text for step in steps for message in step.messages] == [
        '{"sum": 5}',
        "invalid action: Input should be a number",
    ]
    assert [step.metrics["invalid_actions"] for step in steps] == [0.0, 1.0, 0.0]
    assert steps[2].state_key == '{"sum": 5}'
    assert server.resets == [{"level": 2, "seed": 3}]


def test_an_episode_of_tool_calls(server):
    environment = make(server, actions="tools")
    _, steps = asyncio.run(play(environment, call("2"), call("x"), say("That is all.")))
    assert environment.tools(None)[0]["function"]["name"] == "add"
    assert [message.text for step in steps for message in step.messages] == ["5", "no number"]
    assert [(step.reward, step.done) for step in steps] == [(0.5, False), (0.0, False), (0.0, True)]
    assert steps[1].metrics == {"tool_calls": 1.0, "tool_errors": 1.0}
    with pytest.raises(OpenEnvError, match="too slow"):
        asyncio.run(play(environment, call("slow")))


@pytest.mark.medium
@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("error", "failed at step: oops"),
        ("fields", "Field required. The server's action has other fields now than 'text'"),
        ("die", "broke off during step"),
        ("nan", "must be a finite number"),
        ("silence", "did not answer step within 0.5 s"),
        ("garbage", r"answered step with '\[\]'"),
        ("nested", r"answered step with '\[\[\["),
    ],
)
def test_a_fault_of_the_server_fails_the_attempt(server, text, sentence):
    with pytest.raises(OpenEnvError, match=sentence):
        asyncio.run(play(make(server, timeout_s=0.5), say(text)))


def test_an_answer_too_many_is_not_taken_for_the_next_one(server):
    environment = make(server)

    async def play_slowly():
        await environment.reset(next(environment.tasks("test", seed=0)))
        first = await environment.step(say("twice"))
        assert (first.reward, first.done) == (0.0, False)
        await asyncio.sleep(0.05)  # the policy samples
        try:
            with pytest.raises(OpenEnvError, match="sent a message that answers no request"):
                await environment.step(say("1"))
        finally:
            await environment.close()

    asyncio.run(play_slowly())


def test_a_late_second_answer_is_not_the_last_one(server):
    with pytest.raises(OpenEnvError, match="sent a message that answers no request"):
        asyncio.run(play(make(server), say("late"), say("1")))


def test_odd_reasons_and_tools_of_a_server_are_read_or_refused(server):
    _, steps = asyncio.run(play(make(server), say("odd"), say("none"), say("inner")))
    assert [step.messages[0].text for step in steps] == [
        "invalid action: it does not fit the schema",
        "invalid action: it does not fit the schema",
        "invalid action: Field required",  # inside a value that the policy wrote
    ]
    for tools in (5, "abc", [{"title": "add"}], None):
        server.tools = tools
        with pytest.raises(OpenEnvError, match="answered list_tools with no list of tools"):
            asyncio.run(play(make(server, actions="tools")))


def test_sessions_are_apart_and_closed(server):
    environment = make(server, max_turns=2)
    other = copy.copy(environment)

    async def play_both():
        first, second = (
            environment.tasks("test", seed=0),
            environment.tasks("test", seed=0, start=9),
        )
        await environment.reset(next(first))
        await other.reset(next(second))
        texts = []
        for player in (environment, other, environment):
            step = await player.step(say("1"))
            texts += [message.text for message in step.messages]
        assert step.done  # the last turn
        await environment.reset(next(first))  # the session before was closed
        await environment.close()
        await other.close()
        return texts

    assert asyncio.run(play_both()) == ['{"sum": 1}', '{"sum": 10}']
    assert (server.n_opened, server.n_open) == (3, 0)


@pytest.mark.medium
def test_a_full_server_is_asked_again(server):
    server.capacity = 1
    environment = make(server)
    other = copy.copy(environment)
    first, second = (next(environment.tasks("test", seed=0, start=i)) for i in (0, 1))

    async def wait_for_a_session():
        await environment.reset(first)
        waiting = asyncio.ensure_future(other.reset(second))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        await environment.close()
        await waiting
        environment.config = environment.config.model_copy(update={"timeout_s": 0.2})
        with pytest.raises(OpenEnvError, match="max_concurrent_envs to at least"):
            await environment.reset(first)
        await other.close()

    asyncio.run(wait_for_a_session())


@pytest.mark.medium
def test_what_can_not_be_played_is_refused(server, tmp_path):
    with pytest.raises(ConfigError, match="has the fields text, note, and requires text"):
        make(server, action_field="note").tasks("test", seed=0)
    with pytest.raises(DataError, match="no OpenEnv server answers"):
        build(resolve("environment", {"kind": "openenv", "url": "http://127.0.0.1:1"})).tasks(
            "test", seed=0
        )
    for action in ([], {"properties": ["text"]}, {"required": 7}, {"required": [{}]}):
        odd_server = StubServer(schema={"action": action})
        with pytest.raises(DataError, match="which is no schema of actions"):
            make(odd_server).tasks("test", seed=0)
        odd_server.close()
    with pytest.raises(ValidationError, match="either url"):
        resolve("environment", {"kind": "openenv"})
    package = {"kind": "openenv", "path": str(tmp_path)}
    with pytest.raises(ConfigError, match=r"has no openenv\.yaml"):
        build(resolve("environment", package)).tasks("test", seed=0)
    (tmp_path / "openenv.yaml").write_text("app: no_such_module:app\n")
    with pytest.raises(ConfigError, match="did not start with"):
        build(resolve("environment", package)).tasks("test", seed=0)


PACKAGE = {
    "openenv.yaml": "spec_version: 1\napp: server.app:app\n",
    # Stands in for the package openenv, which the tests' interpreter lacks.
    "openenv/core/env_server/http_server.py": "class HTTPEnvServer:\n"
    "    def __init__(self, env, action, observation, max_concurrent_envs=None):\n"
    "        self.sessions = max_concurrent_envs\n",
    "server/app.py": "import json\n"
    "from openenv.core.env_server.http_server import HTTPEnvServer\n"
    "class Env: SUPPORTS_CONCURRENT_SESSIONS = True\n"
    "sessions = HTTPEnvServer(Env, 0, 0, 1).sessions\n"
    "async def app(scope, receive, send):\n"
    "    assert scope['type'] == 'http'\n"
    "    schema = {'action': {'properties': {'text': {}}, 'sessions': sessions}}\n"
    "    await send({'type': 'http.response.start', 'status': 200, 'headers': []})\n"
    "    await send({'type': 'http.response.body', 'body': json.dumps(schema).encode()})\n",
}


@pytest.mark.medium
def test_a_packages_server_starts_and_ends_with_the_trainer(tmp_path):
    for name, text in PACKAGE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    server = ServerProcess(tmp_path, sys.executable, sessions=7, timeout_s=60)
    schema = read_schema(server.url, timeout_s=30)
    assert schema["action"]["sessions"] == 7  # the app itself allows 1
    assert server.describe_end() == ""
    server._process.stdin.close()  # as when the trainer is killed
    assert server._process.wait(timeout=30) == 0
    assert "ended with code 0" in server.describe_end()
    server.close()


@pytest.mark.slow
def test_a_package_of_openenvs_scaffold_trains_and_replays(
    repository, tmp_path, monkeypatch, require
):
    """The recipe of the page, twice, with the official package."""
    require(str(CLIENTS / "python"), "the environment of clients, which `make` installs")
    monkeypatch.chdir(tmp_path)
    subprocess.run([CLIENTS / "openenv", "init", "echo_env"], check=True, capture_output=True)
    written(repository / "docs" / "integrations" / "openenv.md", tmp_path)
    python = f"environment.python={CLIENTS / 'python'}"
    for name in ("first", "second"):
        trained = ratchet("train", "with_echo.yaml", f"name={name}", "threads=1", python)
        assert trained.returncode == 0, trained.stdout + trained.stderr
    lines = [
        [json.loads(line) for line in path.read_text().splitlines()]
        for path in sorted(tmp_path.glob("runs/*/metrics.jsonl"))
    ]
    rewards = [[row.get("rollout/reward") for row in rows] for rows in lines]
    assert rewards[0] == rewards[1]
    assert max(filter(None, rewards[0])) > 0
    replayed = ratchet("replay", "runs/first", "--step", 2)
    assert (replayed.returncode, "bit-equal" in replayed.stdout) == (0, True)


def test_an_observation_is_filled_in_once():
    observation = {"text": "write {reward}", "reward": 3, "metadata": {"x": 1}}
    assert format_observation("{observation} ({reward})", observation) == "write {reward} (3)"
    assert format_observation("{text} {other}", observation) == "write {reward} {other}"
