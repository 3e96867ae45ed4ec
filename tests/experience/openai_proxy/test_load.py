"""What one client of the chat API costs the others: nothing that they would notice."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from experience.openai_proxy.talk import RENDERER, TEMPLATE, TOOLS, Scripted, said, serving

from ratchet.data.chat.builtin_tokenizers import byte_tokenizer
from ratchet.data.chat.renderer import Renderer
from ratchet.experience.openai_proxy.schema import MAX_MESSAGES
from ratchet.experience.openai_proxy.session import AgentSession
from ratchet.types import Message, Sampling

pytestmark = [pytest.mark.needs("fastapi"), pytest.mark.needs("openai")]

HI = [{"role": "user", "content": "hi"}]


class Held(Renderer):
    """Renders each prompt once `gate` is open."""

    def __init__(self, *options: Any) -> None:
        super().__init__(*options)
        self.gate, self.calls = threading.Event(), 0

    def prompt(self, messages: Sequence[Message], tools: Any = None) -> list[int]:
        self.calls += 1
        if not self.gate.wait(5):
            raise AssertionError("the event loop is blocked")
        return super().prompt(messages, tools)


@pytest.mark.fault("S15")
def test_rendering_holds_up_no_other_request() -> None:
    async def scene() -> tuple[bool, str | None]:
        renderer = Held(byte_tokenizer(), TEMPLATE)
        async with serving(Scripted(["a"]), renderer=renderer) as (_, client):
            # A client that tries again would hide a first attempt that failed.
            asking = asyncio.create_task(said(client.with_options(max_retries=0), HI))
            while not renderer.calls:
                await asyncio.sleep(0)
            listed = await client.models.list()
            renderer.gate.set()
            message, _ = await asking
            return bool(listed.data), message["content"]

    assert asyncio.run(scene()) == (True, "a")


@pytest.mark.fault("S15")
def test_requests_of_an_attempt_are_seeded_in_their_order() -> None:
    async def seeds(held: bool) -> list[int]:
        renderer, generator = Held(byte_tokenizer(), TEMPLATE), Scripted(["a"])
        if not held:
            renderer.gate.set()
        async with serving(generator, renderer=renderer, max_turns=3) as (session, client):
            asked = []
            for content in ("x", "x", "y"):
                asked.append(
                    asyncio.create_task(said(client, [{"role": "user", "content": content}]))
                )
                while held and len(session._rendering._waiters or ()) < len(asked) - 1:
                    await asyncio.sleep(0)
                if not held:
                    await asked[-1]
            late = asyncio.create_task(
                client.with_options(max_retries=0).chat.completions.create(
                    model="policy", messages=HI
                )
            )  # pyright: ignore
            if held:
                while len(session._rendering._waiters or ()) < 3:
                    await asyncio.sleep(0)
            renderer.gate.set()
            await asyncio.gather(*asked)
            with pytest.raises(Exception, match="has had its 3 turns"):
                await late
            return [sampling.seed for _, sampling in generator.requests]

    assert asyncio.run(seeds(held=True)) == asyncio.run(seeds(held=False))


class Counted(Message):
    """A message whose role is read so often."""

    reads = 0

    def __getattribute__(self, name: str) -> Any:
        if name == "role":
            Counted.reads += 1
        return super().__getattribute__(name)


@pytest.mark.fault("S15")
def test_finding_the_conversation_is_linear_in_messages() -> None:
    async def reads(count: int) -> int:
        session = AgentSession(Scripted(), RENDERER, Sampling(), max_context=10, max_turns=1)
        messages = [Counted("user", "x") for _ in range(count)]
        Counted.reads = 0
        assert session._find_parent(messages, [bytes([0])] * (count + 1)) is None
        return Counted.reads

    assert asyncio.run(reads(2000)) <= 2 * asyncio.run(reads(1000)) + 10


def post(body: Any, generator: Scripted, **options: Any) -> tuple[int, dict[str, Any]]:
    async def scene() -> tuple[int, dict[str, Any]]:
        async with (
            serving(generator, **options) as (_, client),
            httpx.AsyncClient(timeout=30) as raw,
        ):
            headers = {"authorization": f"Bearer {client.api_key}"}
            content = json.dumps({"model": "policy", **body}).encode()
            answer = await raw.post(
                f"{client.base_url}chat/completions", content=content, headers=headers
            )
            return answer.status_code, answer.json()["error"]

    return asyncio.run(scene())


@pytest.mark.medium
@pytest.mark.fault("S5")
def test_too_many_messages_are_refused_by_name() -> None:
    for count in (MAX_MESSAGES + 1, 20_000):
        status, error = post({"messages": [{"role": "user", "content": ""}] * count}, Scripted())
        assert (status, error["param"]) == (400, "messages")
        assert f"at most {MAX_MESSAGES} items" in error["message"]


@pytest.mark.fault("S5")
def test_a_conversation_that_renders_too_often_is_refused() -> None:
    turns = [{"role": "user", "content": ""}, {"role": "assistant", "content": "a"}] * 1023
    status, error = post({"messages": [*turns, *HI]}, Scripted(), max_context=10**6)
    assert (status, error["param"]) == (400, "messages")
    assert "Send fewer" in error["message"]


class Unrendered(Renderer):
    def prompt(self, messages: Sequence[Message], tools: Any = None) -> list[int]:
        raise AssertionError("rendered")


@pytest.mark.fault("S5")
def test_what_is_longer_than_the_context_is_not_rendered() -> None:
    text = {"role": "user", "content": "word " * 20_000}
    status, error = post(
        {"messages": [text]},
        Scripted(),
        renderer=Unrendered(byte_tokenizer(), TEMPLATE),
        max_context=64,
    )
    assert (status, error["code"]) == (400, "context_length_exceeded")
    assert "have 100000 characters" in error["message"]


def test_a_long_text_that_fits_is_answered() -> None:
    """White space may vanish in a tokenizer, and is not a reason to refuse."""

    async def scene() -> Any:
        async with serving(Scripted(["a"]), max_context=4096) as (_, client):
            return (await said(client, [{"role": "user", "content": "x" * 4000}]))[0]["content"]

    assert asyncio.run(scene()) == "a"


NO_CALLS = """\
{%- for message in messages -%}{{- message.content -}}{%- endfor -%}
{{- "" if add_generation_prompt else eos_token -}}
"""


@pytest.mark.parametrize("stream", [False, True])
def test_tools_that_a_model_cannot_call_are_refused_before_sampling(stream: bool) -> None:
    generator = Scripted(["a"])
    renderer = Renderer(byte_tokenizer(), NO_CALLS)

    async def scene() -> str:
        async with (
            serving(generator, renderer=renderer) as (_, client),
            httpx.AsyncClient(timeout=30) as raw,
        ):
            headers = {"authorization": f"Bearer {client.api_key}"}
            body = {"model": "policy", "messages": HI, "tools": TOOLS, "stream": stream}
            answer = await raw.post(
                f"{client.base_url}chat/completions", json=body, headers=headers
            )
            assert answer.status_code == (200 if stream else 400)
            return answer.text

    assert "tool_format" in asyncio.run(scene())
    assert generator.requests == []


@pytest.mark.fault("S15")
def test_clients_that_leave_are_quiet_and_leave_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async def scene() -> None:
        generator = Scripted(["a"])
        async with serving(generator) as (session, client):
            head = (
                "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer "
                f"{client.api_key}\r\n"
            )
            body = json.dumps({"model": "policy", "messages": HI, "stream": True})
            for sent in (
                f"{head}content-length: 100\r\n\r\n{{",
                f"{head}content-length: {len(body)}\r\n\r\n{body}",
                head,
            ):
                generator.hold = asyncio.Event()
                for _ in range(10):
                    _, writer = await asyncio.open_connection(
                        client.base_url.host, client.base_url.port
                    )
                    writer.write(sent.encode())
                    await writer.drain()
                    await asyncio.sleep(0)
                    writer.transport.abort()  # type: ignore[attr-defined]
            generator.hold = None
            assert (await said(client, HI))[0]["content"] == "a"
            while session._running:
                await asyncio.sleep(0)

    with (
        caplog.at_level(logging.INFO, logger="ratchet"),
        caplog.at_level(logging.INFO, logger="uvicorn"),
    ):
        asyncio.run(scene())
    assert [
        record
        for record in caplog.records
        if record.name.split(".")[0] in ("ratchet", "uvicorn", "asyncio")
    ] == []
