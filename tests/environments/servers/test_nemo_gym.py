"""Rows of NeMo Gym: what its resource server answers counts, and its faults are no rewards."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from command_line import ratchet
from environments.servers.started import started
from pages import written
from rewards.fake_http import HANG, Answer, Fake, serve

from ratchet.config.resolve import build, resolve
from ratchet.environments.servers.http_session import ServerFault
from ratchet.environments.servers.responses_items import (
    describe_turn,
    read_function_tools,
    read_input,
)
from ratchet.errors import DataError
from ratchet.testing import check_environment
from ratchet.types import Message, ToolCall

PYTHON = Path(__file__).parents[3] / ".venv" / "nemo-gym" / "bin" / "python"
# Not `needs`: the checks ask for Python 3.11 or newer and pip alone.
needs_package = pytest.mark.skipif(
    not PYTHON.exists(), reason="`make` installs NeMo Gym where it finds Python 3.12"
)
SCHEMA = {"type": "object", "properties": {}}
ADD = {"type": "function", "name": "add", "strict": True, "parameters": SCHEMA}
BROKEN_OFF = Answer("{", headers={"content-length": "99"})


def row(text="Count to 3.", **columns):
    return {"responses_create_params": {"input": text, "tools": [ADD]}, "goal": 3, **columns}


class Counter:
    """A resource server whose tool `add` counts per session. `faults` replaces answers by path."""

    fake = Fake()

    def __init__(self, **faults):
        self.counts, self.faults = {}, {f"/{name}": answer for name, answer in faults.items()}

    def __call__(self, body, number):
        path, headers, _ = self.fake.seen[number]
        if path in self.faults:
            return self.faults[path]
        if path == "/seed_session":
            self.counts[f"s={number}"] = 0
            return Answer({}, headers={"set-cookie": f"s={number}; path=/; httponly"})
        if path == "/add":
            self.counts[headers["cookie"]] += body["n"]
            return {"count": self.counts[headers["cookie"]]}
        assert path == "/verify"
        reward = float(self.counts[headers["cookie"]] == body["goal"])
        return {**body, "reward": reward, "is_done": True, "note": "x"}


@pytest.fixture
def play(tmp_path):
    def play(server, *messages, rows=None, cut=False, **keys):
        """Returns the environment, its steps (or the reward of a cut attempt), the requests."""
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps(values) + "\n" for values in rows or [row()]))
        with serve(server) as server.fake:
            keys = {"url": server.fake.url, "train": str(file), **keys}
            environment = build(resolve("environment", {"kind": "nemo_gym", **keys}))

            async def attempt():
                task = next(environment.tasks("train", seed=0))
                try:
                    prompt = list(await environment.reset(task))
                    if cut:
                        return await environment.reward_cut_attempt([*prompt, *messages])
                    return [await environment.step(message) for message in messages]
                finally:
                    await environment.close()

            return environment, asyncio.run(attempt()), server.fake.seen

    return play


def call(n, name="add"):
    return Message("assistant", tool_calls=(ToolCall(f"call_{n}", name, {"n": n}),))


def test_the_verifier_judges_the_calls_of_a_session(play):
    said = Message("assistant", "<think>1 + 2</think>Done.")
    environment, steps, requests = play(Counter(), call(1), call(2), call(9, "../verify"), said)
    assert [step.reward for step in steps] == [None, None, None, 1.0]
    assert [message.text for step in steps for message in step.messages] == [
        '{"count": 1}',
        '{"count": 3}',
        "Error: there is no tool '../verify'; there are add",
    ]
    assert steps[2].metrics == {"tool_calls": 1.0, "tool_errors": 1.0}
    assert (steps[3].done, steps[3].metrics) == (True, {"is_done": 1.0})
    assert [path for path, *_ in requests] == ["/seed_session", "/add", "/add", "/verify"]
    response = requests[-1][2]["response"]
    assert [item["type"] for item in response["output"]] == [
        *["function_call", "function_call_output"] * 3,
        "reasoning",
        "message",
    ]
    assert response["output"][-1]["content"][0]["text"] == "Done."
    assert environment.has_tools


@pytest.mark.medium
@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ({"seed_session": Answer({"detail": "no"}, 422)}, "seed_session answered 422"),
        ({"add": Answer("boom", 500)}, "add answered 500: boom"),
        ({"add": HANG}, "did not answer within 0.3 s"),
        ({"verify": BROKEN_OFF}, "verify gave no answer"),
        ({"verify": Answer("oops", 500)}, "verify answered 500"),
        ({"verify": "[1]"}, "no JSON object"),
        ({"verify": {}}, "is None, but must be a finite number"),
        ({"verify": {"reward": True}}, "is True, but must be a finite number"),
        ({"verify": '{"reward": NaN}'}, "is nan, but must be a finite number"),
        ({"verify": {"reward": 10**400}}, "is 1000.*, but must be a finite number"),
        ({"verify": {"reward": 0.0, "_ng_failure_class": "judge_failed"}}, "judge_failed"),
    ],
)
def test_a_fault_of_a_server_fails_the_attempt(play, fault, sentence):
    # A short limit is only for the one that waits: on a busy machine others would meet it.
    timeout_s = 0.3 if HANG in fault.values() else 5
    with pytest.raises(ServerFault, match=sentence):
        play(Counter(**fault), call(1), Message("assistant", "Done."), timeout_s=timeout_s)


def test_attempts_end_at_limits(play):
    _, steps, _ = play(Counter(), call(3), max_turns=1)
    assert (steps[0].reward, steps[0].done, steps[0].metrics["tool_calls"]) == (1.0, True, 1.0)
    plain = {"responses_create_params": {"input": "Write.", "tools": None}, "goal": 0}
    _, reward, requests = play(Counter(), Message("assistant", "I wo"), cut=True, rows=[plain])
    assert reward == 1.0
    assert requests[-1][2]["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    failing = Counter(add=Answer("boom", 500))
    _, steps, _ = play(failing, call(3), show_tool_failures=True)
    assert (steps[0].messages[0].text, steps[0].metrics["tool_errors"]) == ("boom", 1.0)


def test_rows_are_split_and_checked(play, tmp_path):
    rows = [row(f"{i % 20}") for i in range(30)]
    environment, *_ = play(Counter(), rows=rows)
    prompts = [
        {task.messages[0].text for task in environment.rows(split)} for split in ("train", "test")
    ]
    assert not prompts[0] & prompts[1]
    assert len(prompts[0] | prompts[1]) == 20
    (tmp_path / "test.jsonl").write_text(json.dumps(row()))
    with pytest.raises(DataError, match="this input is also in"):
        play(Counter(), test=str(tmp_path / "test.jsonl"))
    for values, sentence in [
        ({"name": "verify"}, "can't be called 'verify'"),
        ({"name": "a/b"}, "can't be called 'a/b'"),
        ({"type": "web_search"}, "must be a function"),
    ]:
        bad = {"responses_create_params": {"input": "1", "tools": [{**ADD, **values}]}}
        with pytest.raises(DataError, match=f"rows.jsonl, line 1.*{sentence}"):
            play(Counter(), rows=[bad])


def test_items_become_messages_and_back():
    items = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "Add."}]},
        {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "Hm."}]},
        {"type": "function_call", "call_id": "a", "name": "add", "arguments": '{"n": 1}'},
        {"type": "function_call", "call_id": "b", "name": "add", "arguments": '{"n": 2}'},
        {"type": "function_call_output", "call_id": "a", "output": "1"},
    ]
    calls = (ToolCall("a", "add", {"n": 1}), ToolCall("b", "add", {"n": 2}))
    messages = read_input({"instructions": "Add.", "input": items}, "row")
    assert messages == (
        Message("system", "Add."),
        Message("system", "Be brief."),
        Message("user", "Add."),
        Message("assistant", "<think>Hm.</think>", calls),
        Message("tool", "1", tool_call_id="a"),
    )
    assert [item["type"] for item in describe_turn(messages[3], 0)] == [
        "reasoning",
        "function_call",
        "function_call",
    ]
    with pytest.raises(DataError, match="item 0 is of type 'item_reference'"):
        read_input({"input": [{"type": "item_reference", "id": "x"}]}, "row")
    for params, sentence in [
        ({"input": [{**items[5], "call_id": None}]}, "item 0 has no call_id"),
        ({"input": "1", "instructions": ["Add."]}, "instructions is an array, must be text"),
    ]:
        with pytest.raises(DataError, match=sentence):
            read_input(params, "row")
    with pytest.raises(DataError, match="tools is an integer, must be an array of functions"):
        read_function_tools({"tools": 5}, "row")


@pytest.fixture
def gym_server(repository, tmp_path, monkeypatch):
    """The address of NeMo Gym's own server of counters, started as the page says."""
    monkeypatch.chdir(tmp_path)
    written(repository / "docs" / "integrations" / "nemo-gym.md", tmp_path)
    module = "resources_servers.example_session_state_mgmt.app"
    with started(PYTHON, "serve_gym.py", module, "StatefulCounterResourcesServer") as url:
        yield url


