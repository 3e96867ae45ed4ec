"""Which trajectories requests make: extended, forked, begun anew."""

import asyncio
import errno
import os
import socket
from contextvars import ContextVar

import numpy as np
import pytest
from experience.openai_proxy.talk import (
    RENDERER,
    TEMPLATE,
    TOOLS,
    Scripted,
    converse,
    only,
    said,
    serving,
)

from ratchet.data.chat.builtin_tokenizers import byte_tokenizer
from ratchet.data.chat.renderer import Renderer
from ratchet.errors import ConfigError
from ratchet.experience.openai_proxy.server import Proxy
from ratchet.types import Owner

pytestmark = [pytest.mark.needs("fastapi"), pytest.mark.needs("openai")]

HI = {"role": "user", "content": "hi"}
ON = {"role": "user", "content": "on"}


def text(tokens):
    return RENDERER.tokenizer.decode(list(tokens), skip_special=False)


def shown(row):
    """(what the policy read, what it wrote) of each turn"""
    return [
        (text(row.tokens[: turn.start]), text(row.tokens[turn.start : turn.end]))
        for turn in row.turns
    ]


def play(scene, *lines, **options):
    """The trajectories of a session after `await scene(client)`."""

    async def run():
        async with serving(Scripted(lines or ["a", "b", "c", "d"]), **options) as (session, client):
            await scene(client)
            return session.trajectories(0, None, {})

    return asyncio.run(run())


def test_a_history_that_was_edited_begins_a_trajectory_from_its_prompt():
    async def scene(client):
        first, _ = await said(client, [HI])
        await said(client, [HI, {**first, "content": "A"}, ON])

    one, two = play(scene)
    assert shown(one) == [("<user>hi<assistant>", "a<eos>")]
    assert shown(two) == [("<user>hi<assistant>A<eos><user>on<assistant>", "b<eos>")]
    assert (one.metrics["forks"], two.metrics["turns"]) == (1.0, 2.0)
    assert [m.text for m in two.messages] == ["hi", "A", "on", "b"]


def test_a_request_is_made_in_the_context_of_its_attempt_whoever_started_the_server():
    whose, seen = ContextVar("whose"), []

    class Asked(Scripted):
        async def generate(self, *request):
            seen.append(whose.get())
            return await super().generate(*request)

    async def attempt(name, proxy, both):
        whose.set(name)
        async with serving(Asked(["a"]), proxy=proxy) as (_, client):
            await both.wait()
            await said(client, [HI])

    async def run():
        proxy, both = Proxy(), asyncio.Barrier(2)
        await asyncio.gather(attempt("one", proxy, both), attempt("two", proxy, both))

    asyncio.run(run())
    assert sorted(seen) == ["one", "two"]


def test_two_ways_on_from_one_answer_share_its_tokens_and_train_them_once():
    async def scene(client):
        first, _ = await said(client, [HI])
        await said(client, [HI, first, ON])
        await said(client, [HI, first, {**ON, "content": "other"}])

    one, two = play(scene)
    assert shown(one) == [
        ("<user>hi<assistant>", "a<eos>"),
        ("<user>hi<assistant>a<eos><user>on<assistant>", "b<eos>"),
    ]
    assert shown(two) == [("<user>hi<assistant>a<eos><user>other<assistant>", "c<eos>")]
    assert int(one.trainable.sum() + two.trainable.sum()) == 6
    assert set(two.owner[: two.turns[0].start].tolist()) == {Owner.PROMPT}
    assert two.versions[two.turns[0].start - 3] == -1, (
        "a prompt's tokens have neither version nor logprob"
    )


def test_going_back_to_an_earlier_point_forks_there_and_the_latest_comes_last():
    async def scene(client):
        messages = [HI]
        for _ in range(3):
            messages += [(await said(client, messages))[0], ON]
        await said(client, messages[:3])
        await said(client, messages)

    rows = play(scene)
    assert [len(row.turns) for row in rows] == [1, 4]
    assert shown(rows[0])[0][0] == "<user>hi<assistant>a<eos><user>on<assistant>"
    assert len(rows[1].messages) == 8


def test_the_same_question_twice_makes_two_trajectories():
    async def scene(client):
        await asyncio.gather(said(client, [HI]), said(client, [HI]))

    assert sorted(shown(row)[0][1] for row in play(scene)) == ["a<eos>", "b<eos>"]


def test_parallel_requests_of_one_session_each_go_on_from_their_own():
    async def scene(client):
        async def branch(name):
            question = {"role": "user", "content": name}
            first, _ = await said(client, [question])
            await said(client, [question, first, ON])

        await asyncio.gather(*(branch(f"q{i}") for i in range(8)))

    rows = play(scene, "a")
    assert {shown(row)[-1][0] for row in rows} == {
        f"<user>q{i}<assistant>a<eos><user>on<assistant>" for i in range(8)
    }
    assert all(len(row.turns) == 2 for row in rows)


