"""The official client talks with the policy; what was recorded is what was sampled."""

import asyncio
import json

import numpy as np
import pytest
from experience.openai_proxy.talk import (
    CALLS,
    EOS,
    RENDERER,
    TOOLS,
    Scripted,
    converse,
    only,
    said,
    sampling,
    serving,
)

from ratchet.experience.openai_proxy.answers import ChatFormat
from ratchet.experience.openai_proxy.replies import stream_reply
from ratchet.experience.openai_proxy.schema import ChatRequest
from ratchet.experience.openai_proxy.session import AgentSession
from ratchet.types import Owner

pytestmark = [pytest.mark.needs("fastapi"), pytest.mark.needs("openai")]


def text(tokens):
    return RENDERER.tokenizer.decode(list(tokens), skip_special=False)


@pytest.mark.parametrize("stream", [False, True])
def test_three_turns_with_tools_are_one_trajectory_of_the_sampled_tokens(stream):
    async def scene():
        generator = Scripted()
        async with serving(generator) as (session, client):
            messages = await converse(client, stream=stream)
        return generator, messages, session.trajectories(3, None, {})

    generator, messages, trajectories = asyncio.run(scene())
    row = only(trajectories)
    assert [
        json.loads(m["tool_calls"][0]["function"]["arguments"]) for m in (messages[1], messages[3])
    ] == [
        {"a": 1, "b": 2},
        {"a": 3, "b": 4},
    ]
    assert [messages[i]["tool_calls"][0]["id"] for i in (1, 3)] == ["call_0", "call_1"]
    assert messages[1]["content"] == "I add."
    assert messages[5]["content"] == "It is 7."
    assert [text(row.tokens[turn.start : turn.end]) for turn in row.turns] == [
        f"{line}<eos>" for line in CALLS
    ]
    sampled = row.owner == Owner.POLICY
    for name, column in (
        ("tokens", row.tokens),
        ("logprobs", row.rollout_logprobs),
        ("versions", row.versions),
    ):
        drawn = np.concatenate([getattr(completion, name) for completion in generator.completions])
        np.testing.assert_array_equal(column[sampled], drawn)
    np.testing.assert_array_equal(row.trainable, sampled)
    # Each prompt is what had been recorded by then, and the tools' answers stand between.
    for (prompt, _), turn in zip(generator.requests, row.turns, strict=True):
        assert prompt == row.tokens[: turn.start].tolist()
    assert text(row.tokens[row.turns[0].end : row.turns[1].start]) == "<tool>5<assistant>"
    assert text(row.tokens[: row.turns[0].start]).startswith(
        '<system>[{"type": "function", "function": {"name": "add"'
    )
    assert (row.attempt, row.temperature, len(row.messages)) == (3, 1.0, 6)
    assert row.metrics == {
        "turns": 3.0,
        "forks": 0.0,
        "turn_limit": 0.0,
        "retries": 0.0,
        "malformed_tool_calls": 0.0,
    }


def test_usage_counts_the_tokens_and_logprobs_are_the_recorded_ones():
    async def scene():
        generator = Scripted(["a€"])
        async with serving(generator) as (session, client):
            question = [{"role": "user", "content": "hi"}]
            _, answer = await said(client, question, logprobs=True)
            _, chunks = await said(
                client, question, logprobs=True, stream=True, stream_options={"include_usage": True}
            )
        return answer, chunks, session.trajectories(0, None, {})

    answer, chunks, rows = asyncio.run(scene())
    prompt, drawn = 4, 5  # <user>hi<assistant>; a, the three bytes of the sign, <eos>
    assert (
        answer.usage.prompt_tokens,
        answer.usage.completion_tokens,
        answer.usage.total_tokens,
    ) == (prompt, drawn, 9)
    assert chunks[-1].usage == answer.usage
    assert chunks[-1].choices == []
    streamed = [c.choices[0].logprobs for c in chunks if c.choices and c.choices[0].logprobs]
    for content, row in (
        (answer.choices[0].logprobs.content, rows[0]),
        (streamed[0].content, rows[1]),
    ):
        assert [c.logprob for c in content] == row.rollout_logprobs[prompt:].tolist()
        assert (content[0].token, content[-1].token) == ("a", "<eos>")
    assert answer.choices[0].message.content == "a€"
    assert (answer.object, answer.model, answer.choices[0].finish_reason) == (
        "chat.completion",
        "policy",
        "stop",
    )
    assert answer.choices[0].message.tool_calls is None