def read_examples(name, url="http://127.0.0.1:1"):
    """The environment of the example rows that the package has for one of its servers."""
    path = f"lib/python*/site-packages/resources_servers/{name}/data/example.jsonl"
    (rows,) = PYTHON.parents[1].glob(path)
    return build(resolve("environment", {"kind": "nemo_gym", "url": url, "train": str(rows)}))


@pytest.mark.slow
@needs_package
def test_a_server_of_the_package_gives_trainable_rows(gym_server, tmp_path):
    """Its own rows earn 1 by its own tools, and the page's recipe trains."""
    environment = read_examples("example_session_state_mgmt", gym_server)
    tasks = [*environment.rows("train"), *environment.rows("test")]
    (counting,) = (task for task in tasks if "add 1 then add 2" in task.messages[0].text)

    async def solve(task, *numbers):
        await environment.reset(task)
        calls = [ToolCall(f"c{n}", "increment_counter", {"count": n}) for n in numbers]
        step = await environment.step(Message("assistant", tool_calls=tuple(calls)))
        last = await environment.step(Message("assistant", "Done."))
        await environment.close()
        return [message.text for message in step.messages], last.reward

    assert asyncio.run(solve(counting, 1, 2)) == (['{"success":true}'] * 2, 1.0)  # from 3 to 6
    assert asyncio.run(solve(counting, 2))[1] == 0.0
    rows = [row(f"{n}", initial_count=0, expected_count=0) for n in range(20)]
    Path("zeros.jsonl").write_text("".join(json.dumps(line) + "\n" for line in rows))
    zeros = {"kind": "nemo_gym", "url": gym_server, "train": "zeros.jsonl"}
    check_environment(build(resolve("environment", zeros)), n=2)
    lines = [{**row(f"Reach {n}."), "initial_count": n, "expected_count": 2} for n in (2, 3)]
    Path("counts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    trained = ratchet("train", "with_gym.yaml", "threads=1", f"environment.url={gym_server}")
    assert trained.returncode == 0, trained.stdout + trained.stderr
    (metrics,) = tmp_path.glob("runs/*/metrics.jsonl")
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    rewards = [line["rollout/reward"] for line in lines if "rollout/reward" in line]
    assert rewards == [0.5, 0.5]


@pytest.mark.slow
@needs_package
def test_example_rows_of_the_package_are_read():
    folders = [path.parents[1] for path in PYTHON.parents[1].rglob("example.jsonl")]
    names = [folder.name for folder in folders if folder.parent.name == "resources_servers"]
    without_input = {"aviary", "gdpval", "scicode"}
    for name in names:
        environment = read_examples(name)
        if name in without_input:
            with pytest.raises(DataError, match="input is an empty array"):
                environment.rows("train")
        else:
            assert [*environment.rows("train"), *environment.rows("test")]
    assert (len(names), without_input - {*names}) == (95, set())
