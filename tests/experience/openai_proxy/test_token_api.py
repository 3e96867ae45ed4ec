"""Token ids in and out, in vLLM's dialect, of attempts that train."""

from __future__ import annotations

import asyncio
import re
import threading
from pathlib import Path

import httpx
import numpy as np
import pytest
from experience.openai_proxy.talk import EOS, RENDERER, TEMPLATE, TOOLS, Scripted, serving
from openai import AsyncOpenAI, BadRequestError

from ratchet.data.chat.builtin_tokenizers import byte_tokenizer
from ratchet.data.chat.renderer import Renderer
from ratchet.errors import DataError
from ratchet.experience.openai_proxy import routes
from ratchet.experience.openai_proxy.config import AgentServerSettings
from ratchet.experience.openai_proxy.server import Proxy
from ratchet.experience.openai_proxy.session import AgentSession
from ratchet.types import Owner

pytestmark = [pytest.mark.needs("fastapi"), pytest.mark.needs("openai")]

HI = [{"role": "user", "content": "hi"}]


class Refusing(Scripted):
    """Refuses tokens that no model has, as every generator does."""

    async def generate(self, tokens, sampling, media=()):
        if max(tokens) >= RENDERER.tokenizer.vocab_size:
            raise DataError(f"token {max(tokens)} isn't in the model's vocabulary")
        return await super().generate(tokens, sampling, media)


def encode(text: str) -> list[int]:
    return RENDERER.tokenizer.encode(text)


def root_of(client: AsyncOpenAI) -> str:
    return str(client.base_url).rstrip("/").removesuffix("/v1")


async def post(client: AsyncOpenAI, path: str, body: dict[str, object]) -> tuple[int, dict]:
    async with httpx.AsyncClient(base_url=root_of(client), timeout=60) as raw:
        headers = {"authorization": f"Bearer {client.api_key}"}
        answer = await raw.post(path, json=body, headers=headers)
        return answer.status_code, answer.json()


@pytest.mark.medium
def test_a_chat_answer_has_the_recorded_token_ids() -> None:
    async def scene() -> None:
        async with serving(Scripted(["It is 7."])) as (session, client):
            answer = await client.chat.completions.create(
                model="any-name",
                messages=HI,
                logprobs=True,
                extra_body={"return_token_ids": True, "return_tokens_as_token_ids": True},
            )
            recorded = session.latest_answer
            assert answer.model == "any-name"
            assert answer.prompt_token_ids == recorded.prompt.tolist()
            (choice,) = answer.choices
            sampled = recorded.completion.tokens.tolist()
            assert choice.token_ids == sampled == [*encode("It is 7."), EOS]
            entries = choice.logprobs.content
            assert [entry.token for entry in entries] == [f"token_id:{token}" for token in sampled]
            assert [entry.logprob for entry in entries] == recorded.completion.logprobs.tolist()

    asyncio.run(scene())


def test_a_streamed_answer_has_the_recorded_token_ids() -> None:
    async def scene() -> None:
        async with serving(Scripted(["It is 7."])) as (session, client):
            stream = await client.chat.completions.create(
                model="policy",
                messages=HI,
                stream=True,
                extra_body={"return_token_ids": True},
            )
            chunks = [chunk.model_dump() async for chunk in stream]
            recorded = session.latest_answer
            assert [
                chunk["prompt_token_ids"] for chunk in chunks if "prompt_token_ids" in chunk
            ] == [recorded.prompt.tolist()]
            ids = [choice.get("token_ids") for chunk in chunks for choice in chunk["choices"]]
            assert [tokens for tokens in ids if tokens] == [recorded.completion.tokens.tolist()]

    asyncio.run(scene())


