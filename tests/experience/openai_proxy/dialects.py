"""A conversation about a sum in each dialect, over plain HTTP: as the official clients hold it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx
from experience.openai_proxy.talk import TOOLS, serving

from ratchet.experience.openai_proxy.session import AgentSession
from ratchet.protocols import Generator

QUESTION = "1+2, then add 4?"
SYSTEM = "Be brief."
FUNCTION: Mapping[str, Any] = TOOLS[0]["function"]
NAME, DESCRIPTION, PARAMETERS = (FUNCTION[key] for key in ("name", "description", "parameters"))
ANTHROPIC_TOOLS = [{"name": NAME, "description": DESCRIPTION, "input_schema": PARAMETERS}]
RESPONSES_TOOLS = [{"type": "function", **FUNCTION, "strict": False}]
HI: Mapping[str, Any] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 99},
    "/v1/responses": {"input": "hi"},
}


@asynccontextmanager
async def raw_client(
    generator: Generator, **options: Any
) -> AsyncIterator[tuple[AgentSession, httpx.AsyncClient]]:
    """Yield a session and a client of its server with its key."""
    async with serving(generator, **options) as (session, client):
        root = str(client.base_url).removesuffix("/v1/")
        headers = {"authorization": f"Bearer {client.api_key}"}
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            base_url=root, headers=headers, timeout=30, limits=limits
        ) as raw:
            yield session, raw


async def ask(raw: httpx.AsyncClient, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the whole answer; of a stream the one that its events add up to."""
    answer = await raw.post(path, json=body)
    assert answer.status_code == 200, answer.text
    if not body.get("stream"):
        return answer.json()
    events = read_events(answer.text)
    return add_up_message(events) if path == "/v1/messages" else events[-1]["response"]


def read_events(text: str) -> list[dict[str, Any]]:
    """Return the data of all events, whose names are their types."""
    events = []
    for block in text.strip().split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def add_up_message(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the message that Anthropic's client makes of these events."""
    message = events[0]["message"]
    for event in events[1:]:
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(message["content"])
                message["content"].append(event["content_block"])
            case "content_block_delta" if event["delta"]["type"] == "text_delta":
                message["content"][event["index"]]["text"] += event["delta"]["text"]
            case "content_block_delta":
                partial = event["delta"]["partial_json"]
                message["content"][event["index"]]["input"] = json.loads(partial)
            case "message_delta":
                message |= event["delta"]
                message["usage"] |= event["usage"]
    return message


async def converse_anthropic(raw: httpx.AsyncClient, *, stream: bool) -> list[dict[str, Any]]:
    """Ask three times, and answer every call with 5; the messages of the API."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": QUESTION}]
    answers = []
    for _ in range(3):
        body = {"messages": messages, "tools": ANTHROPIC_TOOLS, "system": SYSTEM}
        answer = await ask(raw, "/v1/messages", {**body, "max_tokens": 999, "stream": stream})
        answers.append(answer)
        results = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": "5"}
            for block in answer["content"]
            if block["type"] == "tool_use"
        ]
        messages.append({"role": "assistant", "content": answer["content"]})
        messages.append({"role": "user", "content": results})
    return answers


async def converse_responses(
    raw: httpx.AsyncClient, *, stream: bool, by_id: bool
) -> list[dict[str, Any]]:
    """Do the same over Responses: with all items, or with the id of the response before."""
    items: list[dict[str, Any]] = [{"role": "user", "content": QUESTION}]
    answers = []
    for _ in range(3):
        body = {"input": items, "tools": RESPONSES_TOOLS, "instructions": SYSTEM, "stream": stream}
        if by_id and answers:
            body["previous_response_id"] = answers[-1]["id"]
        answer = await ask(raw, "/v1/responses", body)
        answers.append(answer)
        results = [
            {"type": "function_call_output", "call_id": item["call_id"], "output": "5"}
            for item in answer["output"]
            if item["type"] == "function_call"
        ]
        items = results if by_id else [*items, *answer["output"], *results]
    return answers
