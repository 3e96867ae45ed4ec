"""Attempts that agents play: what each end of an agent makes of its attempt."""

import asyncio
import json
import sys
import threading
import time

import pytest
from experience.openai_proxy.talk import TOOLS, Scripted, converse, said, sampling
from openai import AsyncOpenAI, OpenAI

from ratchet.experience.openai_proxy.agents import MAX_OUTPUT, CommandAgent
from ratchet.experience.openai_proxy.config import AgentServerSettings, CommandConfig
from ratchet.experience.openai_proxy.player import AgentPlayer
from ratchet.experience.openai_proxy.server import Proxy
from ratchet.experience.rollout.manager import RolloutManager
from ratchet.testing.fakes import FakeEnvironment, FakeReward
from ratchet.types import (
    Cancelled,
    Completion,
    Failed,
    Message,
    Scored,
    StopReason,
    Task,
    Truncated,
)

pytestmark = [pytest.mark.needs("fastapi"), pytest.mark.needs("openai")]

TASK = Task("t/0", (Message("user", "1+2?"),), answer="3", tag="sums", seed=5)


def play(
    act, generator=None, *, timeout_s=60.0, max_context=4096, max_turns=64, ignored=(), **sampled
):
    from experience.openai_proxy.talk import RENDERER

    player = AgentPlayer(
        act,
        generator or Scripted(["a"]),
        RENDERER,
        max_context=max_context,
        max_turns=max_turns,
        timeout_s=timeout_s,
        proxy=Proxy(settings=AgentServerSettings(ignored)),
    )
    return asyncio.run(player.play(TASK, FakeEnvironment(), sampling(**sampled), attempt=2))


async def ask(task, base_url, api_key):
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        messages = [{"role": m.role, "content": m.text} for m in task.messages]
        message, _ = await said(client, messages)
    return message["content"]


def ask_in_a_thread(task, base_url, api_key):
    with OpenAI(base_url=base_url, api_key=api_key) as client:
        answer = client.chat.completions.create(
            model="policy", messages=[{"role": "user", "content": task.messages[0].text}]
        )
    return (
        threading.current_thread() is not threading.main_thread()
        and answer.choices[0].message.content
    )


class Asks:
    async def __call__(self, task, base_url, api_key):
        return await ask(task, base_url, api_key)


@pytest.mark.parametrize("act", [ask, ask_in_a_thread, Asks()])
def test_an_agent_of_any_kind_plays_an_attempt(act):
    (row,) = play(act)
    assert [m.text for m in row.messages] == ["1+2?", "a"]
    assert (row.outcome, row.attempt, row.extras["result"], row.metrics["turns"]) == (
        None,
        2,
        "a",
        1.0,
    )


async def ask_warmly(task, base_url, api_key):
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        for _ in range(2):
            answer = await client.chat.completions.create(
                model="policy",
                messages=[{"role": "user", "content": "1+2?"}],
                temperature=0.7,
                response_format={"type": "json_object"},
            )
    return answer.choices[0].message.content


def test_ignored_fields_of_requests_have_no_effect_and_are_logged_once(caplog):
    (refused,) = play(ask_warmly)
    assert isinstance(refused.outcome, Failed)
    caplog.clear()
    rows = play(ask_warmly, Scripted(["a", "b"]), ignored=("temperature", "response_format"))
    assert [(row.outcome, row.extras["result"], row.temperature) for row in rows] == [
        (None, "b", 1.0),
        (None, "b", 1.0),
    ]
    assert [record.getMessage().split(",")[0] for record in caplog.records] == [
        'a request has response_format={"type": "json_object"}',
        "a request has temperature=0.7",
    ]


PROGRAM = """
import json, os, sys, urllib.request
task = json.load(sys.stdin)
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps({"model": "policy", "messages": task["messages"]}).encode(),
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
)
print(sorted(task), json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"])
"""


def command(program, **more):
    return CommandAgent(CommandConfig(command=(sys.executable, "-c", program), **more))


def test_a_program_plays_an_attempt(tmp_path):
    (row,) = play(command(PROGRAM))
    assert row.extras["result"].strip() == "['id', 'messages', 'seed', 'tag'] a"
    assert row.outcome is None
    (row,) = play(command("import os; print(os.getcwd())", directory=str(tmp_path)))
    assert row.extras["result"].strip() == str(tmp_path)


