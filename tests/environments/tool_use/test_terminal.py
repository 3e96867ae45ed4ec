"""The terminal: tasks solved by commands in real sessions, judged where the agent has never
been."""

from __future__ import annotations

import asyncio
import json

import pytest
from sandbox.fake_docker import PYTHON, FakeDocker
from sandbox.test_attacks import need

from ratchet.config.resolve import build, resolve
from ratchet.environments.tool_use.shell import extract_commands, format_result
from ratchet.errors import DataError
from ratchet.sandbox import Isolation, Reason, Result, SandboxError
from ratchet.testing import check_environment
from ratchet.types import Message, ToolCall


def row(n, **more):
    return {
        "goal": f"Write the sum of numbers.txt, and {n}, into sum.txt.",
        "files": {"numbers.txt": "1\n2\n"},
        "check": 'cat "$WORK/sum.txt"',
        "expected": f"{3 + n}\n",
        "solution": [
            f"total={n}; while read x; do total=$((total + x)); done < numbers.txt; export total",
            'echo "$total" > sum.txt',
        ],
        **more,
    }


@pytest.fixture
def data(tmp_path):
    def write(name, rows):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(values) + "\n" for values in rows))
        return str(path)

    return write


@pytest.fixture
def made(data):
    made = []

    def make(rows, **keys):
        need(Isolation.NAMESPACES)
        train, test = data("train", rows), data("test", [row(1000)])
        made.append(
            build(
                resolve("environment", {"kind": "terminal", "train": train, "test": test, **keys})
            )
        )
        return made[-1]

    yield make
    for environment in made:
        environment.sandbox.close()


def play(environment, *texts):
    """The reward at the end, and what the agent saw."""

    async def main():
        task = next(environment.tasks("train", seed=0))
        await environment.reset(task)
        seen = []
        for said in texts:
            step = await environment.step(
                said if isinstance(said, Message) else Message("assistant", said)
            )
            seen += [message.text for message in step.messages]
            if step.done:
                return step.reward, seen
        return None, seen

    return asyncio.run(main())


def block(command):
    return f"I will try this.\n```sh\n{command}\n```\n"


@pytest.mark.slow
def test_it_keeps_the_contract_in_local_sessions(made):
    check_environment(made([row(n) for n in range(3)]))


@pytest.mark.slow
@pytest.mark.needs("httpx2")
@pytest.mark.needs("nsenter")
def test_it_keeps_the_contract_in_containers(made):
    engine = FakeDocker()
    keys = {"kind": "docker", "address": engine.address, "python": PYTHON}
    check_environment(made([row(n) for n in range(2)], sandbox=keys))
    # What the kit's faults left can't have been removed while the engine was out of reach; nothing
    # of it runs.
    assert all(
        left.process is None or left.process.poll() is not None
        for left in engine.containers.values()
    )
    engine.close()


@pytest.mark.medium
def test_the_goal_reached_earns_1_and_anything_else_0(made):
    environment = made([row(4)])
    assert play(environment, block("cat numbers.txt"), block("echo 7 > sum.txt"), "Done.") == (
        1.0,
        ["1\n2\n", "[exit code 0]"],
    )
    assert play(environment, block("echo 8 > sum.txt"), "Done.")[0] == 0.0
    assert play(environment, "I give up.")[0] == 0.0


@pytest.mark.medium
def test_the_tool_does_what_a_block_does(made):
    environment = made([row(4)])
    calls = (
        ToolCall("call_0", "bash", {"command": "echo 7 > sum.txt; cat sum.txt"}),
        ToolCall("call_1", "python", {"code": "1"}),
    )
    reward, seen = play(environment, Message("assistant", "", tool_calls=calls), "Done.")
    assert (reward, seen) == (1.0, ["7\n", "there is no such call: call bash with a command"])
    (tool,) = environment.tools(None)
    assert tool["function"]["name"] == "bash"


@pytest.mark.medium
def test_the_check_is_out_of_reach(made):
    """Neither its files nor its tools are the agent's: what was put over them, or waits for them,
    is not there any more."""
    checks = {
        "check": "sh check.sh",
        "check_files": {"check.sh": 'test "$(cat "$WORK/sum.txt")" = 7 && echo right'},
        "expected": "right",
    }
    environment = made([row(4, **checks)])
    listed = play(environment, block("ls"), "Done.")
    assert listed == (0.0, ["numbers.txt\n"])
    cheat = (
        "echo 'echo right' > check.sh; cat() { echo 7; }; export PATH=.:$PATH; echo 'echo 7' "
        "> "
        "cat; chmod +x cat"
    )
    waits = "(while :; do echo 'echo right' > check.sh; done) >/dev/null 2>&1 &"
    assert play(environment, block(cheat), block(waits), "Done.")[0] == 0.0
    assert play(environment, block("echo 7 > sum.txt"), "Done.")[0] == 1.0


@pytest.mark.medium
def test_the_number_of_commands_and_their_time_are_bounded(made):
    environment = made([row(4)], commands=2, command_timeout_s=0.5)
    reward, seen = play(environment, block("sleep 1000"), block("echo 7 > sum.txt"), "never said")
    assert (reward, seen) == (1.0, ["[wall]"])


@pytest.mark.medium
def test_a_check_that_says_it_by_its_exit_code(made):
    environment = made([row(4, expected=None, check='test -s "$WORK/sum.txt"')])
    assert [
        play(environment, block(f"{command} > sum.txt"), "Done.")[0]
        for command in ("echo x", "true")
    ] == [1.0, 0.0]


@pytest.mark.medium
def test_a_broken_sandbox_is_raised_and_never_a_reward(made):
    environment = made([row(4)])
    environment.sandbox.close()
    with pytest.raises(SandboxError, match="closed"):
        play(environment, block("ls"))


@pytest.mark.medium
@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ({"files": ["a"]}, "line 1: column 'files'"),
        ({"files": {"a": 1}}, "line 1: column 'files' must map each file name to its text"),
        ({"check": 1}, "check"),
    ],
)
def test_bad_rows_are_named(made, bad, why):
    with pytest.raises(DataError, match=why):
        next(made([row(1, **bad)]).tasks("train", seed=0))


def test_what_is_a_command_and_what_is_shown():
    assert extract_commands(Message("assistant", "```python\n1\n```")) == []
    assert extract_commands(Message("assistant", "```\nls\n```\nor\n```bash\npwd\ncd /\n```")) == [
        ("", "pwd\ncd /\n")
    ]
    assert (
        format_result(Result(0, None, b"a" * 300, b"", 0.0, Reason.EXIT), 100)
        == f"{'a' * 50}\n[200 characters left out]\n{'a' * 50}"
    )
    assert (
        format_result(Result(2, None, b"out\n", b"err\n", 0.0, Reason.EXIT), 100)
        == "out\nerr\n[exit code 2]"
    )
