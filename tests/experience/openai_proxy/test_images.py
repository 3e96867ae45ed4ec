"""Images in requests: the same prompt in each dialect, recorded with the attempt."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from experience.openai_proxy.dialects import ask, raw_client
from experience.openai_proxy.talk import Scripted
from pictures import picture, processor, renderer

from ratchet.errors import DataError
from ratchet.experience.openai_proxy.rendering import MAX_IMAGES, render_prompt
from ratchet.testing.fakes import FakeGenerator
from ratchet.types import Message, Part, Trajectory

pytestmark = [pytest.mark.needs("fastapi"), pytest.mark.needs("openai")]

PATHS = ("/v1/chat/completions", "/v1/messages", "/v1/responses")
PIXEL = "data:image/png;base64,iVBORw0KGgo="


def write_parts(path: str, text: str, url: str) -> list[dict[str, Any]]:
    """Return the parts of a message in the form of an API: a text, then an image."""
    if path == "/v1/messages":
        header, _, data = url.partition(";base64,")
        source = {"type": "base64", "media_type": header.removeprefix("data:"), "data": data}
        return [{"type": "text", "text": text}, {"type": "image", "source": source}]
    if path == "/v1/responses":
        image = {"type": "input_image", "image_url": url, "detail": "auto"}
        return [{"type": "input_text", "text": text}, image]
    return [{"type": "text", "text": text}, {"type": "image_url", "image_url": {"url": url}}]


def write_request(path: str, *questions: tuple[str, str], answer: str = "a") -> dict[str, Any]:
    """Return a request with an image in each question, and the same answer after each but the last."""
    messages: list[dict[str, Any]] = []
    for text, url in questions:
        if messages:
            messages.append({"role": "assistant", "content": answer})
        messages.append({"role": "user", "content": write_parts(path, text, url)})
    if path == "/v1/responses":
        return {"input": messages}
    return {"messages": messages, "max_tokens": 8}


def play(path: str) -> list[Trajectory]:
    """Ask twice in one conversation, with an image each time, and once with another first image."""
    images = [picture(seed).value for seed in range(3)]
    tokenizer = renderer().tokenizer
    sampled = [*tokenizer.encode("a"), renderer().stop_ids[0]]
    generator = FakeGenerator(lambda tokens, sampling: sampled)

    async def scene() -> list[Trajectory]:
        options = {"renderer": renderer(), "stop_ids": renderer().stop_ids, "max_new_tokens": 8}
        async with raw_client(generator, **options) as (session, raw):
            first, second, other = (("what?", image) for image in images)
            await ask(raw, path, write_request(path, first))
            await ask(raw, path, write_request(path, first, second))
            await ask(raw, path, write_request(path, other, second))
            return session.trajectories(0, None, {})

    return asyncio.run(scene())


def read_file(seed: int) -> bytes:
    """Return the encoded file of an image."""
    return processor().expand(picture(seed), where="test").medium.source


@pytest.mark.slow
def test_images_are_read_alike_in_each_dialect() -> None:
    chat, *others = [play(path) for path in PATHS]
    together, fork = chat
    assert [len(row.turns) for row in chat] == [2, 1], "another image is another conversation"
    for row, seeds in ((together, (0, 1)), (fork, (2, 1))):
        assert len(row.media) == 2
        for placed, seed in zip(row.media, seeds, strict=True):
            span = row.tokens[placed.start : placed.start + placed.medium.span]
            assert set(span.tolist()) <= processor().media_token_ids
            assert placed.medium.source == read_file(seed)
    for rows in others:
        for row, expected in zip(rows, chat, strict=True):
            np.testing.assert_array_equal(row.tokens, expected.tokens)
            assert row.media == expected.media
            assert row.messages == expected.messages


@pytest.mark.parametrize("path", PATHS)
def test_an_image_that_cannot_be_read_is_refused(path: str) -> None:
    reasons = {
        "http://127.0.0.1/a.png;base64,a": "",
        "/etc/passwd;base64,a": "",
        "data:text/html;base64,a": "an image of type 'text/html' can't be read",
        PIXEL: "the model reads only text",
    }

    async def scene() -> None:
        async with raw_client(Scripted(["a"])) as (session, raw):
            for url, reason in reasons.items():
                answer = await raw.post(path, json=write_request(path, ("what?", url)))
                assert (answer.status_code, session.strands) == (400, [])
                assert reason in answer.json()["error"]["message"]

    asyncio.run(scene())


@pytest.mark.parametrize("stream", [False, True])
def test_alternatives_with_images_are_refused_with_a_status(stream: bool) -> None:
    body = write_request(PATHS[0], ("what?", PIXEL))

    async def scene() -> None:
        async with raw_client(Scripted(["a"])) as (session, raw):
            fields = {"logprobs": True, "top_logprobs": 2, "stream": stream}
            answer = await raw.post(PATHS[0], json=body | fields)
            assert (answer.status_code, session.strands) == (400, [])
            reason = "top_logprobs are not computed for a conversation with images"
            assert reason in answer.json()["error"]["message"]

    asyncio.run(scene())


def write_tool_request(path: str, url: str) -> dict[str, Any]:
    """Return a request with an image in the instructions, and one in the result of a tool."""
    parts = write_parts(path, "see", url)
    start = [{"role": "system", "content": parts}, {"role": "assistant", "content": "a"}]
    if path == "/v1/messages":
        result = {"type": "tool_result", "tool_use_id": "c", "content": parts}
        return {"messages": [*start, {"role": "user", "content": [result]}], "max_tokens": 8}
    if path == "/v1/responses":
        result = {"type": "function_call_output", "call_id": "c", "output": parts}
        return {"input": [*start, result]}
    result = {"role": "tool", "tool_call_id": "c", "content": parts}
    return {"messages": [*start, result], "max_tokens": 8}


@pytest.mark.slow
def test_tool_results_and_instructions_may_have_images() -> None:
    image = picture(0).value
    generator = FakeGenerator(lambda tokens, sampling: [renderer().stop_ids[0]])

    async def scene() -> list[Trajectory]:
        options = {"renderer": renderer(), "stop_ids": renderer().stop_ids, "max_new_tokens": 8}
        async with raw_client(generator, **options) as (session, raw):
            for path in PATHS:
                await ask(raw, path, write_tool_request(path, image))
            return session.trajectories(0, None, {})

    chat, *others = asyncio.run(scene())
    assert [placed.medium.source for placed in chat.media] == [read_file(0)] * 2
    assert [message.role for message in chat.messages[:3]] == ["system", "assistant", "tool"]
    for row in others:
        np.testing.assert_array_equal(row.tokens, chat.tokens)
        assert row.messages == chat.messages


def test_a_result_with_another_part_names_what_it_takes() -> None:
    result = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "document"}]}
    body = {"messages": [{"role": "user", "content": [result]}], "max_tokens": 8}

    async def scene() -> None:
        async with raw_client(Scripted(["a"])) as (_, raw):
            answer = await raw.post("/v1/messages", json=body)
            assert answer.status_code == 400
            reason = "a part of type 'document' can't be read: a result takes text and image"
            assert reason in answer.json()["error"]["message"]

    asyncio.run(scene())


def test_an_image_of_the_assistant_is_refused() -> None:
    body = write_request(PATHS[0], ("what?", PIXEL))
    body["messages"][0]["role"] = "assistant"

    async def scene() -> None:
        async with raw_client(Scripted(["a"])) as (_, raw):
            answer = await raw.post(PATHS[0], json=body)
            assert answer.status_code == 400
            assert "a message of the assistant can't hold" in answer.json()["error"]["message"]

    asyncio.run(scene())


@pytest.mark.slow
def test_too_many_images_are_refused_before_they_are_read() -> None:
    message = Message("user", (Part("image", PIXEL),) * (MAX_IMAGES + 1))
    with pytest.raises(DataError, match=f"{MAX_IMAGES + 1} images: send at most {MAX_IMAGES}"):
        render_prompt(renderer(), [message], None, None)