@pytest.mark.medium
def test_a_program_that_fails_floods_or_does_not_read_costs_its_attempt():
    (row,) = play(command(PROGRAM + "\nsys.exit('broken')"))
    assert row.outcome.kind == "agent"
    assert row.outcome.detail.rstrip().endswith("ended with status 1: broken")
    (row,) = play(command(PROGRAM + f"\nprint('x' * {3 * MAX_OUTPUT}, 'end')"))
    assert (len(row.extras["result"]), row.extras["result"][-4:-1]) == (MAX_OUTPUT, "end")
    (row,) = play(command("import os; os.close(0)"))
    assert row.outcome == Failed(
        "agent", "it ended without requesting an answer, so there is nothing to learn from"
    )
    (row,) = play(CommandAgent(CommandConfig(command=("/no/such/program",))))
    assert "No such file" in row.outcome.detail


def test_what_a_program_leaves_behind_is_killed(tmp_path):
    """The child holds the outputs open for ever; the attempt ends nonetheless."""
    child = "import time; open('pid', 'w').write('x'); time.sleep(1000)"
    leaves = f"""
import os, subprocess, sys, time
started = subprocess.Popen([sys.executable, "-c", {child!r}])
while not os.path.exists("pid"): time.sleep(0.01)
print(started.pid)
"""
    (row,) = play(command(leaves, directory=str(tmp_path)))
    assert not alive(int(row.extras["result"]))


@pytest.mark.slow
def test_a_program_that_is_late_is_killed(tmp_path):
    hangs = "import os, time; open('pid', 'w').write(str(os.getpid())); time.sleep(1000)"
    (row,) = play(command(hangs, directory=str(tmp_path)), timeout_s=2.0)
    assert row.outcome == Failed("timeout", "the agent took more than 2 s")
    assert not alive(int((tmp_path / "pid").read_text()))


def alive(pid, patience_s=20):
    """Whether it still is after a while: a kill is not instant."""
    for _ in range(100 * patience_s):
        try:
            with open(f"/proc/{pid}/stat", encoding="ascii") as state:
                if state.read().rpartition(")")[2].split()[0] in "ZX":
                    return False
        # the latter where it ends between opening and reading
        except (FileNotFoundError, ProcessLookupError):
            return False
        time.sleep(0.01)
    return True


@pytest.mark.parametrize(
    "error",
    [ValueError("no idea"), SystemExit(3), asyncio.CancelledError("odd"), StopIteration("x")],
)
def test_an_agent_that_raises_costs_its_attempt_and_keeps_its_tokens(error):
    async def breaks(task, base_url, api_key):
        await ask(task, base_url, api_key)
        raise error

    def breaks_in_a_thread(task, base_url, api_key):
        ask_in_a_thread(task, base_url, api_key)
        raise error

    for act in (breaks, breaks_in_a_thread):
        (row,) = play(act)
        assert row.outcome.kind == "agent"
        assert not row.is_usable
        assert row.completion_length == 2


def test_an_agent_that_asks_nothing_fails():
    async def idle(task, base_url, api_key):
        return 1

    (row,) = play(idle)
    assert row.outcome.kind == "agent"
    assert len(row) == 1


@pytest.mark.medium
def test_an_agent_that_is_late_fails_and_what_it_had_running_is_aborted():
    generator = Scripted(["a"])
    generator.hold = asyncio.Event()
    (row,) = play(ask, generator, timeout_s=3)
    assert row.outcome == Failed("timeout", "the agent took more than 3 s")
    assert generator.cancelled == 1


@pytest.mark.slow
@pytest.mark.fault("R10")
def test_a_thread_that_is_late_is_refused_from_then_on():
    ended, over, refused = threading.Event(), threading.Event(), []

    def late(task, base_url, api_key):
        ask_in_a_thread(task, base_url, api_key)
        ended.wait(60)
        try:
            ask_in_a_thread(task, base_url, api_key)
        except Exception as error:
            refused.append(type(error).__name__)
        finally:
            over.set()

    (row,) = play(late, timeout_s=0.5)
    assert (row.outcome.kind, row.metrics["turns"]) == ("timeout", 1.0)
    ended.set()
    assert over.wait(60)
    assert refused == ["APIConnectionError"]