def test_template_variables_of_a_request_hold_for_it_alone() -> None:
    source = '{{- "<" ~ (mode or "plain") ~ ">" -}}' + TEMPLATE
    renderer = Renderer(byte_tokenizer(), source)
    messages = [*HI, {"role": "assistant", "content": "a"}, {"role": "user", "content": "and?"}]

    async def scene() -> None:
        async with serving(Scripted(["a"]), renderer=renderer) as (session, client):
            for history in (HI, messages):
                for kwargs in ({"mode": "deep"}, {}):
                    await client.chat.completions.create(
                        model="policy",
                        messages=history,
                        extra_body={"chat_template_kwargs": kwargs},
                    )
                    prompt = session.latest_answer.prompt.tolist()
                    text = renderer.tokenizer.decode(prompt, skip_special=False)
                    assert text.startswith("<deep><user>hi" if kwargs else "<plain><user>hi")
            assert [len(strand.turns) for strand in session.strands] == [2, 2]
            for kwargs, reason in (
                ({"mod": 1}, "does not read 'mod'"),
                ({"messages": []}, "'messages' comes from the request itself"),
            ):
                with pytest.raises(BadRequestError, match=reason):
                    await client.chat.completions.create(
                        model="policy", messages=HI, extra_body={"chat_template_kwargs": kwargs}
                    )

    asyncio.run(scene())


def test_stop_token_ids_of_a_request_reach_the_sampling() -> None:
    async def scene() -> None:
        async with serving(Scripted(["a"])) as (session, client):
            await client.chat.completions.create(
                model="policy",
                messages=HI,
                extra_body={"stop_token_ids": [5]},
            )
            (_, sampling), *_ = session.generator.requests
            assert sampling.stop_ids[-1] == 5

    asyncio.run(scene())


def test_fields_without_effect_are_counted() -> None:
    async def scene() -> str:
        async with serving(Scripted(["a"])) as (_, client):
            for _ in range(2):
                await client.chat.completions.create(
                    model="policy",
                    messages=HI,
                    extra_body={"cache_salt": "x", "priority": 3},
                )
            async with httpx.AsyncClient(base_url=root_of(client)) as raw:
                headers = {"authorization": f"Bearer {client.api_key}"}
                return (await raw.get("/metrics", headers=headers)).text

    text = asyncio.run(scene())
    assert 'ratchet_ignored_fields_total{field="cache_salt"} 2\n' in text
    assert 'ratchet_ignored_fields_total{field="priority"} 2\n' in text


@pytest.mark.parametrize("path", ["/inference/v1/generate", "/v1/completions"])
def test_completions_of_token_ids_make_one_trajectory(path: str) -> None:
    """The second prompt goes on from the first one's answer: its tokens are not made again."""
    prompt = encode("<user>2+2?<assistant>")
    between = encode("<user>sure?<assistant>")

    def body(tokens: list[int]) -> dict[str, object]:
        if path == "/v1/completions":
            return {"prompt": tokens, "max_tokens": 8, "return_token_ids": True, "logprobs": 0}
        return {"token_ids": tokens, "sampling_params": {"max_tokens": 8, "logprobs": 0}}

    async def scene() -> None:
        async with serving(Scripted(["4", "Yes."])) as (session, client):
            status, first = await post(client, path, body(prompt))
            assert status == 200
            sampled = first["choices"][0]["token_ids"]
            assert sampled == [*encode("4"), EOS]
            _, second = await post(client, path, body([*prompt, *sampled, *between]))
            (row,) = session.trajectories(0, None, {})
            assert row.tokens.tolist() == [
                *prompt,
                *sampled,
                *between,
                *second["choices"][0]["token_ids"],
            ]
            policy_tokens = row.tokens[row.owner == Owner.POLICY].tolist()
            assert policy_tokens == [*encode("4"), EOS, *encode("Yes."), EOS]
            assert np.array_equal(row.trainable, row.owner == Owner.POLICY)
            shown = second["choices"][0]["logprobs"]
            values = (
                shown["token_logprobs"]
                if path == "/v1/completions"
                else [entry["logprob"] for entry in shown["content"]]
            )
            assert values == row.rollout_logprobs[-len(values) :].tolist()
            assert [(message.role, message.text) for message in row.messages] == [
                ("user", "<user>2+2?<assistant>"),
                ("assistant", "4"),
                ("user", "<user>sure?<assistant>"),
                ("assistant", "Yes."),
            ]

    asyncio.run(scene())


