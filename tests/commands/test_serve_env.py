"""`ratchet serve-env`: OpenEnv's clients, and Ratchet's own, play any environment."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from websockets.asyncio.client import connect
from websockets.asyncio.server import serve as serve_websocket
from websockets.exceptions import InvalidStatus

from ratchet.commands import serve_env
from ratchet.commands.serve_env import EnvironmentServer, build_served_setup
from ratchet.config.resolve import build, resolve
from ratchet.errors import ConfigError
from ratchet.testing.fakes import FakeEnvironment
from ratchet.training.stage import EnvSetup
from ratchet.types import Message, Task, ToolCall
from ratchet.web.guard import LOOPBACK

CLIENT = Path(__file__).parents[2] / ".venv" / "clients" / "bin" / "python"
PLAY = """
import json, sys
from openenv import GenericEnvClient
with GenericEnvClient(base_url=sys.argv[1]).sync() as env:
    first = env.reset(seed=3)
    text = first.observation["text"]
    last = env.step({"message": "".join(sorted(text.rstrip("=")))})
    state = env.state()
    again = env.reset(seed=3)
    wrong = env.step({"message": "no"})
print(json.dumps([text, last.reward, last.done, state["step_count"],
                  again.observation["text"] == text, wrong.reward]))
"""


@pytest.fixture
def serve():
    processes = []

    def start(*arguments):
        command = [sys.executable, "-m", "ratchet", "serve-env", *arguments, "--port", "0"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        processes.append(process)
        line = process.stdout.readline()
        return re.search(r"http://[\d.:]+", line)[0]

    yield start
    for process in processes:
        process.terminate()
        assert process.wait(timeout=30) == 0
        process.stdout.close()


def play(url, *messages, **keys):
    environment = build(resolve("environment", {"kind": "openenv", "url": url, **keys}))
    task = next(environment.tasks("test", seed=0, start=3))

    async def play_once():
        prompt = await environment.reset(task)
        steps = [await environment.step(message) for message in messages]
        await environment.close()
        return prompt[0].text, steps

    return asyncio.run(play_once())


async def ask(url, *requests):
    async with connect(url.replace("http", "ws") + "/ws", proxy=None) as socket:
        answers = []
        for request in requests:
            await socket.send(request if isinstance(request, str) else json.dumps(request))
            answers.append(json.loads(await socket.recv()))
        return answers


@pytest.mark.slow
def test_ratchets_own_client_plays_answers_and_tools(serve):
    url = serve("sorting", "digits=3")
    prompt, _ = play(url, prompt="{text}", action_field="message")
    right = "".join(sorted(prompt.rstrip("=")))
    _, steps = play(url, Message("assistant", right))
    assert [(step.reward, step.done) for step in steps] == [(1.0, True)]
    _, steps = play(url, Message("assistant", "no"))
    assert [(step.reward, step.done) for step in steps] == [(0.0, True)]
    call = ToolCall("call_0", "calculator", {"expression": "6*7"})
    url = serve("tool_use", "problems={kind: arithmetic}", "tools=[{kind: calculator}]")
    _, steps = play(url, Message("assistant", tool_calls=(call,)), actions="tools")
    assert [message.text for message in steps[0].messages] == ["42"]


@pytest.mark.slow
def test_wrong_requests_get_errors_and_harm_nothing(serve):
    url = serve("sorting", "--sessions", "1")
    answers = asyncio.run(
        ask(
            url,
            "{",
            "[]",
            {"type": "jump"},
            {"type": "step", "data": {"message": "1"}},
            {"type": "reset", "data": {"seed": -1}},
            {"type": "reset", "data": {"seed": False}},
            {"type": "reset", "data": {"seed": 0, "split": "all"}},
            {"type": "reset", "data": {"seed": 1}},
            {"type": "step", "data": {"text": "1"}},
            {"type": "state"},
        )
    )
    codes = [answer["data"].get("code") for answer in answers]
    assert codes[:3] == ["INVALID_JSON", "VALIDATION_ERROR", "UNKNOWN_TYPE"]
    assert codes[3:7] == ["EXECUTION_ERROR", *["VALIDATION_ERROR"] * 3]
    assert codes[7:] == [None, "VALIDATION_ERROR", None]
    assert answers[9]["data"]["step_count"] == 0

    async def overfill():
        async with connect(url.replace("http", "ws") + "/ws", proxy=None) as socket:
            await socket.send(json.dumps({"type": "reset"}))
            await socket.recv()
            return await ask(url, {"type": "reset"})

    (full,) = asyncio.run(overfill())
    assert full["data"]["code"] == "CAPACITY_REACHED"
    assert asyncio.run(ask(url, {"type": "reset"}))[0]["type"] == "observation"


class Waiting(FakeEnvironment):
    """An environment whose steps never end, and whose test split has no end either."""

    def tasks(self, split, *, seed, start=0):
        return (Task(f"{split}/{i}", (Message("user", "1"),)) for i in itertools.count(start))

    async def step(self, message):
        self.entered.set()
        await asyncio.Event().wait()

    async def close(self):
        self.closed.set()


@contextlib.asynccontextmanager
async def served(environment, *, sessions=1):
    """The address of a server in this event loop, which checks hosts."""
    server = EnvironmentServer(EnvSetup(environment), "name", sessions, LOOPBACK)
    listening = serve_websocket(
        server.play, "127.0.0.1", 0, process_request=server.answer_http, close_timeout=1
    )
    async with listening as running:
        yield f"http://127.0.0.1:{running.sockets[0].getsockname()[1]}"


@pytest.mark.parametrize("split", ["train", "test"])
def test_a_session_that_waits_ends_with_its_client_and_with_the_server(split):
    """By a step that never ends (train), and by a search for a task that has no end (test)."""

    async def run():
        environment = Waiting()
        environment.entered, environment.closed = asyncio.Event(), asyncio.Event()
        reset = {"type": "reset", "data": {"seed": 10**12 * (split == "test"), "split": split}}

        async def wait_in(url):
            socket = await connect(url.replace("http", "ws") + "/ws", proxy=None, close_timeout=1)
            await socket.send(json.dumps(reset))
            if split == "train":
                await socket.recv()
                await socket.send(json.dumps({"type": "step", "data": {"message": "1"}}))
                await environment.entered.wait()
            return socket

        async with served(environment) as url:
            socket = await wait_in(url)
            (full,) = await ask(url, {"type": "reset"})
            await socket.close()
            await environment.closed.wait()
            (first,) = await ask(url, {"type": "reset"})
            last = await wait_in(url)
        await last.wait_closed()
        return full["data"]["code"], first["type"]

    assert asyncio.run(asyncio.wait_for(run(), 60)) == ("CAPACITY_REACHED", "observation")


def test_a_pass_over_the_test_split_reads_each_task_once(monkeypatch):
    monkeypatch.setattr(serve_env, "MAX_LATEST_TASKS", 2)
    n_read = 0

    class Counting(FakeEnvironment):
        def tasks(self, split, *, seed, start=0):
            nonlocal n_read
            for i in range(start, 5 if split == "test" else 9):
                n_read += 1
                yield Task(f"{split}/{i}", (Message("user", "1"),))

    async def run():
        resets = [
            {"type": "reset", "data": {"seed": seed, "split": "test"}}
            for seed in (0, 1, 1, 3, 2, 4, 5, 0)
        ]
        async with served(Counting()) as url:
            answers = []
            for reset in resets:  # each in a session of its own
                answers += await ask(url, reset, {"type": "state"})
        return answers

    answers = asyncio.run(run())
    ids = [answer["data"].get("task_id") for answer in answers[1::2]]
    assert ids == [*(f"test/{i}" for i in (0, 1, 1, 3, 2, 4)), None, "test/0"]
    assert "has no task 5" in answers[12]["data"]["message"]
    assert n_read == 5 + 1, "only task 0 was read again"


@pytest.mark.parametrize(
    "headers", [{"origin": "http://other.site"}, {"additional_headers": {"Host": "other.site"}}]
)
def test_a_page_of_another_site_can_not_play(headers):
    async def run():
        async with served(FakeEnvironment()) as url:
            address = url.replace("http", "ws") + "/ws"
            async with connect(address, proxy=None, origin=url):
                pass
            with pytest.raises(InvalidStatus, match="403"):
                await connect(address, proxy=None, **headers)

    asyncio.run(run())


def test_keys_are_for_kinds_alone(tmp_path):
    with pytest.raises(ConfigError, match="is for a kind of environment"):
        build_served_setup(str(tmp_path / "recipe.yaml"), ["digits=3"])


@pytest.mark.slow
def test_openenvs_client_plays(serve, require):
    require(str(CLIENT), "the environment of clients, which `make` installs")
    url = serve("sorting", "digits=3")
    played = subprocess.run(
        [CLIENT, "-c", PLAY, url], check=True, capture_output=True, text=True, timeout=120
    )
    text, reward, done, n_steps, is_same, wrong = json.loads(played.stdout)
    assert re.fullmatch(r"\d{3}=", text)
    assert (reward, done, n_steps, is_same, wrong) == (1.0, True, 1, True, 0.0)