def test_other_tools_are_another_conversation():
    async def scene(client):
        first, _ = await said(client, [HI], tools=TOOLS)
        await said(client, [HI, first, ON])

    one, two = play(scene)
    assert text(one.tokens).startswith("<system>")
    assert shown(two) == [("<user>hi<assistant>a<eos><user>on<assistant>", "b<eos>")]


def test_a_template_that_rewrites_history_forks():
    """It drops what was thought, once somebody answers."""
    drops = TEMPLATE.replace(
        '(message.content or "")',
        '((message.content if loop.last else message.content.split("</think>")[-1]) or "")',
    )

    async def scene(client):
        messages = [HI]
        for _ in range(2):
            messages += [(await said(client, messages))[0], ON]

    rows = play(scene, "<think>x</think>a", renderer=Renderer(byte_tokenizer(), drops))
    assert [shown(row)[0][0] for row in rows] == [
        "<user>hi<assistant>",
        "<user>hi<assistant>a<eos><user>on<assistant>",
    ]


def test_how_a_client_writes_the_same_history_does_not_matter():
    """Arguments spaced otherwise, text in parts, the developer as system, and no content as
    null."""

    async def scene(client):
        messages = [{"role": "system", "content": "s"}, HI]
        first, _ = await said(client, messages, tools=TOOLS)
        (call,) = first["tool_calls"]
        arguments = call["function"]["arguments"].replace(" ", "")
        echoed = {
            "role": "assistant",
            "content": None,
            "tool_calls": [{**call, "function": {**call["function"], "arguments": arguments}}],
        }
        parts = [{"type": "text", "text": "5"}]
        history = [
            {"role": "developer", "content": "s"},
            {**HI, "content": [{"type": "text", "text": "hi"}]},
        ]
        await said(
            client,
            [*history, echoed, {"role": "tool", "tool_call_id": call["id"], "content": parts}],
            tools=TOOLS,
        )

    row = only(
        play(
            scene,
            '<tool_call>\n{"name": "add", "arguments": {"a": 1,   "b": 2}}\n</tool_call>',
            "3",
        )
    )
    assert len(row.turns) == 2


def test_a_stop_string_is_sampled_and_not_shown():
    """Random letters from a real engine: the string that ends the answer stays in the tokens."""
    from ratchet.config.model_shape.presets import get_preset
    from ratchet.models.load import init_policy
    from ratchet.training.stage import Policy

    tokenizer = byte_tokenizer()
    shape = get_preset("tiny", vocab_size=tokenizer.vocab_size, hidden_size=16, n_layers=1)
    policy = Policy.create(init_policy(shape, seed=0), tokenizer, template=TEMPLATE)

    async def run():
        async with serving(policy.generator, renderer=policy.renderer) as (session, client):
            first, free = await said(client, [HI], seed=1, max_tokens=40)
            string = free.choices[0].message.content[5:7]
            second, answer = await said(client, [HI], seed=1, max_tokens=40, stop=string)
            await said(client, [HI, second, ON], max_tokens=4)
            return first, string, second, answer, session.trajectories(0, None, {})

    first, string, second, answer, rows = asyncio.run(run())
    assert answer.choices[0].finish_reason == "stop"
    assert second["content"] == first["content"].partition(string)[0]
    assert len(rows) == 2, "the second conversation is one trajectory"
    written = rows[1].tokens[rows[1].turns[0].start : rows[1].turns[0].end]
    assert string in text(written)
    np.testing.assert_array_equal(
        rows[0].tokens[: rows[1].turns[0].end], rows[1].tokens[: rows[1].turns[0].end]
    )


@pytest.mark.medium
def test_three_turns_in_many_sessions_at_once_stay_apart():
    from ratchet.experience.openai_proxy.server import Proxy

    async def run():
        proxy, generators = Proxy(), [Scripted([f"s{i}", f"t{i}", f"u{i}"]) for i in range(12)]

        async def one(generator):
            async with serving(generator, proxy=proxy) as (session, client):
                await converse(client)
                return only(session.trajectories(0, None, {}))

        return await asyncio.gather(*map(one, generators))

    for i, row in enumerate(asyncio.run(run())):
        assert [wrote for _, wrote in shown(row)] == [f"{letter}{i}<eos>" for letter in "stu"]


def test_a_server_that_has_no_descriptor_does_not_blame_its_address(monkeypatch):
    def fail(number):
        def create_server(*_, **__):
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(socket, "create_server", create_server)

    proxy = Proxy()

    async def open_session():
        async with proxy.open(None):
            pass

    fail(errno.EMFILE)
    with pytest.raises(OSError, match="Too many open files"):
        asyncio.run(open_session())
    fail(errno.EADDRNOTAVAIL)
    with pytest.raises(ConfigError, match=r"agent\.host=127\.0\.0\.1 is not an address"):
        asyncio.run(open_session())
    assert not proxy._sessions
