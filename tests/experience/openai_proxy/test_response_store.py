"""The responses that later requests continue from by id: bounded, and of one key alone."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from experience.openai_proxy.dialects import ask, raw_client
from experience.openai_proxy.talk import Scripted

from ratchet.experience.openai_proxy.responses_api.store import ResponseStore, StoredResponse
from ratchet.experience.openai_proxy.schema import ChatMessage
from ratchet.experience.openai_proxy.server import Proxy
from ratchet.types import Message, ToolCall

pytestmark = [pytest.mark.needs("fastapi"), pytest.mark.needs("openai")]

PATH = "/v1/responses"


def make_response(text: str) -> StoredResponse:
    return StoredResponse.from_values([], Message("assistant", text), {})


def test_the_oldest_responses_are_dropped() -> None:
    store = ResponseStore(2**20, max_responses=2)
    for name in "abc":
        store.add(name, make_response(name))
    assert [store.get(name) is None for name in "abc"] == [True, False, False]
    size = make_response("x" * 100).n_bytes
    store = ResponseStore(2 * size)
    for name in "abc":
        store.add(name, make_response("x" * 100))
    assert [store.get(name) is None for name in "abc"] == [True, False, False]
    store.add("d", make_response("x" * 1000))
    assert [store.get(name) is None for name in "abcd"] == [True, True, True, False]
    store.add("e", make_response("x"))
    assert [store.get(name) is None for name in "de"] == [True, False]


def test_a_conversation_is_read_back_as_it_was() -> None:
    call = ToolCall("call_0", "add", {"a": 1, "b": [0.5, {"c": "\u20ac"}]})
    messages = [
        Message("user", "hi"),
        Message("assistant", "I add.", (call,)),
        Message("tool", "3", tool_call_id="call_0"),
    ]
    first = StoredResponse.from_values([ChatMessage(role="user", content="hi")], messages[1], {})
    earlier = [*first.read_messages(), ChatMessage(role="tool", content="3", tool_call_id="call_0")]
    second = StoredResponse.from_values(earlier, Message("assistant", "3"), {})
    read = [message.to_message() for message in second.read_messages()]
    assert read == [*messages, Message("assistant", "3")]


def test_a_response_is_found_by_its_id_with_its_key_alone() -> None:
    async def scene() -> None:
        proxy = Proxy()
        async with (
            raw_client(Scripted(["a"]), proxy=proxy) as (_, raw),
            raw_client(Scripted(["b"]), proxy=proxy) as (_, other),
        ):
            first = await ask(raw, PATH, {"input": "hi", "instructions": "Be brief."})
            assert (await raw.get(f"{PATH}/{first['id']}")).json() == first
            lost = await other.get(f"{PATH}/{first['id']}")
            assert (lost.status_code, lost.json()["error"]["code"]) == (
                404,
                "previous_response_not_found",
            )
            body: dict[str, Any] = {"input": "more", "previous_response_id": first["id"]}
            refused = await other.post(PATH, json=body)
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] == "previous_response_id"
            second = await ask(raw, PATH, {**body, "store": False})
            assert second["previous_response_id"] == first["id"]
            assert (await raw.get(f"{PATH}/{second['id']}")).status_code == 404

    asyncio.run(scene())
