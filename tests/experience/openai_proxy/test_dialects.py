"""Anthropic Messages and OpenAI Responses: the same sessions, tokens and errors as the chat API."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Sequence
from typing import Any

import httpx
import numpy as np
import pytest
from experience.openai_proxy.dialects import (
    HI,
    QUESTION,
    SYSTEM,
    ask,
    converse_anthropic,
    converse_responses,
    raw_client,
    read_events,
)
from experience.openai_proxy.malformed import WRONG_CHATS, WRONG_COMPLETIONS
from experience.openai_proxy.talk import CALLS, RENDERER, TOOLS, Scripted, only, said, serving

from ratchet.experience.openai_proxy.config import AgentServerSettings
from ratchet.experience.openai_proxy.server import Proxy
from ratchet.types import Owner, Trajectory

pytestmark = [pytest.mark.needs("fastapi"), pytest.mark.needs("openai")]

PATHS = ("/v1/messages", "/v1/responses")


def play_chat() -> Trajectory:
    async def scene() -> list[Trajectory]:
        async with serving(Scripted()) as (session, client):
            messages: list[Any] = [
                {"role": "system", "content": SYSTEM},
                {"role": "user", "content": QUESTION},
            ]
            for _ in range(3):
                message, _ = await said(client, messages, tools=TOOLS)
                messages.append(message)
                messages += [
                    {"role": "tool", "tool_call_id": call["id"], "content": "5"}
                    for call in message.get("tool_calls") or []
                ]
            return session.trajectories(0, None, {})

    return only(asyncio.run(scene()))


@pytest.mark.medium
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", ["anthropic", "responses", "responses by id"])
def test_every_dialect_records_the_tokens_of_the_chat(dialect: str, stream: bool) -> None:
    async def scene() -> tuple[list[dict[str, Any]], list[Trajectory]]:
        async with raw_client(Scripted()) as (session, raw):
            if dialect == "anthropic":
                answers = await converse_anthropic(raw, stream=stream)
            else:
                by_id = dialect == "responses by id"
                answers = await converse_responses(raw, stream=stream, by_id=by_id)
            return answers, session.trajectories(0, None, {})

    answers, rows = asyncio.run(scene())
    row, expected = only(rows), play_chat()
    for name in ("tokens", "owner", "trainable", "rollout_logprobs", "versions"):
        np.testing.assert_array_equal(getattr(row, name), getattr(expected, name))
    assert (row.turns, row.messages, row.metrics) == (
        expected.turns,
        expected.messages,
        expected.metrics,
    )
    sampled = (row.owner == Owner.POLICY).sum()
    assert sum(answer["usage"]["output_tokens"] for answer in answers) == sampled
    for answer, turn in zip(answers, row.turns, strict=True):
        assert answer["usage"]["input_tokens"] == turn.start
    if dialect == "anthropic":
        assert [answer["stop_reason"] for answer in answers] == ["tool_use", "tool_use", "end_turn"]
        assert [block["type"] for block in answers[0]["content"]] == ["text", "tool_use"]
        assert answers[0]["content"][1]["input"] == {"a": 1, "b": 2}
        assert answers[2]["content"] == [{"type": "text", "text": CALLS[2]}]
    else:
        assert [answer["status"] for answer in answers] == ["completed"] * 3
        assert [item["type"] for item in answers[0]["output"]] == ["message", "function_call"]
        assert answers[2]["output"][0]["content"][0]["text"] == CALLS[2]


def test_events_of_a_response_come_in_order_and_numbered() -> None:
    async def scene() -> list[dict[str, Any]]:
        async with raw_client(Scripted()) as (_, raw):
            body = {"input": "hi", "stream": True, "tools": []}
            first = (await raw.post("/v1/responses", json=body)).text
            return read_events(first)

    events = asyncio.run(scene())
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"].removeprefix("response.") for event in events] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert len({event["response"]["id"] for event in events if "response" in event}) == 1


def read_prompt(path: str, body: dict[str, Any], lines: tuple[str, ...] = ("a",)) -> str:
    """Return the text that the policy read."""

    async def scene() -> str:
        async with raw_client(Scripted(lines)) as (session, raw):
            await ask(raw, path, body)
            assert session.latest_answer is not None
            prompt = session.latest_answer.prompt.tolist()
            return RENDERER.tokenizer.decode(prompt, skip_special=False)

    return asyncio.run(scene())


def test_blocks_are_rendered_as_the_messages_of_a_chat() -> None:
    result = {"type": "tool_result", "tool_use_id": "b", "content": [{"type": "text", "text": "4"}]}
    messages = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "1"}, {"type": "text", "text": "+2"}],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "so", "signature": "x"},
                {"type": "text", "text": "I add.", "citations": None, "cache_control": None},
                {"type": "tool_use", "id": "a", "name": "add", "input": {"a": 1}, "caller": None},
                {"type": "tool_use", "id": "b", "name": "add", "input": {"a": 2}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "a", "content": "3", "is_error": False},
                {**result, "cache_control": {"type": "ephemeral"}},
                {"type": "text", "text": "And?"},
            ],
        },
    ]
    system = [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]
    body = {"messages": messages, "system": system, "max_tokens": 9}
    assert read_prompt("/v1/messages", body) == (
        "<system>Be brief.<user>1+2<assistant><think>\nso\n</think>\n\nI add."
        '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
        '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call><eos>'
        "<tool>3<tool>4<user>And?<assistant>"
    )


def test_items_are_rendered_as_the_messages_of_a_chat() -> None:
    def call(name: str, a: int) -> dict[str, Any]:
        return {
            "type": "function_call",
            "call_id": name,
            "name": "add",
            "arguments": f'{{"a":{a}}}',
        }

    def output(name: str, value: Any) -> dict[str, Any]:
        return {"type": "function_call_output", "call_id": name, "output": value}

    def say(text: str) -> dict[str, Any]:
        return {"role": "assistant", "content": [{"type": "output_text", "text": text}]}

    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "1+2"}]},
        {"type": "reasoning", "id": "rs", "summary": [], "content": None, "status": None},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "so"}]},
        say("I add."),
        call("a", 1),
        call("b", 2),
        output("a", "3"),
        output("b", [{"type": "input_text", "text": "4"}]),
        say("One."),
        say("Two."),
        {"type": "message", "role": "user", "content": "And?"},
    ]
    assert read_prompt("/v1/responses", {"input": items, "instructions": "Be brief."}) == (
        "<system>Be brief.<user>1+2<assistant><think>\nso\n</think>\n\nI add."
        '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
        '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call><eos>'
        "<tool>3<tool>4<assistant>One.<eos><assistant>Two.<eos><user>And?<assistant>"
    )


def test_whole_numbers_that_a_client_rewrites_extend_the_answer() -> None:
    """JavaScript has no 1.0: it sends 1 back, where arguments are JSON and not text."""
    line = '<tool_call>\n{"name":"add","arguments":{"a":1.0,"b":[2e0, 0.5]}}\n</tool_call>'

    async def scene() -> list[Trajectory]:
        async with raw_client(Scripted((line, "b"))) as (session, raw):
            question = {"role": "user", "content": "1+2"}
            tools = [{"name": "add", "input_schema": {}}]
            body = {"messages": [question], "tools": tools, "max_tokens": 99}
            answer = await ask(raw, "/v1/messages", body)
            (call,) = answer["content"]
            call["input"] = {"b": [2, 0.5], "a": 1}
            result = {"type": "tool_result", "tool_use_id": call["id"], "content": "3"}
            body["messages"] = [
                question,
                {"role": "assistant", "content": [call]},
                {"role": "user", "content": [result]},
            ]
            await ask(raw, "/v1/messages", body)
            return session.trajectories(0, None, {})

    assert only(asyncio.run(scene())).metrics["turns"] == 2


def test_the_end_of_an_answer_has_its_reason() -> None:
    async def scene() -> None:
        async with raw_client(Scripted(["one two"])) as (_, raw):
            messages, responses = dict(HI["/v1/messages"]), dict(HI["/v1/responses"])
            cut = await ask(raw, "/v1/messages", {**messages, "max_tokens": 3})
            assert (cut["stop_reason"], cut["content"][0]["text"]) == ("max_tokens", "one")
            for stream in (False, True):
                body = {**responses, "max_output_tokens": 3, "stream": stream}
                answer = await ask(raw, "/v1/responses", body)
                assert answer["status"] == "incomplete"
                assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
                assert answer["output"][0]["content"][0]["text"] == "one"

    asyncio.run(scene())


def test_logprobs_of_a_response_are_the_recorded_ones() -> None:
    async def scene() -> None:
        async with raw_client(Scripted(["ab"])) as (session, raw):
            body = {"input": "hi", "include": ["message.output_text.logprobs"], "temperature": 1}
            answer = await ask(raw, "/v1/responses", body)
            assert session.latest_answer is not None
            entries = answer["output"][0]["content"][0]["logprobs"]
            recorded = session.latest_answer.completion.logprobs.tolist()
            assert [entry["logprob"] for entry in entries] == recorded

    asyncio.run(scene())


def test_counting_tokens_takes_no_turn() -> None:
    async def scene() -> None:
        async with raw_client(Scripted(["a"]), max_turns=1, max_context=64) as (session, raw):
            body = {"messages": [{"role": "user", "content": "hi"}], "system": SYSTEM}
            counted = await ask(raw, "/v1/messages/count_tokens", body)
            body["messages"][0]["content"] = "x" * 10_000
            long = await raw.post("/v1/messages/count_tokens", json=body)
            assert long.status_code == 400
            assert session.exhausted_budget == "", "what is only counted uses nothing up"
            body["messages"][0]["content"] = "hi"
            answer = await ask(raw, "/v1/messages", {**body, "max_tokens": 4})
            assert counted == {"input_tokens": answer["usage"]["input_tokens"]}

    asyncio.run(scene())


def test_a_key_may_come_in_either_header() -> None:
    async def scene() -> None:
        async with raw_client(Scripted(["a"])) as (_, raw):
            key = raw.headers.pop("authorization").removeprefix("Bearer ")
            for headers, status in (
                ({"x-api-key": key, "anthropic-version": "2023-06-01"}, 200),
                ({"authorization": f"Bearer {key}", "x-api-key": "other"}, 200),
                ({"x-api-key": "other"}, 401),
                ({}, 401),
            ):
                body = HI["/v1/messages"]
                answer = await raw.post("/v1/messages", json=body, headers=headers)
                assert answer.status_code == status
            assert answer.json() == {
                "type": "error",
                "error": {
                    "type": "authentication_error",
                    "message": "the API key is wrong, or its attempt is over",
                },
            }
            lost = await raw.get("/v1/messages/batches")
            assert (lost.status_code, lost.json()["error"]["type"]) == (404, "not_found_error")

    asyncio.run(scene())


@pytest.mark.parametrize("path", PATHS)
def test_an_error_in_a_stream_is_an_event(path: str) -> None:
    async def scene() -> dict[str, Any]:
        async with raw_client(Scripted(["a"]), max_context=3) as (_, raw):
            answer = await raw.post(path, json={**HI[path], "stream": True})
            assert answer.status_code == 200
            return read_events(answer.text)[-1]

    event = asyncio.run(scene())
    if path == "/v1/messages":
        assert (event["type"], event["error"]["type"]) == ("error", "invalid_request_error")
        assert event["error"]["message"].startswith("the conversation has 4 tokens")
    else:
        assert (event["type"], event["response"]["status"]) == ("response.failed", "failed")
        assert event["response"]["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("path", PATHS)
def test_fields_without_effect_are_counted(path: str) -> None:
    async def scene() -> str:
        async with raw_client(Scripted(["a"])) as (_, raw):
            await ask(raw, path, {**HI[path], "inference_geo": "here", "metadata": {}})
            return (await raw.get("/metrics")).text

    assert 'ratchet_ignored_fields_total{field="inference_geo"} 1' in asyncio.run(scene())


def test_an_agent_that_cannot_be_changed_may_send_what_the_recipe_ignores() -> None:
    settings = AgentServerSettings(ignored=("thinking", "reasoning", "temperature"))

    async def scene() -> None:
        async with raw_client(Scripted(["a"]), proxy=Proxy(settings=settings)) as (_, raw):
            fields: dict[str, Any] = {"temperature": 0.2, "thinking": {"type": "adaptive"}}
            await ask(raw, "/v1/messages", {**HI["/v1/messages"], **fields})
            fields = {"temperature": 0.2, "reasoning": {"effort": "high"}}
            await ask(raw, "/v1/responses", {**HI["/v1/responses"], **fields})

    asyncio.run(scene())


@pytest.mark.medium
@pytest.mark.fault("S15")
@pytest.mark.parametrize("path", ["/v1/chat/completions", *PATHS])
def test_a_hundred_streams_that_break_off_leave_nothing(path: str) -> None:
    """They leave before the answer, or in the middle of its events; then the next one is
    answered, and no task is left of them."""
    generator = Scripted(["a"])

    async def leave(raw: httpx.AsyncClient, generating: bool = False) -> None:
        body = {**HI[path], "stream": True}
        async with raw.stream("POST", path, json=body) as answer:
            async for _ in answer.aiter_lines():
                if generating:
                    await generator.waiting.wait()
                return

    async def scene() -> None:
        async with raw_client(generator) as (session, raw):
            await ask(raw, path, HI[path])
            n_tasks = len(asyncio.all_tasks())
            generator.hold = asyncio.Event()
            await asyncio.gather(*(leave(raw, generating=i == 0) for i in range(100)))
            while session._running:
                await asyncio.sleep(0)
            assert generator.cancelled > 0
            generator.hold = None
            assert session.trajectories(0, None, {})[0].metrics["turns"] == 1
            await ask(raw, path, HI[path])
            gc.collect()
            while len(asyncio.all_tasks()) > n_tasks:
                await asyncio.sleep(0)
            assert len(session.strands) == 2

    asyncio.run(asyncio.wait_for(scene(), 60))


# --- what can't be answered

USER = {"role": "user", "content": "hi"}
CALL = {"type": "tool_use", "id": "a", "name": "f", "input": {}}


def message(*blocks: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [USER, {"role": role, "content": list(blocks)}, USER]}


WRONG_MESSAGES: list[dict[str, Any]] = [
    {"max_tokens": 0},
    {"max_tokens": "5"},
    {"max_tokens": 1.5},
    {"max_tokens": -1},
    {"messages": []},
    {"messages": "hi"},
    {"messages": None},
    {"messages": [5]},
    {"messages": [{"role": "narrator", "content": "x"}]},
    {"messages": [{"role": "user"}]},
    {"messages": [{"role": "user", "content": 5}]},
    {"messages": [{"role": "user", "content": None}]},
    {"messages": [USER, {"role": "assistant", "content": "It is"}]},
    {"messages": [{"role": "user", "content": "hi", "name": "x"}]},
    message("hi"),
    message({"type": "image", "source": {"type": "url", "url": "x"}}),
    message({"type": "document", "source": {}}),
    message({"type": "text"}),
    message({"type": "text", "text": 5}),
    message({"type": "text", "text": "x", "citations": [{}]}),
    message({"type": "text", "text": "x", "mood": "glad"}),
    message(CALL),
    message({"type": "tool_result", "tool_use_id": "a"}, role="assistant"),
    message({"type": "tool_result", "content": "x"}),
    message({"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image"}]}),
    message({"type": "tool_result", "tool_use_id": "a", "content": 5}),
    message({**CALL, "input": "{}"}, role="assistant"),
    message({**CALL, "id": None}, role="assistant"),
    message({"type": "redacted_thinking", "data": "x"}, role="assistant"),
    message({"type": "thinking"}, role="assistant"),
    message({"type": "thinking", "thinking": "x"}),
    {"system": 5},
    {"system": [{"type": "image"}]},
    {"tools": [{"name": "f"}]},
    {"tools": [{"type": "bash_20250124", "name": "bash"}]},
    {"tools": [{"name": "f", "input_schema": {}, "strict": True}]},
    {"tools": [{"name": "f", "input_schema": {}, "defer_loading": True}]},
    {"tools": [{"name": "f", "input_schema": {}}] * 129},
    {"tool_choice": {"type": "any"}},
    {"tool_choice": {"type": "tool", "name": "f"}},
    {"tool_choice": "auto"},
    {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
    {"thinking": {"type": "enabled", "budget_tokens": 1024}},
    {"thinking": {"type": "adaptive"}},
    {"output_config": {"effort": "high"}},
    {"output_config": {"format": {"type": "json_schema", "schema": {}}}},
    {"context_management": {"edits": [{"type": "compact"}]}},
    {"mcp_servers": [{"type": "url", "url": "x", "name": "x"}]},
    {"container": "x"},
    {"stop_sequences": list("abcde")},
    {"stop_sequences": [""]},
    {"stop_sequences": "a"},
    {"temperature": 0.2},
    {"top_p": 0.5},
    {"top_k": 5},
    {"top_k": -2},
    {"max_token": 5},
    {"max_completion_tokens": 5},
    {"response_format": {"type": "json_object"}},
    {"stream": "yes"},
    {"n": 2},
    {f"x{number}": 1 for number in range(100)},
]


def items(*values: Any) -> dict[str, Any]:
    return {"input": [USER, *values]}


FUNCTION_CALL = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
WRONG_RESPONSES: list[dict[str, Any]] = [
    {"input": []},
    {"input": None},
    {"input": 5},
    {"input": {}},
    items(5),
    items("hi"),
    items({}),
    items({"role": "narrator", "content": "x"}),
    items({"role": "user", "content": 5}),
    items({"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}),
    items({"role": "user", "content": [{"type": "input_text"}]}),
    items({"role": "user", "content": "x", "mood": "glad"}),
    items({"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}),
    items({"type": "item_reference", "id": "x"}),
    items({"type": "web_search_call", "id": "x"}),
    items({"type": "local_shell_call", "id": "x"}),
    items({**FUNCTION_CALL, "arguments": "{"}),
    items({**FUNCTION_CALL, "arguments": {}}),
    items({**FUNCTION_CALL, "arguments": "[]"}),
    items({**FUNCTION_CALL, "arguments": '{"a":' * 50_000}),
    items({**FUNCTION_CALL, "call_id": None}),
    items({**FUNCTION_CALL, "namespace": "x"}),
    items({"type": "function_call_output", "call_id": "a"}),
    items({"type": "function_call_output", "output": "x"}),
    items({"type": "function_call_output", "call_id": "a", "output": [{"type": "input_image"}]}),
    items({"type": "reasoning", "encrypted_content": "x", "summary": []}),
    items({"type": "reasoning", "summary": [5]}),
    {"instructions": 5},
    {"previous_response_id": "resp_unknown"},
    {"previous_response_id": 5},
    {"tools": [{"type": "web_search"}]},
    {"tools": [{"type": "function"}]},
    {"tools": [{"type": "function", "name": "f", "strict": True}]},
    {"tools": [{"type": "function", "function": {"name": "f"}}]},
    {"tools": 5},
    {"tools": [5]},
    {"tool_choice": "required"},
    {"tool_choice": {"type": "function", "name": "f"}},
    {"parallel_tool_calls": False},
    {"max_output_tokens": 0},
    {"max_output_tokens": "5"},
    {"max_completion_tokens": 5},
    {"text": {"format": {"type": "json_schema", "name": "x", "schema": {}}}},
    {"text": {"verbosity": "low"}},
    {"reasoning": {"effort": "high"}},
    {"truncation": "auto"},
    {"background": True},
    {"conversation": "conv_1"},
    {"prompt": {"id": "x"}},
    {"context_management": [{"type": "compaction"}]},
    {"include": "x"},
    {"top_logprobs": 3},
    {"top_logprobs": 99},
    {"metadata": {f"x{number}": "" for number in range(100)}},
    {"temperature": 0.2},
    {"top_p": 0.5},
    {"messages": [USER]},
    {"max_output_token": 5},
    {"store": "no"},
    {"stream": 1},
]
BYTES = (b"", b"{", b"[]", b"null", b"\xff", b"[" * 100_000, b'{"model": "\\ud800"}')


@pytest.mark.medium
@pytest.mark.fault("S15")
@pytest.mark.parametrize(
    ("path", "changes"),
    [
        ("/v1/chat/completions", WRONG_CHATS),
        ("/v1/completions", WRONG_COMPLETIONS),
        ("/v1/messages", WRONG_MESSAGES),
        ("/v1/responses", WRONG_RESPONSES),
    ],
)
def test_malformed_requests_get_a_sentence_and_harm_nothing(
    path: str, changes: Sequence[dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    assert len(changes) >= 50
    right = HI.get(path, {"prompt": "hi"})

    async def scene() -> None:
        async with raw_client(Scripted(["a"])) as (session, raw):
            contents = [json.dumps({**right, **change}).encode() for change in changes]
            for content in (*contents, *BYTES):
                answer = await raw.post(path, content=content)
                assert answer.status_code == 400, (content[:200], answer.text)
                error = answer.json()["error"]
                assert error["type"] == "invalid_request_error"
                assert len(error["message"]) > 10
                if path == "/v1/messages":
                    assert (answer.json()["type"], set(error)) == ("error", {"type", "message"})
                else:
                    assert set(error) == {"message", "type", "param", "code"}
            assert session.strands == []
            assert not session._running
            assert (await raw.post(path, json=right)).status_code == 200
            assert only(session.trajectories(0, None, {})).metrics["turns"] == 1

    asyncio.run(scene())
    assert [record for record in caplog.records if record.name.startswith("uvicorn")] == []