def test_each_path_of_the_page_is_answered(repository: Path) -> None:
    page = (repository / "docs" / "integrations" / "served-api.md").read_text(encoding="utf-8")
    paths = re.findall(r"`(GET|POST) (/\S+)`", page)
    assert len(paths) == 11

    async def scene() -> None:
        async with (
            serving(Scripted(["a"])) as (_, client),
            httpx.AsyncClient(base_url=root_of(client)) as raw,
        ):
            headers = {"authorization": f"Bearer {client.api_key}"}
            for method, path in paths:
                answer = await raw.request(method, path, headers=headers, content=b"{}")
                expected = {"/v1/responses/ID": 404}.get(path, 200 if method == "GET" else 400)
                assert answer.status_code == expected, path

    asyncio.run(scene())


def test_several_prompts_have_a_completion_each() -> None:
    async def scene() -> None:
        async with serving(Scripted(["a", "b"])) as (session, client):
            answer = await client.completions.create(model="policy", prompt=["one", "two"])
            assert sorted(choice.text for choice in answer.choices) == ["a", "b"]
            assert [choice.index for choice in answer.choices] == [0, 1]
            assert len(session.strands) == 2

    asyncio.run(scene())


def test_a_stream_of_completions_has_an_event_for_each_choice() -> None:
    async def scene() -> None:
        async with serving(Refusing(["It is 7."])) as (session, client):
            stream = await client.completions.create(
                model="any-name",
                prompt=["one", "two"],
                stream=True,
                stream_options={"include_usage": True},
                logprobs=0,
                extra_body={"return_token_ids": True},
            )
            *chunks, last = [chunk async for chunk in stream]
            choices = [choice for chunk in chunks for choice in chunk.choices]
            assert [choice.index for choice in choices] == [0, 1]
            for choice, strand in zip(choices, session.strands, strict=True):
                completion = strand.tip.completion
                assert (choice.text, choice.finish_reason) == ("It is 7.", "stop")
                assert choice.token_ids == completion.tokens.tolist()
                assert choice.logprobs.token_logprobs == completion.logprobs.tolist()
            n_sampled = sum(len(choice.token_ids) for choice in choices)
            assert (last.choices, last.usage.completion_tokens) == ([], n_sampled)
            with pytest.raises(BadRequestError, match="isn't in the model's vocab"):
                await client.completions.create(model="any-name", prompt=[10**6], stream=True)

    asyncio.run(scene())