def test_limits_and_stop_strings_of_a_request():
    async def scene():
        generator = Scripted(["one two"])
        async with serving(generator, max_new_tokens=6) as (session, client):
            question = [{"role": "user", "content": "hi"}]
            _, short = await said(client, question, max_tokens=3, stop=["x"])
            assert not session.latest_answer.cut, "the agent's own limit is not a budget of the run"
            (row,) = session.trajectories(0, None, {})
            assert row.is_cut_short, "but it took the end off the answer"
            _, cut = await said(client, question, max_completion_tokens=99, stop="y", seed=1)
            assert session.latest_answer.cut
        return short, cut, [sampling for _, sampling in generator.requests]

    short, cut, asked = asyncio.run(scene())
    assert (short.choices[0].message.content, short.choices[0].finish_reason) == ("one", "length")
    assert (cut.choices[0].message.content, cut.choices[0].finish_reason) == ("one tw", "length")
    assert [(s.max_new_tokens, s.stop) for s in asked] == [(3, ("x",)), (6, ("y",))]


@pytest.mark.medium
def test_seeds_depend_on_the_attempt_and_the_conversation_alone():
    async def seeds(attempt, order, **more):
        generator = Scripted(["a"])
        async with serving(generator, seed=attempt) as (_, client):
            for question in order:
                await said(client, [{"role": "user", "content": question}], **more)
        return [sampling.seed for _, sampling in generator.requests]

    async def scene():
        a, b, again = await seeds(1, ["a", "b", "a"])
        assert len({a, b, again}) == 3, "a second try is another draw"
        assert await seeds(1, ["b", "a", "a"]) == [b, a, again]
        assert a not in await seeds(2, ["a", "b", "a"])
        one, two = await seeds(1, ["a", "a"], seed=5)
        assert one == two != (await seeds(2, ["a"], seed=5))[0]

    asyncio.run(scene())


def test_tool_choice_none_hides_the_tools():
    async def scene():
        generator = Scripted([CALLS[1]])
        async with serving(generator) as (session, client):
            message, answer = await said(
                client, [{"role": "user", "content": "hi"}], tools=TOOLS, tool_choice="none"
            )
        return message, answer, text(session.latest_answer.tokens)

    message, answer, tokens = asyncio.run(scene())
    assert message["tool_calls"] is None
    assert message["content"] == CALLS[1]
    assert answer.choices[0].finish_reason == "stop"
    assert tokens.startswith("<user>hi<assistant>")


def test_a_malformed_call_stays_text_and_is_counted():
    async def scene():
        async with serving(Scripted(['<tool_call>\n{"name": add}\n</tool_call>'])) as (
            session,
            client,
        ):
            message, _ = await said(client, [{"role": "user", "content": "hi"}], tools=TOOLS)
            return message, only(session.trajectories(0, None, {}))

    message, row = asyncio.run(scene())
    assert message["tool_calls"] is None
    assert message["content"].startswith("<tool_call>")
    assert row.metrics["malformed_tool_calls"] == 1.0
    assert row.tokens[-1] == EOS


def test_the_model_is_listed():
    async def scene():
        async with serving(Scripted()) as (_, client):
            return [model.id async for model in client.models.list()]

    assert asyncio.run(scene()) == ["policy"]


def test_a_client_that_leaves_at_the_reason_of_the_end_has_its_answer():
    """Usage comes behind it, which a client need not wait for."""
    body = json.dumps(
        {
            "model": "policy",
            "messages": [{"role": "user", "content": "1+2?"}],
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()

    async def scene():
        session = AgentSession(Scripted(), RENDERER, sampling(), max_context=4096, max_turns=1)
        request = ChatRequest.read(body)
        events = stream_reply(session, request, ChatFormat(request, "chatcmpl-1"))
        async for event in events:
            if '"finish_reason": "' in event:
                break
        await events.aclose()
        return session.trajectories(3, None, {})

    assert only(asyncio.run(scene())).metrics["turns"] == 1.0