@pytest.mark.medium
def test_used_up_budgets_truncate_even_where_the_agent_breaks_of_it():
    async def endless(task, base_url, api_key):
        messages = [{"role": "user", "content": "hi"}]
        async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            while True:
                message, _ = await said(client, messages)
                messages += [message, {"role": "user", "content": "more"}]

    (row,) = play(endless, max_turns=3)
    assert (row.outcome, row.metrics["turns"], row.metrics["turn_limit"]) == (Truncated(), 3.0, 1.0)
    (row,) = play(endless, max_context=30)
    assert (row.outcome, row.metrics["turn_limit"], row.is_cut_short) == (Truncated(), 0.0, False)
    (row,) = play(endless, max_context=3)
    assert row.outcome.kind == "prompt_too_long"
    (row,) = play(ask, max_new_tokens=1)
    assert (row.outcome, row.is_cut_short) == (Truncated(), True)


def test_an_abort_cancels_the_attempt_and_the_generators_errors_go_up():
    class Aborting(Scripted):
        async def generate(self, tokens, sampling, media=()):
            done = await super().generate(tokens, sampling, media)
            return Completion(
                done.tokens, done.logprobs, done.log_kept_mass, done.versions, StopReason.ABORTED
            )

    (row,) = play(ask, Aborting(["a"]))
    assert row.outcome == Cancelled("aborted")

    class Broken(Scripted):
        async def generate(self, tokens, sampling, media=()):
            raise MemoryError("full")

    with pytest.raises(MemoryError, match="full"):
        play(ask, Broken())


@pytest.mark.medium
def test_groups_of_agents_are_judged_with_their_results():
    from experience.openai_proxy.talk import RENDERER

    async def act(task, base_url, api_key):
        async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            first = await converse(client, turns=2)
            # forks
            await said(client, [{"role": "user", "content": task.messages[0].text}], tools=TOOLS)
        return json.dumps(first[1])

    reward = FakeReward(
        lambda row, task: float(
            len(row.messages) == 2 and '"role": "assistant"' in row.extras["result"]
        )
    )

    async def scene():
        player = AgentPlayer(act, Scripted(["b"]), RENDERER, max_context=4096)
        manager = RolloutManager(player, FakeEnvironment, reward)
        groups = await manager.groups(
            [("g/0", TASK), ("g/1", TASK)], sampling(), attempts=3, greedy=True
        )
        await manager.close()
        return groups

    for group in asyncio.run(scene()):
        assert [row.attempt for row in group.trajectories] == [0, 0, 1, 1, 2, 2, 3, 3]
        assert all(row.outcome == Scored(1.0) for row in group.trajectories)
        assert [row.temperature for row in group.trajectories][-2:] == [0.0, 0.0]


class Panic(BaseException):
    """As of a library in Rust."""


def test_nothing_that_an_agent_raises_ends_more_than_its_attempt():
    async def panics(task, base_url, api_key):
        await ask(task, base_url, api_key)
        raise Panic

    async def cancels_itself(task, base_url, api_key):
        await ask(task, base_url, api_key)
        asyncio.current_task().cancel()
        await asyncio.sleep(60)

    for act in panics, cancels_itself:
        (row,) = play(act)
        assert row.outcome.kind == "agent", act


@pytest.mark.medium
def test_an_agent_that_catches_its_cancellation_is_cancelled_again(monkeypatch):
    def catching(most):
        async def act(task, base_url, api_key):
            for _ in range(most):
                try:
                    await asyncio.sleep(60)
                except asyncio.CancelledError:
                    caught.append(most)

        return act

    caught: list[int] = []
    monkeypatch.setattr("ratchet.experience.openai_proxy.player.CANCEL_EVERY_S", 0.1)
    monkeypatch.setattr("ratchet.experience.openai_proxy.player.STOP_S", 0.5)
    (row,) = play(catching(2), timeout_s=0.2)
    assert (row.outcome.kind, len(caught)) == ("timeout", 2)
    (row,) = play(catching(6), timeout_s=0.2)  # five times by `play`, then by the end of the loop
    assert (row.outcome.kind, len(caught)) == ("timeout", 8)