REFUSED = {
    "a prompt of other types": ("/v1/completions", {"prompt": [1.5]}, "prompt"),
    "no prompt": ("/v1/completions", {"prompt": ""}, "a prompt has no tokens"),
    "a token of no model": ("/v1/completions", {"prompt": [10**6]}, "isn't in the model's vocab"),
    "a negative token": ("/v1/completions", {"prompt": [-1]}, "prompt"),
    "a stream": (
        "/inference/v1/generate",
        {"token_ids": [1], "sampling_params": {}, "stream": True},
        "not streamed",
    ),
    "an echo": (
        "/v1/completions",
        {"prompt": "a", "echo": True, "logprobs": 1},
        "only the sampled",
    ),
    "two answers": ("/v1/completions", {"prompt": "a", "n": 2}, "one request for each answer"),
    "alternatives": ("/v1/completions", {"prompt": "a", "logprobs": 2}, "only the sampled"),
    "a text far too long": ("/v1/completions", {"prompt": "a" * 200_000}, "a text has 200000"),
    "a conversation far too long": (
        "/tokenize",
        {"messages": [{"role": "user", "content": "a" * 200_000}]},
        "a text has 200000",
    ),
    "more log-probabilities than an answer holds": (
        "/v1/completions",
        {"prompt": [[1]] * 500, "max_tokens": 5000, "logprobs": 0},
        "the answer may have 2,048,000 log-probabilities",
    ),
    "no sampling": ("/inference/v1/generate", {"token_ids": [1]}, "sampling_params"),
    "no tokens": ("/inference/v1/generate", {"token_ids": [], "sampling_params": {}}, "token_ids"),
    "another temperature": (
        "/inference/v1/generate",
        {"token_ids": [1], "sampling_params": {"temperature": 0.5}},
        "temperature=0.5, but the run samples",
    ),
    "a minimum": (
        "/inference/v1/generate",
        {"token_ids": [1], "sampling_params": {"min_tokens": 3}},
        "min_tokens=3; it would change the tokens",
    ),
    "images": (
        "/inference/v1/generate",
        {"token_ids": [1], "sampling_params": {}, "features": {"mm_hashes": {"image": ["a"]}}},
        "features: this endpoint takes text only",
    ),
    "text and messages": ("/tokenize", {"prompt": "a", "messages": HI}, "either prompt or"),
    "neither": ("/tokenize", {}, "either prompt or messages"),
    "a word as token": ("/detokenize", {"tokens": ["a"]}, "tokens"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_completed_is_refused(what: str) -> None:
    path, body, reason = REFUSED[what]

    async def scene() -> None:
        async with serving(Refusing(["a"])) as (session, client):
            status, answer = await post(client, path, body)
            assert status == 400
            assert reason in answer["error"]["message"]
            assert session.strands == []

    asyncio.run(scene())


def test_texts_and_conversations_are_tokenized_as_for_a_request() -> None:
    async def scene() -> None:
        async with serving(Scripted(["a"])) as (session, client):
            await client.chat.completions.create(
                model="policy",
                messages=HI,
                tools=TOOLS,
            )
            _, chat = await post(client, "/tokenize", {"messages": HI, "tools": TOOLS})
            assert chat["tokens"] == session.latest_answer.prompt.tolist()
            assert chat["count"] == len(chat["tokens"])
            assert chat["max_model_len"] == session.max_context
            _, text = await post(client, "/tokenize", {"prompt": "hé", "return_token_strs": True})
            assert text["tokens"] == encode("hé")
            assert len(text["token_strs"]) == text["count"]
            _, back = await post(client, "/detokenize", {"tokens": text["tokens"]})
            assert back == {"prompt": "hé"}

    asyncio.run(scene())


def test_one_prompt_that_is_refused_aborts_the_others() -> None:
    async def scene() -> AgentSession:
        proxy = Proxy()
        async with serving(Refusing(["a"]), proxy=proxy) as (session, client):
            with pytest.raises(BadRequestError):
                await client.with_options(max_retries=0).completions.create(
                    model="policy", prompt=[[1], [10**6]]
                )
            return session

    assert asyncio.run(scene()).strands == []


def test_texts_are_tokenized_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long text takes seconds, in which no other request would be answered."""
    threads = []
    tokenizer_type = type(RENDERER.tokenizer)
    plain_encode = tokenizer_type.encode

    def encode_and_note(self, *arguments, **options):
        threads.append(threading.current_thread().name)
        return plain_encode(self, *arguments, **options)

    async def scene() -> None:
        async with serving(Scripted(["a"])) as (_, client):
            monkeypatch.setattr(tokenizer_type, "encode", encode_and_note)
            await post(client, "/tokenize", {"prompt": "hi"})
            await post(client, "/v1/completions", {"prompt": ["hi", "ho"]})

    asyncio.run(scene())
    assert len([name for name in threads if name.startswith("render")]) >= 3


def test_ignored_fields_are_ignored_in_sampling_params_too() -> None:
    async def scene() -> None:
        proxy = Proxy(settings=AgentServerSettings(ignored=("temperature",)))
        async with serving(Scripted(["a"]), proxy=proxy) as (session, client):
            body = {"token_ids": [5], "sampling_params": {"temperature": 0.3}}
            assert (await post(client, "/inference/v1/generate", body))[0] == 200
            assert [sampling.temperature for _, sampling in session.generator.requests] == [1.0]

    asyncio.run(scene())


def test_many_prompts_of_a_request_leave_the_generator_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Long prompts wait outside of the generator; equal ones stay together, to be computed once."""
    monkeypatch.setattr(routes, "MAX_TOKENS_AT_ONCE", 4)
    waiting: list[list[int]] = []
    most = 0

    class Slow(Scripted):
        async def generate(self, tokens, sampling, media=()):
            nonlocal most
            waiting.append(list(tokens))
            most = max(most, len(waiting))
            await asyncio.sleep(0)
            waiting.remove(list(tokens))
            return await super().generate(tokens, sampling, media)

    async def scene() -> None:
        nonlocal most
        async with serving(Slow(["a"] * 20)) as (_session, client):
            for prompts, expected in ([[[i, 1] for i in range(9)], 2], [[[7, 7]] * 9, 9]):
                most = 0
                status, answer = await post(client, "/v1/completions", {"prompt": prompts})
                assert (status, most) == (200, expected)
                assert [choice["index"] for choice in answer["choices"]] == list(range(9))

    asyncio.run(scene())
